"""Starts the nodes of one task of a Slurm step; every task starts its own nodes.

Slurm sends signals to all processes that a task has started, and kills these processes at the end
of the job.
"""

from __future__ import annotations

import pathlib

from absl import flags

from thinwire.flags import launch, security
from thinwire.flags.slurm import SlurmStep
from thinwire.launcher.local import SupervisedProcess, start_here
from thinwire.launcher.role import Node
from thinwire.proto.grpc import check_bind
from thinwire.runtime.run.settings import Run

FLAGS = flags.FLAGS
_LOOPBACK, _ANY = "127.0.0.1", "0.0.0.0"


class SlurmLauncher:
    """Starts the nodes of this task of a Slurm step, on this host."""

    def __init__(self, run: Run, step: SlurmStep) -> None:
        self.addresses = run.addresses
        self._bind = _LOOPBACK if len(step.hosts) == 1 else _ANY
        if FLAGS.ps_hosts and FLAGS["ps_hosts"].present:
            self._bind = _ANY
        check_bind(self._bind, FLAGS.insecure, security.protection(FLAGS))
        self._threads = FLAGS.worker_threads or step.cpus_of_task
        self._overwrite = ("--overwrite",) if run.overwrite else ()

    def start(self, node: Node) -> SupervisedProcess:
        """Start a node under a watchdog, which ends the node when this Slurm task ends or dies."""
        bind = (f"--ip_PS={self._bind}",) if node.role == "PS" else ()
        # A restarted node resumes its run, so it must not delete its checkpoints because of
        # --overwrite.
        overwrite = self._overwrite if not node.num_restarts else ()
        return start_here(node, f"--worker_threads={self._threads}", *bind, *overwrite)

    def settle(self) -> None:
        """Return immediately, because `start` has waited until the node's process has started."""

    def tend(self) -> None:
        """Do nothing: local watchdogs need no heartbeats, because a dead launcher's pipes close."""

    def close(self) -> None:
        """Do nothing, because the Slurm launcher holds no resources to release."""


def prepare(run: Run, script_folder: pathlib.Path | None = None) -> SlurmLauncher:
    """Return the launcher of the nodes that this task of a Slurm step starts.

    Raises:
        ConfigurationError: The Slurm step has several hosts, and no TLS certificates, no token and
            no --insecure are given.
    """
    return SlurmLauncher(run, launch.step_here())
