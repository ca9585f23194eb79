"""Memory as the system tells it: how much this process has, how much is left for all that run here,
and whether the system has ended some for want of it."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path


def resident_bytes() -> int:
    """How much memory this process has; 0: this system does not tell."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def memory_left(root: Path = Path("/")) -> tuple[int, int] | None:
    """How many bytes are left for whatever runs here, and of how many; None: it is not told.

    Of the machine and of the container, if there is one, what is scarcer. What files are cached in
    is given back when it is wanted, and is left.
    """
    places = [_of_machine(root), *(_of_group(root / path) for path in _groups(root))]
    known = [each for each in places if each is not None]
    return min(known, key=lambda each: each[0] / each[1], default=None)


def _of_machine(root: Path) -> tuple[int, int] | None:
    kilobytes = _counts_in(root / "proc/meminfo")
    if not kilobytes.keys() >= {"MemAvailable:", "MemTotal:"}:
        return None
    return kilobytes["MemAvailable:"] << 10, kilobytes["MemTotal:"] << 10


def _of_group(group: Path) -> tuple[int, int] | None:
    """As the second version of control groups tells it, or as the first does."""
    for limit, used, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such file, or `max`: there is no limit
            limit_bytes = int((group / limit).read_text())
            counts = _counts_in(group / "memory.stat")
            names = f"{prefix}inactive_file", f"{prefix}active_file"
            cached_bytes = sum(counts.get(name, 0) for name in names)
            used_bytes = int((group / used).read_text()) - cached_bytes
            return max(0, limit_bytes - used_bytes), limit_bytes
    return None


def oom_kills() -> int | None:
    """How many processes the system has killed here for want of memory, as far as it tells.

    It counts in this process's cgroup and on the whole machine; more than before means that one
    was. None: this system does not count.
    """
    counts = [count for file in _oom_counters() if (count := _count_in(file)) is not None]
    return sum(counts) if counts else None


def _oom_counters() -> list[Path]:
    root = Path("/")
    names = ("memory.events", "memory.oom_control")
    files = [root / group / name for group in _groups(root) for name in names]
    return [root / "proc/vmstat", *files]


def _count_in(file: Path) -> int | None:
    return _counts_in(file).get("oom_kill")


@cache
def _groups(root: Path) -> list[str]:
    """The directories of the control groups that bound this process's memory, below the root."""
    groups: set[str] = set()
    with contextlib.suppress(OSError), open(root / "proc/self/cgroup") as told:
        for line in told:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers == "":
                # In a container its own directory may be the root of what is mounted.
                groups |= {f"sys/fs/cgroup{path}".rstrip("/"), "sys/fs/cgroup"}
            elif "memory" in controllers.split(","):
                groups |= {f"sys/fs/cgroup/memory{path}".rstrip("/"), "sys/fs/cgroup/memory"}
    return sorted(groups)


def _counts_in(file: Path) -> dict[str, int]:
    """Of lines such as `MemTotal:  16316412 kB`."""
    counts = {}
    with contextlib.suppress(OSError), open(file) as lines:
        for line in lines:
            name, count, *_ = [*line.split(), "", ""]
            if count.isdigit():
                counts[name] = int(count)
    return counts
