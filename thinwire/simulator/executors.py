"""Executors that compute gradients for a simulation, and the number of concurrent gradients."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

Result = TypeVar("Result")
Given = ParamSpec("Given")


class InlineExecutor(Executor):
    """Executor whose `submit` runs a function; functions that a running one submits run later."""

    def __init__(self) -> None:
        """Create an executor with an empty queue of function calls."""
        self._waiting: deque[Callable[[], None]] = deque()
        self._runs = False

    def submit(
        self, fn: Callable[Given, Result], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Future[Result]:
        """Run a function, return its future; a function that a running one submits runs later."""
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
    """Return the number of gradients that a simulation computes concurrently.

    The number of concurrent gradients is the number of CPU cores, but at most the number of
    workers. On a GPU, a simulation computes one gradient at a time.
    """
    return 1 if on_gpu else min(_num_cores(), nb_workers)


def threads_of_each(threads: int, together: int) -> int:
    """Return the number of TensorFlow threads that compute one gradient.

    If there are as many workers as CPU cores or more, one thread computes each gradient. A gradient
    that one thread computes has the same bits on any number of CPU cores.

    Args:
        threads: Value of --worker_threads; 0: share the cores equally.
        together: Number of gradients that the simulation computes concurrently.
    """
    return threads or max(1, _num_cores() // together)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
