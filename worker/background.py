"""One call at a time in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class BackgroundCalls(Generic[Result]):
    """Runs calls, one after the other, while whoever has made them does something else.

    The thread is a daemon: a call that never returns keeps no process alive.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], Result]] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_under_way = False

    def start(self, call: Callable[[], Result]) -> None:
        """Begin a call; the result of the one before must have been taken."""
        if self._is_under_way:
            raise RuntimeError("the result of the last call was not taken")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._is_under_way = True
        self._calls.put(call)

    def result(self, timeout_seconds: float | None = None) -> Result | None:
        """Wait for the call that is under way; return what it returns, None if there is none.

        Args:
            timeout_seconds: How long to wait; None: until it ends.

        Raises:
            TimeoutError: It has not ended in this time, and goes on.
            BaseException: What the call raised.
        """
        if not self._is_under_way:
            return None
        try:
            ended = self._ended.get(timeout=timeout_seconds)
        except queue.Empty:
            raise TimeoutError(f"{self._name}: not ended in {timeout_seconds:g} s") from None
        self._is_under_way = False
        if isinstance(ended, BaseException):
            raise ended
        return ended

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            try:
                self._ended.put(call())
            except BaseException as error:  # noqa: BLE001 - raised again by `result`
                self._ended.put(error)
            del call
