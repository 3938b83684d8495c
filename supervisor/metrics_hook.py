"""A function of the user's that gets every record of a run: ``--on_metrics=module:function``.

It runs in a thread of its own, so that neither its errors nor its slowness reach the run.
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
#: Records that wait for a slow function.
_MOST_WAITING = 1000
#: How long the end of a run waits for the function.
_END_SECONDS = 30.0

MetricsFunction = Callable[[dict[str, Any]], object]


def check(text: str, folders: Sequence[pathlib.Path] = ()) -> None:
    """Look for the module of ``module:function`` without importing it.

    Args:
        text: The value of --on_metrics.
        folders: Where modules may lie besides the working directory and the installed ones.

    Raises:
        ConfigurationError: There is none.
    """
    name = text.partition(":")[0]
    _look_in(folders)
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ConfigurationError(
            f"--on_metrics={text}: there is no module {name}; expected one that is installed, or "
            f"{name.partition('.')[0]}.py in the working directory or beside the script."
        )


def load(text: str, folders: Sequence[pathlib.Path] = ()) -> MetricsFunction:
    """Import the function of ``module:function``; arguments as of `check`.

    Raises:
        ConfigurationError: The module cannot be imported, or has no such function.
    """
    check(text, folders)
    name, _, function_name = text.partition(":")
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"--on_metrics={text}: importing {name} failed ({type(error).__name__}: {error}); "
            f"expected a module that can be imported. Run python -c 'import {name}'."
        ) from error
    function: Any = module
    for part in function_name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise ConfigurationError(
            f"--on_metrics={text}: {name} has no function {function_name}; expected one that takes "
            "a record, a dict. Name it as module:function."
        )
    called: MetricsFunction = function
    return called


class MetricsHook:
    """Gives records to a function, in order, from a thread of its own.

    Args:
        text: How messages name the function.
        function: Takes a record: a dict of plain values with ``kind``.
        about: What every record has besides.
    """

    def __init__(self, text: str, function: MetricsFunction, about: Mapping[str, Any]) -> None:
        self._text, self._function, self._about = text, function, dict(about)
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._num_failed = self._num_left_out = 0
        self._thread = threading.Thread(target=self._work, name="on_metrics", daemon=True)
        self._thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        """Have a record given to the function; never waits. One thread calls this."""
        if self._waiting.full():
            with contextlib.suppress(queue.Empty):
                self._waiting.get_nowait()
            self._num_left_out += 1
            if self._num_left_out == 1:
                logging.warning(
                    "%s is slow: %d records wait for it; the oldest are left out from now on",
                    *(self._text, _MOST_WAITING),
                )
        self._waiting.put_nowait({**record, **self._about})

    def close(self, timeout_seconds: float = _END_SECONDS) -> None:
        """Give the function what waits, for so long; harmless when repeated."""
        if not self._thread.is_alive():
            return
        deadline = time.monotonic() + timeout_seconds
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=timeout_seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logging.warning(
                "%s has not returned within %g s; the run ends without it",
                *(self._text, timeout_seconds),
            )
        elif self._num_failed:
            logging.warning("%s raised an error for %d records", self._text, self._num_failed)

    def _work(self) -> None:
        while (record := self._waiting.get()) is not None:
            try:
                self._function(record)
            except BaseException:  # noqa: BLE001 - whatever it is, a SystemExit too
                self._num_failed += 1
                if self._num_failed == 1:
                    logging.exception(
                        "%s raised an error for a record of kind %r; the run goes on, and further "
                        "errors of it are only counted",
                        *(self._text, record.get("kind")),
                    )


def _look_in(folders: Sequence[pathlib.Path]) -> None:
    """Let modules of these folders, and of the working directory, be imported."""
    for folder in (pathlib.Path.cwd(), *folders):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
