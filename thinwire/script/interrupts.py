"""Calls listeners at Ctrl-C while TensorFlow waits in a step and Python runs no signal handler.

Python notes a signal immediately, but runs its handler only when the main thread executes Python
code again. A training step may wait long for a slow worker, so at Ctrl-C a second thread must end
the wait. A background thread reads the signal numbers that Python writes to its wake-up descriptor
(signal.set_wakeup_fd).
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable

_listeners: list[Callable[[], None]] = []
_lock = threading.Lock()


def add_listener(listener: Callable[[], None]) -> None:
    """Call `listener` in a background thread at every Ctrl-C, in addition to Python's own handler.

    A listener is called once, however often it was added. A listener for Ctrl-C is also called at
    SIGTERM if Python handles SIGTERM, as in scripts that `thinwire run` starts.

    The first listener for Ctrl-C that is added in the main thread sets the process's wake-up
    descriptor for signals. If another library has already set the wake-up descriptor for signals,
    no listener is ever called.
    """
    with _lock:
        if listener not in _listeners:
            _listeners.append(listener)
    if threading.current_thread() is threading.main_thread():
        _install()


def remove_listener(listener: Callable[[], None]) -> None:
    """Remove a listener for Ctrl-C; do nothing if the listener is not registered."""
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)


@functools.cache
def _install() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
        return
    os.register_at_fork(after_in_child=_release)
    threading.Thread(target=_listen, args=(reader,), name="interrupts", daemon=True).start()


def _release() -> None:
    """Unset the wake-up descriptor in a forked child, which shares its pipe with the parent.

    With a shared wake-up pipe, a signal to the child would call the listeners in the parent
    process. Keras, for example, sends SIGTERM to end the forked processes of its pools.
    """
    signal.set_wakeup_fd(-1)


def _listen(reader: int) -> None:
    while numbers := os.read(reader, 64):
        if not {signal.SIGINT, signal.SIGTERM} & {*numbers}:
            continue
        with _lock:
            listeners = list(_listeners)
        for listener in listeners:
            listener()
