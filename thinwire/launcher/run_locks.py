"""Checks that no other process writes to a run's directory, before a node is started."""

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

#: Longest wait for directory locks that nodes of a killed Cluster still hold, in seconds. The
#: watchdogs end such nodes within GRACE_SECONDS.
PATIENCE_SECONDS = GRACE_SECONDS + 5.0


def claim_run_directory(
    run: Run,
    part: SlurmStep | None = None,
    patience_seconds: float = PATIENCE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Check that no other process writes to the run directory; with --overwrite, clear it.

    The launcher releases the directory locks before the nodes start, because each node locks its
    own folder. A task of a Slurm step locks only the folders of the nodes that the task starts, and
    these nodes clear their folders themselves.

    Args:
        run: Settings of the run, from the flags.
        part: The task of a Slurm step that this process is; None if this process starts all nodes.
        patience_seconds: Longest wait for directory locks that ending nodes of an earlier run still
            hold, in seconds.
        clock: Function that returns the current time in seconds; replaced in tests.

    Raises:
        ConfigurationError: Another process still writes to the run directory.
    """
    owner, deadline = LockOwner.here("Cluster", 0), clock() + patience_seconds
    with contextlib.ExitStack() as held:
        for lock in _locks(run, part):
            if lock.path.exists():  # a lock without a file was never taken
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
    """Claim a run directory, log if the run begins or resumes; clear the directory of a new run.

    Args:
        run: Settings of the run, from the flags.
        script: Path and arguments of the user's script; empty if the workers run no script.
        is_elsewhere: True if the PS may run on hosts that do not share this host's disk.

    Raises:
        ConfigurationError: Another process writes to the run directory, or `find_start` rejects the
            run's settings.
    """
    part = launch.part_here()
    claim_run_directory(dataclasses.replace(run, overwrite=False), part)
    start = find_start(run, script, is_elsewhere)
    # Only the first task of a Slurm step starts the PS. The disk of a later Slurm task may lack the
    # files of the PS, so the later task cannot know whether the run begins or resumes.
    if part is None or part.is_first or start.finished is not None:
        logging.info("%s", start.line)
    for warning in run.method.warnings:
        logging.warning("%s", warning)
    if start.finished is None and start.run.overwrite:
        claim_run_directory(start.run, part)
    return start


def _locks(run: Run, part: SlurmStep | None) -> list[DirectoryLock]:
    """Return the directory locks of the nodes to start, or with --overwrite of all nodes."""
    if run.overwrite and part is None:
        return node_locks(run.run_dir)
    nodes = [("PS", shard) for shard in range(run.nb_ps)]
    nodes += [("Worker", worker) for worker in range(1, run.nb_workers + 1)]
    nodes.append(("Supervisor", 0))
    return [lock_of(run.run_dir, *node) for node in nodes if part is None or part.starts(*node)]
