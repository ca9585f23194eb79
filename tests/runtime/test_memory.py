"""What a slot's process does with the memory of columns that are gone."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import numpy as np
from stillframe.runtime.memory import keep_freed_memory

def faults_of_columns(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        np.ones(131_072, dtype=np.int64)  # a mebibyte, 256 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if keep_freed_memory():
    faults_of_columns(10)
    print(faults_of_columns(100))
"""


def test_the_memory_of_a_freed_column_is_used_for_the_next_one():
    # In a process of its own: the setting cannot be taken back.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    if not done.stdout:
        pytest.skip("the C library here has no mallopt")

    assert int(done.stdout) < 1_000, "a hundred columns of fresh pages have 25,600 faults"
