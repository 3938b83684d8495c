"""Handles SIGINT and SIGTERM: the first ends a node gently, a second one immediately."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

#: Exit code of a node that SIGINT or SIGTERM has ended (docs/reference/operations.md).
EXIT_INTERRUPTED = 130
#: Signals that end a node: Ctrl-C sends SIGINT, and `kill` and service managers send SIGTERM.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Time after the first signal, in seconds, within which a second signal counts as the same request.
#: A node may receive one request twice, because a service manager signals every process of a group,
#: and a parent process forwards its signals.
SAME_REQUEST_SECONDS = 1.0

#: Signal handler, which Python calls with (signal number, stack frame).
Handler = Callable[[int, Any], None]


def end_immediately(number: int, frame: Any) -> None:
    """End this process without cleanup, as `kill -9` does."""
    os._exit(EXIT_INTERRUPTED)


def handle_first_signals() -> None:
    """Make SIGINT and SIGTERM end this process immediately, until its role handles signals.

    A process calls `handle_first_signals` in its main thread at its start, when there is nothing to
    clean up, because a KeyboardInterrupt during an import can become a different error. The parent
    process may have blocked signals until the Python interpreter is ready. `handle_first_signals`
    unblocks signals, so that pending signals take effect.
    """
    for number in END_SIGNALS:
        signal.signal(number, end_immediately)
    admit_signals()


def admit_signals() -> None:
    """Unblock SIGINT and SIGTERM, which the parent process blocks while this process starts."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)


@contextlib.contextmanager
def handle_signals(
    handler: Handler,
    numbers: Sequence[signal.Signals] = END_SIGNALS,
    insisted: Handler = end_immediately,
) -> Iterator[None]:
    """Handle signals inside the with block by the given handlers, in the main thread.

    Args:
        handler: Function that is called for the first signal.
        numbers: Numbers of the signals to handle.
        insisted: Function that is called for a signal more than `SAME_REQUEST_SECONDS` after the
            first signal.
    """
    first_at: list[float] = []

    def on_signal(number: int, frame: Any) -> None:
        now = time.monotonic()
        if not first_at:
            first_at.append(now)
            handler(number, frame)
        elif now - first_at[0] > SAME_REQUEST_SECONDS:
            insisted(number, frame)

    previous = [(number, signal.signal(number, on_signal)) for number in numbers]
    try:
        yield
    finally:
        for number, before in previous:
            signal.signal(number, before)
