"""Threads for gRPC's calls that end with the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any


class DaemonThreads(futures.Executor):
    """One daemon thread per call: a stream holds its thread for life, and none outlives main.

    The standard pool joins its threads at exit, so a process that fails without stopping its
    server would never end.
    """

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a call in a thread of its own; see futures.Executor."""
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - handed to whoever holds the future
                future.set_exception(error)

        threading.Thread(target=run, name="grpc-call", daemon=True).start()
        return future
