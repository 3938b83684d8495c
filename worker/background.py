"""Runs function calls in a background thread, one call at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class BackgroundCalls(Generic[Result]):
    """Background thread that runs one function call at a time while the caller continues.

    The background thread is a daemon, so that a call that never returns does not keep the process
    running.

    Args:
        name: Name of the background thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], Result]] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_under_way = False

    def start(self, call: Callable[[], Result]) -> None:
        """Start one function call in the background thread.

        Raises:
            RuntimeError: The caller has not yet taken the result of the previous background call.
        """
        if self._is_under_way:
            raise RuntimeError("the last task's result was not taken; call result() before start()")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._is_under_way = True
        self._calls.put(call)

    def result(self, timeout_seconds: float | None = None) -> Result | None:
        """Wait for the started call and return its result, or None if no call was started.

        Args:
            timeout_seconds: Longest time to wait for the background call, in seconds; None waits
                until the call ends.

        Raises:
            TimeoutError: The background call did not end within the time limit. The call keeps
                running.
            BaseException: The call in the background thread raised this error.
        """
        if not self._is_under_way:
            return None
        try:
            ended = self._ended.get(timeout=timeout_seconds)
        except queue.Empty:
            raise TimeoutError(
                f"{self._name}: the call did not end in {timeout_seconds:g} s"
            ) from None
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
