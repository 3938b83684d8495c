"""Signals that end a node, heard while it works: the first gently, a second one at once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from thinwire.ops.run.settings import EXIT_INTERRUPTED

#: Ctrl-C, and what `kill` and service managers send.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: What comes so soon after the first signal is the same wish: a service manager tells every process
#: of a group, and those that start others pass on what they hear.
SAME_WISH_SECONDS = 1.0

#: Hears (signal number, frame).
Handler = Callable[[int, Any], None]


def end_at_once(number: int, frame: Any) -> None:
    """End this process without another word; what is lost is what `kill -9` loses."""
    del number, frame
    os._exit(EXIT_INTERRUPTED)


@contextlib.contextmanager
def heard_by(
    handler: Handler,
    numbers: Sequence[signal.Signals] = END_SIGNALS,
    insisted: Handler = end_at_once,
) -> Iterator[None]:
    """Let signals be heard inside the block; main thread only.

    Args:
        handler: Hears the first one.
        numbers: Which.
        insisted: Hears those that come more than a second after it.
    """
    first_at: list[float] = []

    def hear(number: int, frame: Any) -> None:
        now = time.monotonic()
        if not first_at:
            first_at.append(now)
            handler(number, frame)
        elif now - first_at[0] > SAME_WISH_SECONDS:
            insisted(number, frame)

    previous = [(number, signal.signal(number, hear)) for number in numbers]
    try:
        yield
    finally:
        for number, before in previous:
            signal.signal(number, before)
