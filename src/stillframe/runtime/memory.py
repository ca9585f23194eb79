"""How the C library of a slot's process keeps the memory that columns come and go in.

glibc gives a block of 128 KiB or more back to the system as soon as it is freed, and the next
column of that size is made of fresh pages, which the kernel clears one by one. A column of a batch
of 32,768 records is twice that large: generating such batches takes twice as long that way.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 32 * 1024 * 1024
"""The most glibc takes. What is larger is state that grows, and still goes back when freed."""
_TRIM_THRESHOLD_BYTES = 256 * 1024 * 1024
"""How much free memory at the end of the heap is kept."""


def keep_freed_memory() -> bool:
    """Let freed columns be used again by this process; whether the C library can do that."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    set_mmap = mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    set_trim = mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
    return bool(set_mmap and set_trim)
