"""Nodes as processes of this task of a Slurm step; its other tasks start the others.

Slurm ends what a task has started: by signals to all of its processes, and with the job.
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
    """Starts this task's nodes."""

    def __init__(self, run: Run, step: SlurmStep) -> None:
        self.addresses = run.addresses
        self._bind = _LOOPBACK if len(step.hosts) == 1 else _ANY
        if FLAGS.ps_hosts and FLAGS["ps_hosts"].present:
            self._bind = _ANY
        check_bind(self._bind, FLAGS.insecure, security.protection(FLAGS))
        self._threads = FLAGS.worker_threads or step.cpus_of_task
        self._overwrite = ("--overwrite",) if run.overwrite else ()

    def start(self, node: Node) -> SupervisedProcess:
        """Start a node; it ends with the task, whichever way that ends."""
        own = (f"--ip_PS={self._bind}",) if node.role == "PS" else ()
        anew = self._overwrite if not node.num_restarts else ()  # a restarted worker resumes
        return start_here(node, f"--worker_threads={self._threads}", *own, *anew)

    def settle(self) -> None:
        """Return immediately: processes of this machine are started when `start` returns."""

    def tend(self) -> None:
        """Do nothing: the system closes the pipes of a launcher that has died."""

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


def prepare(run: Run, script_folder: pathlib.Path | None = None) -> SlurmLauncher:
    """Return the launcher of this task's part of a run.

    Raises:
        ConfigurationError: Several hosts without certificates, a token or --insecure.
    """
    return SlurmLauncher(run, launch.step_here())
