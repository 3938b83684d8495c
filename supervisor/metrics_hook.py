"""Calls the user function of ``--on_metrics=module:function`` with every record of a run.

The user function of --on_metrics runs in a separate thread, so that its errors and its delays do
not affect the run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pathlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from thinwire.ops.types import ConfigurationError

END_KIND = "end"
#: Largest number of records that wait for the user function. If the queue is full, the oldest
#: record is dropped.
_MOST_WAITING = 1000
#: Time in seconds for which the end of a run waits until the user function has handled the queued
#: records.
_END_SECONDS = 30.0

MetricsFunction = Callable[[dict[str, Any]], object]


def check(text: str, folders: Sequence[pathlib.Path] = ()) -> None:
    """Check that the module of ``module:function`` exists, without importing it.

    Args:
        text: Value of the flag --on_metrics, ``module:function``.
        folders: Folders to search for the module, in addition to the working directory and the
            installed packages.

    Raises:
        ConfigurationError: The module that --on_metrics names does not exist.
    """
    name = text.partition(":")[0]
    _look_in(folders)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ConfigurationError(
            f"--on_metrics={text}: there is no module {name}; expected an installed module, or "
            f"{name.partition('.')[0]}.py in the working directory or next to the script."
        )


def load(text: str, folders: Sequence[pathlib.Path] = ()) -> MetricsFunction:
    """Import the function of ``module:function`` and return it.

    Args:
        text: Value of the flag --on_metrics, ``module:function``.
        folders: Folders to search for the module, in addition to the working directory and the
            installed packages.

    Raises:
        ConfigurationError: The module that --on_metrics names cannot be imported, or does not have
            the function.
    """
    check(text, folders)
    name, _, function_name = text.partition(":")
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"--on_metrics={text}: importing {name} failed ({type(error).__name__}: {error}); "
            f"expected an importable module. Run python -c 'import {name}' to see the error."
        ) from error
    function: Any = module
    for part in function_name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise ConfigurationError(
            f"--on_metrics={text}: the module {name} has no function {function_name}; expected a "
            "function that takes a record (a dict). Name the function as module:function."
        )
    called: MetricsFunction = function
    return called


class MetricsHook:
    """Passes the records of a run to a user function, in order, in a separate thread.

    Args:
        text: Flag that names the user function, for log messages.
        function: Function that takes a record: a dict of plain values with the key ``kind``.
        about: Entries that describe the run, which are added to every record.
    """

    def __init__(self, text: str, function: MetricsFunction, about: Mapping[str, Any]) -> None:
        self._text, self._function, self._about = text, function, dict(about)
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._num_failed = self._num_left_out = 0
        self._thread = threading.Thread(target=self._work, name="on_metrics", daemon=True)
        self._thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        """Queue a record (evaluation, status or event) for the user function of --on_metrics; never
        block. Only one thread may queue records for the user function.
        """
        if self._waiting.full():
            with contextlib.suppress(queue.Empty):
                self._waiting.get_nowait()
            self._num_left_out += 1
            if self._num_left_out == 1:
                logging.warning(
                    "%s is slow: %d records are queued for the function; the oldest are dropped",
                    *(self._text, _MOST_WAITING),
                )
        self._waiting.put_nowait({**record, **self._about})

    def close(self, timeout_seconds: float = _END_SECONDS) -> None:
        """Pass queued records to the user function for a limited time; `close` may be called
        twice.
        """
        if not self._thread.is_alive():
            return
        deadline = time.monotonic() + timeout_seconds
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logging.warning(
                "%s has not returned within %g s; the run ends without waiting for the function",
                *(self._text, timeout_seconds),
            )
        elif self._num_failed:
            logging.warning("%s raised an error for %d records", self._text, self._num_failed)

    def _work(self) -> None:
        while (record := self._waiting.get()) is not None:
            try:
                self._function(record)
            except BaseException:  # noqa: BLE001 - a SystemExit must not end the run either
                self._num_failed += 1
                if self._num_failed == 1:
                    logging.exception(
                        "the function %s raised an error for a record of kind %r; "
                        "the run continues, and further errors of the function are only counted",
                        *(self._text, record.get("kind")),
                    )


def _look_in(folders: Sequence[pathlib.Path]) -> None:
    """Append the working directory and the given folders to Python's module search path."""
    for folder in (pathlib.Path.cwd(), *folders):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
