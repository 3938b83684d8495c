"""Executors that compute gradients, and how many gradients are computed concurrently."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

Result = TypeVar("Result")
Given = ParamSpec("Given")


class InlineExecutor(Executor):
    """Executor that runs each call in `submit`. Calls that a running call submits run after it."""

    def __init__(self) -> None:
        """Create an executor with an empty queue of calls."""
        self._waiting: deque[Callable[[], None]] = deque()
        self._runs = False

    def submit(
        self, fn: Callable[Given, Result], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Future[Result]:
        """Run a call and return its done future; a call from inside another call runs later."""
        future: Future[Result] = Future()
        self._waiting.append(lambda: future.set_result(fn(*args, **kwargs)))
        if not self._runs:
            self._runs = True
            try:
                while self._waiting:
                    self._waiting.popleft()()
            finally:
                self._runs = False
        return future


def num_together(nb_workers: int, on_gpu: bool) -> int:
    """Return the number of gradients to compute concurrently.

    The number is one per CPU core, but at most one per worker. A GPU computes one gradient at a
    time.
    """
    return 1 if on_gpu else min(_num_cores(), nb_workers)


def threads_of_each(threads: int, together: int) -> int:
    """Return the number of TensorFlow threads for one gradient.

    With at least as many workers as cores, each gradient gets one thread. A gradient then has the
    same bits on any number of cores.

    Args:
        threads: Value of --worker_threads; 0: share the cores equally.
        together: Number of gradients that are computed concurrently.
    """
    return threads or max(1, _num_cores() // together)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
