"""Freed memory goes back to the system.

glibc takes large blocks from the system and gives them back, until one has been freed: from then on blocks of up to
that size (32 MiB at most) come from its heaps, of which each thread has one and which seldom shrink. A server that has
decoded a few large pictures at the same time keeps a gigabyte.
"""

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_TRIM_BYTES = 128 * 1024
"""glibc's own, which it would raise as well."""
_LARGE_BYTES = 1024 * 1024


def give_freed_memory_back() -> None:
    """In this process, from now on: blocks of 1 MiB and more are the system's again as soon as they are freed. What
    the operator sets in `MALLOC_MMAP_THRESHOLD_` wins."""
    if platform.libc_ver()[0] != "glibc" or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
