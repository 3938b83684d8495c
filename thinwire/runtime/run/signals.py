"""Signals that end a node: the first one gently, a second one immediately."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

#: What a process ends with that a signal has ended (docs/reference/operations.md).
EXIT_INTERRUPTED = 130
#: Ctrl-C, and what `kill` and service managers send.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: A signal this soon after the first is the same request: a service manager signals every process
#: of a group, and those that start others pass their signals on.
SAME_REQUEST_SECONDS = 1.0

#: Called with (signal number, frame).
Handler = Callable[[int, Any], None]


def end_immediately(number: int, frame: Any) -> None:
    """End this process without clean-up, as `kill -9` does."""
    del number, frame
    os._exit(EXIT_INTERRUPTED)


def handle_first_signals() -> None:
    """End immediately on signals until a role handles them; main thread only.

    For the first moments of a process, when there is nothing to clean up: a KeyboardInterrupt in
    the middle of an import shows as anything. Signals that whoever started this process has
    blocked until now, lest they meet an interpreter that is not ready, take effect here.
    """
    for number in END_SIGNALS:
        signal.signal(number, end_immediately)
    admit_signals()


def admit_signals() -> None:
    """Let signals through that a watchdog has blocked for the first moments of this process."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)


@contextlib.contextmanager
def raise_at_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt at a signal inside the block, so that what was started is ended."""
    with handle_signals(signal.default_int_handler):
        yield


@contextlib.contextmanager
def handle_signals(
    handler: Handler,
    numbers: Sequence[signal.Signals] = END_SIGNALS,
    insisted: Handler = end_immediately,
) -> Iterator[None]:
    """Handle signals inside the block; main thread only.

    Args:
        handler: Called for the first one.
        numbers: The signals.
        insisted: Called for those that come more than a second after it.
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
