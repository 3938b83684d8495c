"""Claims a Cluster's run directory before any node is started."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

from absl import logging

from thinwire.flags import launch
from thinwire.flags.slurm import SlurmStep
from thinwire.launcher.run_start import RunStart, find_start
from thinwire.launcher.watchdog import GRACE_SECONDS
from thinwire.runtime.persistence.places import discard_checkpoints, discard_records
from thinwire.runtime.run.directory import clear, lock_of, node_locks
from thinwire.runtime.run.lock import DirectoryLock, LockOwner
from thinwire.runtime.run.settings import Run

#: Nodes of a Cluster that was killed are ended by their watchdogs, which may take them this long.
PATIENCE_SECONDS = GRACE_SECONDS + 5.0


def claim_run_directory(
    run: Run,
    part: SlurmStep | None = None,
    patience_seconds: float = PATIENCE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Make sure that no other process writes here; clear the directory with --overwrite.

    The locks are released again for the nodes: each takes its own when it starts. Of a run in
    several parts, each claims what its own nodes write, and these clear it themselves.

    Args:
        run: The run's settings.
        part: Which nodes are started here; None: all.
        patience_seconds: For nodes of an earlier Cluster that are ending.
        clock: For tests.

    Raises:
        ConfigurationError: A process goes on writing there.
    """
    owner, deadline = LockOwner.here("Cluster", 0), clock() + patience_seconds
    with contextlib.ExitStack() as held:
        for lock in _locks(run, part):
            if lock.path.exists():  # else nobody has ever locked it
                held.enter_context(lock.take(owner, max(0.0, deadline - clock())))
        if run.overwrite and part is None:
            clear(run.run_dir)
            if run.checkpoint_dir is not None:
                discard_checkpoints(run.checkpoint_dir, None, str(owner))
            if run.report_dir is not None:
                discard_records(run.report_dir, str(owner))


def start_in_claimed_directory(
    run: Run, script: Sequence[str] = (), is_elsewhere: bool = False
) -> RunStart:
    """Claim a run directory, report how the run starts there, and clear it where it begins again.

    Args:
        run: The run's settings.
        script: That its workers run, and the script's arguments; empty: they run none.
        is_elsewhere: Whether PS run on other hosts, whose disks this one may not see.

    Raises:
        ConfigurationError: As `claim_run_directory` and `find_start` do.
    """
    part = launch.part_here()
    claim_run_directory(dataclasses.replace(run, overwrite=False), part)
    start = find_start(run, script, is_elsewhere)
    # The disk of another part may lack the PS's files: it cannot know whether the run begins.
    if part is None or part.is_first or start.finished is not None:
        logging.info("%s", start.line)
    for warning in run.method.warnings:
        logging.warning("%s", warning)
    if start.finished is None and start.run.overwrite:
        claim_run_directory(start.run, part)
    return start


def _locks(run: Run, part: SlurmStep | None) -> list[DirectoryLock]:
    """Return the locks of what is about to be written, or cleared: then those of all nodes."""
    if run.overwrite and part is None:
        return node_locks(run.run_dir)
    nodes = [("PS", shard) for shard in range(run.nb_ps)]
    nodes += [("Worker", worker) for worker in range(1, run.nb_workers + 1)]
    nodes.append(("Supervisor", 0))
    return [lock_of(run.run_dir, *node) for node in nodes if part is None or part.starts(*node)]
