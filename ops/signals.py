"""Signals that end a node, heard while it works."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

#: Ctrl-C, and what `kill` and service managers send.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def heard_by(
    handler: Callable[[int, Any], None], numbers: Sequence[signal.Signals] = END_SIGNALS
) -> Iterator[None]:
    """Let `handler` (signal number, frame) hear signals inside the block; main thread only."""
    previous = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, before in previous:
            signal.signal(number, before)
