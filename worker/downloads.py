"""Files that `keras.utils.get_file` downloads: once for all processes of a run on this host.

Every worker runs the script, so each would download the same file into the same cache at the same
time. Keras takes a file that exists for complete, so one worker would read what another is still
writing; and with each call it extracts an archive again, over files that others read. So one
process of a host downloads at a time, and what it has finished is there for the others.
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
    """Files that the processes of a run have downloaded on this host.

    Args:
        folder: In the run directory, where the processes of this host find the list.
        began: When the run began, in seconds since 1970.
    """

    def __init__(self, folder: pathlib.Path, began: float) -> None:
        self._list = folder / f"{DOWNLOADS}{socket.gethostname()}"
        self._began = began
        self._had: set[str] = set()  # calls that this process has made before

    def share(self, get_file: Callable[..., str]) -> Callable[..., str]:
        """Return a function like Keras' `get_file`, which one process calls at a time."""

        @functools.wraps(get_file)
        def get_shared_file(*args: Any, **keywords: Any) -> str:
            call = repr((args, sorted(keywords.items())))
            with self._alone() as done:
                path = done.get(call, "")
                # A script that repeats a call wants the file again, as with force_download.
                if call in self._had or not os.path.exists(path):
                    path = str(get_file(*args, **keywords))
                    self._note(call, path)
                self._had.add(call)
            return path

        return get_shared_file

    @contextlib.contextmanager
    def _alone(self) -> Iterator[dict[str, str]]:
        """Keep the other processes waiting; yield the calls that are finished, with their paths.

        The operating system ends the wait when this process ends, however it ends.
        """
        try:
            descriptor = self._lock()
        except OSError as error:
            logging.warning("downloads are not shared among this host's workers: %s", error)
            yield {}
            return
        try:
            yield self._finished()
        finally:
            os.close(descriptor)

    def _lock(self) -> int:
        """Wait until no other process has the list; return its descriptor, which keeps it."""
        self._list.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._list, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logging.info("waiting for the download of another process of this host")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _finished(self) -> dict[str, str]:
        finished = {}
        for line in self._list.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a process was killed while it wrote
                began, call, path = json.loads(line)
                if began == self._began:
                    finished[call] = path
        return finished

    def _note(self, call: str, path: str) -> None:
        with contextlib.suppress(OSError), open(self._list, "a", encoding="utf-8") as file:
            file.write("\n" + json.dumps([self._began, call, path]))  # not behind half a line
