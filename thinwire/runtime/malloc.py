"""Process-wide settings that make malloc keep freed memory, so that large messages are fast.

The malloc settings must be made before TensorFlow and gRPC allocate memory, so this module imports
only the standard library.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any

# Numbers of malloc's parameters in glibc's malloc.h. Benchmarks of the transport gave the
# parameters' values.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_SETTINGS = (
    (_M_MMAP_THRESHOLD, 1 << 30),  # malloc maps only buffers of 1 GiB or more
    (_M_TRIM_THRESHOLD, 2**31 - 1),  # malloc never returns the top of the heap to the kernel
    (_M_TOP_PAD, 256 << 20),  # the heap grows in steps of 256 MiB
)


def keep_freed_memory() -> bool:
    """Make malloc reuse large buffers instead of mapping fresh pages for each buffer.

    Page faults in newly mapped buffers make large messages slow in Python. With the malloc settings
    of `keep_freed_memory`, a process never returns memory to the kernel. A process must call
    `keep_freed_memory` before anything else. Without glibc, `keep_freed_memory` has no effect.

    Returns:
        True if malloc accepted every setting; False without glibc.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    return [mallopt(parameter, value) for parameter, value in _SETTINGS] == [1] * len(_SETTINGS)


def return_freed_memory() -> None:
    """Return free memory to the kernel once, after the process's start, which needs much memory."""
    gc.collect()
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def _of_glibc(name: str) -> Any:
    """Return a function of glibc; None if the C library (musl, for example) lacks the function."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
