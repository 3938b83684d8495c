"""Signals that end a node: the first signal ends it gently, a second signal immediately."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

#: Exit code of a node that SIGINT or SIGTERM has ended (docs/reference/operations.md).
EXIT_INTERRUPTED = 130
#: Signals that end a node: Ctrl-C sends SIGINT; `kill` and service managers send SIGTERM.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Time after the first signal, in seconds, within which a second signal counts as the same request:
#: a service manager signals every process of a group, and a parent process forwards its signals.
SAME_REQUEST_SECONDS = 1.0

#: Signal handler, which Python calls with (signal number, stack frame).
Handler = Callable[[int, Any], None]


def end_immediately(number: int, frame: Any) -> None:
    """End this process without cleanup, as `kill -9` does."""
    os._exit(EXIT_INTERRUPTED)


def handle_first_signals() -> None:
    """Make signals end this process immediately until a role handles signals; main thread only.

    Call this at the start of a process, when there is nothing to clean up: a KeyboardInterrupt
    during an import can show up as a different error. The parent process may have blocked signals
    until the interpreter is ready; this call unblocks signals, and pending signals take effect.
    """
    for number in END_SIGNALS:
        signal.signal(number, end_immediately)
    admit_signals()


def admit_signals() -> None:
    """Unblock SIGINT and SIGTERM, which the parent blocks while this process starts."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)


@contextlib.contextmanager
def raise_at_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt at a signal inside the block, so that the block can clean up."""
    with handle_signals(signal.default_int_handler):
        yield


@contextlib.contextmanager
def handle_signals(
    handler: Handler,
    numbers: Sequence[signal.Signals] = END_SIGNALS,
    insisted: Handler = end_immediately,
) -> Iterator[None]:
    """Handle signals inside the block with the given handlers; main thread only.

    Args:
        handler: Called for the first signal.
        numbers: Numbers of the signals to handle.
        insisted: Called for a signal that arrives more than `SAME_REQUEST_SECONDS` after the first.
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
