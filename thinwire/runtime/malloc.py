"""Process-wide malloc settings: malloc keeps freed memory, so that large messages are fast.

The settings must be made before TensorFlow and gRPC allocate memory. So this module imports only
the standard library.
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
    (_M_MMAP_THRESHOLD, 1 << 30),  # no separate mapping for buffers below 1 GiB
    (_M_TRIM_THRESHOLD, 2**31 - 1),  # never return the top of the heap to the kernel
    (_M_TOP_PAD, 256 << 20),  # grow the heap in large steps
)


def keep_freed_memory() -> bool:
    """Make malloc reuse large buffers instead of mapping fresh pages for each buffer.

    Large messages are slow in Python because of page faults. The price of the settings is that the
    process never returns memory to the kernel. Call this function before anything else in a
    process. It does nothing without glibc.

    Returns:
        True if malloc accepted every setting.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    return [mallopt(parameter, value) for parameter, value in _SETTINGS] == [1] * len(_SETTINGS)


def return_freed_memory() -> None:
    """Return memory that is free now to the kernel, once: memory that only the start needed."""
    gc.collect()
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def _of_glibc(name: str) -> Any:
    """Return a function of the C library; None if the library lacks it (musl, for example)."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
