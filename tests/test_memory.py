"""Memory as the system tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stillframe.memory import memory_left, oom_kills, resident_bytes

GIB = 1 << 30
MACHINE = {"proc/meminfo": f"MemTotal: {16 << 20} kB\nMemFree: 9 kB\nMemAvailable: {4 << 20} kB\n"}


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_what_is_left_is_that_of_the_machine_where_nothing_bounds_the_process(tmp_path):
    group = {"proc/self/cgroup": "0::/user.slice\n", "sys/fs/cgroup/user.slice/memory.max": "max\n"}
    assert memory_left(system(tmp_path, MACHINE | group)) == (4 * GIB, 16 * GIB)


@pytest.mark.parametrize(
    ("told", "where", "names"),
    [
        ("0::/job\n", "job", ("memory.max", "memory.current", "")),
        # In a container the process's own group may be what is mounted.
        ("0::/../elsewhere\n", "", ("memory.max", "memory.current", "")),
        (
            "3:cpu:/x\n4:memory:/job\n",
            "memory/job",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ),
    ],
)
def test_of_a_container_it_is_what_its_bound_leaves_besides_what_files_are_cached_in(
    tmp_path, told, where, names
):
    limit, used, prefix = names
    group = f"sys/fs/cgroup/{where}"
    files = {
        "proc/self/cgroup": told,
        f"{group}/{limit}": f"{2 * GIB}\n",
        f"{group}/{used}": f"{2 * GIB - 50_000}\n",
        f"{group}/memory.stat": f"anon 7\n{prefix}inactive_file 30000\n{prefix}active_file 10000\n",
    }
    assert memory_left(system(tmp_path, MACHINE | files)) == (90_000, 2 * GIB)


def test_the_scarcer_one_counts(tmp_path):
    files = {
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/job/memory.current": f"{GIB}\n",
    }
    assert memory_left(system(tmp_path, MACHINE | files)) == (4 * GIB, 16 * GIB)


def test_a_system_that_does_not_tell_is_not_guessed_about(tmp_path):
    assert memory_left(tmp_path) is None


def test_this_system_is_understood() -> None:
    if not Path("/proc/meminfo").exists():
        pytest.skip("this system has no /proc")
    left, limit = memory_left() or (0, 0)
    assert 0 < left <= limit
    assert 1 << 20 < resident_bytes() < limit


def test_what_the_system_has_killed_for_want_of_memory_is_counted_where_it_counts() -> None:
    if "oom_kill" not in Path("/proc/vmstat").read_text():
        pytest.skip("this system does not count them")
    assert (oom_kills() or 0) >= 0
    assert oom_kills() is not None
