"""A setting of the whole process: malloc keeps freed memory, so that large messages are fast.

It imports nothing but ctypes, for it comes before TensorFlow and gRPC allocate anything.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any

# Parameter numbers of glibc's malloc.h, and the values measured in the transport bench.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_SETTINGS = (
    (_M_MMAP_THRESHOLD, 1 << 30),  # no separate mapping for any buffer of ours
    (_M_TRIM_THRESHOLD, 2**31 - 1),  # never give the top of the heap back
    (_M_TOP_PAD, 256 << 20),  # grow the heap in large steps
)


def keep_freed_memory() -> bool:
    """Make malloc reuse large buffers instead of mapping fresh pages for each of them.

    Page faults are what makes large messages slow in Python. The price is that memory once used
    stays with the process. To be called first thing in a process; does nothing without glibc.

    Returns:
        Whether malloc accepted every setting.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    return [mallopt(parameter, value) for parameter, value in _SETTINGS] == [1] * len(_SETTINGS)


def return_freed_memory() -> None:
    """Give back what is free now, once: what only a process' start needed."""
    gc.collect()
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def _of_glibc(name: str) -> Any:
    """Return one of its functions; None without glibc, such as with musl."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
