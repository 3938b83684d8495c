"""Copies the Supervisor's records of a run to --report_dir, in a separate thread."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterable

from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.checkpoint_log import Fenced
from thinwire.runtime.persistence.fsspec_objects import open_objects
from thinwire.runtime.persistence.places import REPORTS
from thinwire.runtime.persistence.published_files import PublishedFiles
from thinwire.runtime.run.lock import LockOwner


class Publisher:
    """Copies files of a run directory to another storage, where each copy replaces the earlier
    copy.

    Published files that are not in the run directory are copied into it first, so that a Supervisor
    on another machine continues the records.

    Args:
        run_dir: Directory of the run, whose files are copied.
        address: Folder or address of the other storage, the value of --report_dir.
        begins_anew: True to remove the files that an earlier Supervisor published.

    Raises:
        ConfigurationError: The storage that --report_dir names cannot be read or written.
    """

    def __init__(self, run_dir: pathlib.Path, address: str, begins_anew: bool = False) -> None:
        self._run_dir, self._address = run_dir, address
        owner = str(LockOwner.here("Supervisor", 0))
        self._files = PublishedFiles(open_objects(address, REPORTS), owner)
        if begins_anew:
            self._files.discard()
        else:
            self._files.claim()
        if restored := self._files.restore(run_dir):
            logging.info("continuing the earlier records at %s: %s", address, ", ".join(restored))
        self._wake = threading.Condition()
        self._next: dict[str, bytes] = {}
        self._due = self._busy = False
        self._failure: Exception | None = None
        threading.Thread(target=self._run, name="publisher", daemon=True).start()

    def put(self, names: Iterable[str]) -> None:
        """Read existing files of the run directory now, and queue their content for --report_dir.

        Args:
            names: Paths of the files, relative to the run directory.

        Raises:
            Fenced: Another Supervisor publishes to the address of --report_dir.
        """
        paths = {name: self._run_dir / name for name in names}
        files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
        with self._wake:
            if isinstance(self._failure, Fenced):
                raise self._failure
            self._next |= files
            self._due = True
            self._wake.notify_all()

    def flush(self) -> None:
        """Wait until all queued files are copied to --report_dir; copy files that failed once more.

        Raises:
            ConfigurationError: Some files could not be copied to --report_dir. The subclass Fenced
                means that another Supervisor publishes to the address of --report_dir.
        """
        with self._wake:
            self._wake.wait_for(lambda: not self._due and not self._busy)
            self._due = bool(self._next)
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._due and not self._busy)
            failure = self._failure
        if isinstance(failure, Fenced):
            raise failure
        if failure is not None:
            raise ConfigurationError(
                f"--{REPORTS}={self._address}: {failure}. {self._run_dir} has the complete "
                "records; make the storage reachable and writable, and copy them to the storage."
            )

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._due)
                files, self._next, self._due, self._busy = self._next, {}, False, True
            failure: Exception | None = None
            try:
                self._files.put(files)
            except Exception as error:  # noqa: BLE001 - flush() raises it
                failure = error
                logging.error("cannot copy %s to --report_dir: %s", ", ".join(files), error)
            with self._wake:
                # Files that could not be published are published with the next call. Newer content
                # of a file must replace the content that could not be published.
                if failure is not None:
                    self._next = files | self._next
                self._failure, self._busy = failure, False
                self._wake.notify_all()
