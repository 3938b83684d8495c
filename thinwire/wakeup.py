"""Ctrl-C while TensorFlow waits inside a step, where Python hears no signal.

The interpreter notes a signal at once but runs its handler only when the main thread is back in
Python. A step that waits for other workers may take long, so somebody must cut it short: a thread
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


def hear_interrupts(listener: Callable[[], None]) -> None:
    """Call `listener` in another thread at every Ctrl-C; Python's own handler runs as well.

    The descriptor is taken when this is first called in the main thread, for good, unless somebody
    else has it; then nothing is heard.
    """
    with _lock:
        _listeners.append(listener)
    if threading.current_thread() is threading.main_thread():
        _install()


def forget(listener: Callable[[], None]) -> None:
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
    threading.Thread(target=_listen, args=(reader,), name="interrupts", daemon=True).start()


def _listen(reader: int) -> None:
    while numbers := os.read(reader, 64):
        if signal.SIGINT not in numbers:
            continue
        with _lock:
            told = list(_listeners)
        for listener in told:
            listener()
