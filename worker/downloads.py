"""Shares the files that `keras.utils.get_file` downloads among a run's processes on one host.

Every worker runs the script, so without sharing all workers of a host would download the same file
into the same cache at the same time. Keras treats an existing file as complete, so one worker would
read a file that another worker is still writing. Keras' `get_file` extracts an archive in every
call, over files that other workers read. Therefore one process of a host downloads at a time, and
the other processes use the finished file.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import pathlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

from absl import logging

from thinwire.runtime.run.script_settings import DOWNLOADS


class Downloads:
    """List of the files that the processes of a run have downloaded on this host.

    Args:
        folder: Folder in the run directory that contains the lists of downloads, one list per host.
        began: Time at which the training run began, in seconds since 1970. Entries of earlier runs
            are ignored.
    """

    def __init__(self, folder: pathlib.Path, began: float) -> None:
        self._list = folder / f"{DOWNLOADS}{socket.gethostname()}"
        self._began = began
        self._had: set[str] = set()  # calls of Keras' `get_file` that this process has made

    def share(self, get_file: Callable[..., str]) -> Callable[..., str]:
        """Return a replacement of Keras' `get_file` that runs in one process per host at a time."""

        @functools.wraps(get_file)
        def get_shared_file(*args: Any, **keywords: Any) -> str:
            call = repr((args, sorted(keywords.items())))
            with self._alone() as done:
                path = done.get(call, "")
                # A script that repeats a call of `get_file` must download the file again, for
                # instance with `force_download`.
                if call in self._had or not os.path.exists(path):
                    path = str(get_file(*args, **keywords))
                    self._note(call, path)
                self._had.add(call)
            return path

        return get_shared_file

    @contextlib.contextmanager
    def _alone(self) -> Iterator[dict[str, str]]:
        """Hold the download lock; yield the finished calls of `get_file` and the files' paths.

        The operating system releases the download lock when this process ends, even after a crash.
        """
        with contextlib.ExitStack() as held:
            try:
                self._list.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(self._list, os.O_RDWR | os.O_CREAT, 0o600)
                held.callback(os.close, descriptor)
                _lock(descriptor)
                finished = self._finished()
            except OSError as error:
                logging.warning(
                    "this host's workers cannot share downloads, so each worker downloads: %s",
                    error,
                )
                finished = {}
            yield finished

    def _finished(self) -> dict[str, str]:
        finished = {}
        for line in self._list.read_text(encoding="utf-8").splitlines():
            # skip a line that a killed process left incomplete
            with contextlib.suppress(ValueError):
                began, call, path = json.loads(line)
                if began == self._began:
                    finished[call] = path
        return finished

    def _note(self, call: str, path: str) -> None:
        with contextlib.suppress(OSError), open(self._list, "a", encoding="utf-8") as file:
            file.write(
                "\n" + json.dumps([self._began, call, path])
            )  # the text starts with "\n", because the last line of the file may be incomplete


def _lock(descriptor: int) -> None:
    """Wait for the lock of an open file and take it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logging.info("waiting for another process of this host to download the data set")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
