"""Ctrl-C while TensorFlow waits inside a step, where Python runs no signal handler.

The interpreter notes a signal immediately but runs its handler only when the main thread is back in
Python. A step that waits for other workers may take long, so another thread must cut it short: one
that reads what the interpreter writes to its wake-up descriptor.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

_listeners: list[Callable[[], None]] = []
_lock = threading.Lock()
_installed = False


def add_listener(listener: Callable[[], None]) -> None:
    """Call `listener` in another thread at every Ctrl-C; Python's own handler runs as well.

    So it is with SIGTERM where Python handles that, as for scripts of `thinwire run`.

    The descriptor is taken when this is first called in the main thread, for good, unless somebody
    else has it; then no listener is ever called.
    """
    with _lock:
        _listeners.append(listener)
    if threading.current_thread() is threading.main_thread():
        _install()


def remove_listener(listener: Callable[[], None]) -> None:
    """Call a listener no more."""
    with _lock:
        if listener in _listeners:
            _listeners.remove(listener)


def _install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
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
    """Leave the descriptor to the parent, whom a signal to this process does not concern.

    Keras' pools of processes end by SIGTERM.
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
