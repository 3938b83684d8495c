"""Files that shard 0 writes to the run directory: draws, worker groups, the run's summary."""

from __future__ import annotations

from collections.abc import Sequence

from absl import logging

from thinwire.ops.sync.base import Draw
from thinwire.ps.core import events
from thinwire.runtime.persistence.documents import write_json_atomically
from thinwire.runtime.run.directory import launched_with
from thinwire.runtime.run.finished import SETTINGS, deciding_settings, has_evaluated_summary
from thinwire.runtime.run.settings import Run
from thinwire.runtime.run.sync_files import DrawsFile, write_groups
from thinwire.runtime.telemetry import run_status


class RunRecords:
    """Writer of shard 0's files in the run directory. A full disk must not end the run, so an error
    while the run continues is only logged.

    Args:
        run: Settings of the training run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._draws = DrawsFile(run.run_dir)

    def record_draws(self, draws: Sequence[Draw]) -> None:
        """Append the newest draws (workers that take part in a round) to the file of draws."""
        try:
            self._draws.record(draws)
        except OSError as error:
            logging.warning("the file %s cannot be written: %s", self._draws.path, error)

    def propose_groups(self, found: events.GroupsChanged) -> None:
        """Write the groups of workers that shard 0 has measured to the run directory.

        A later run can use the worker groups that shard 0 has formed from measured speeds. A run
        does not use the worker groups that it writes, because it splits the data at its start.
        """
        if len(found.speeds) < self._run.nb_workers:
            return
        try:
            flags = write_groups(self._run.run_dir, found.groups, found.speeds)
        except OSError as error:
            logging.error("cannot write the file with the proposed worker groups: %s", error)
            return
        logging.info("flags that divide a later run's data by the workers' speed: %s", flags)

    def has_summary(self, version: int, stop_reason: str | None) -> bool:
        """Return True if a Supervisor has written the summary of the run that ended like this.

        Args:
            version: Number of updates that the shard has applied.
            stop_reason: Reason for the end of the run; None if the run has not ended.
        """
        return has_evaluated_summary(self._run, version, stop_reason)

    def write_summary(self, status: run_status.RunStatus) -> None:
        """Write the run's summary from shard 0's last status, without evaluations.

        Raises:
            OSError: The summary cannot be written to the disk.
        """
        summary = run_status.summarise(status, [])
        summary[SETTINGS] = deciding_settings(self._run)
        if self._run.model_is_offered:
            summary |= launched_with(self._run.run_dir)
        write_json_atomically(self._run.run_dir / "summary.json", summary)
