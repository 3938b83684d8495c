"""Where gradients are computed: several of them in threads, while virtual time passes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

Result = TypeVar("Result")
Given = ParamSpec("Given")


class InlineExecutor(Executor):
    """Runs what is submitted before `submit` returns, and what that submits after it."""

    def __init__(self) -> None:
        """Have nothing to run."""
        self._waiting: deque[Callable[[], None]] = deque()
        self._runs = False

    def submit(
        self, fn: Callable[Given, Result], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Future[Result]:
        """Run a call; its future is done, if no other call has submitted it."""
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
    """Return how many gradients to compute together: one a core, as far as there are workers."""
    return 1 if on_gpu else min(_num_cores(), nb_workers)


def threads_of_each(threads: int, together: int) -> int:
    """Return TensorFlow's threads for one gradient of so many; `threads` is --worker_threads.

    Fixed where workers are many, so that a gradient has the same bits on any number of cores.
    """
    return threads or max(1, _num_cores() // together)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
