"""Nodes as processes of this machine."""

from __future__ import annotations

import os
import socket

from absl import flags

from cluster.kept import KeptProcess, start_here
from cluster.launch import Node, threads_of
from ops.run import Run

FLAGS = flags.FLAGS


class LocalLauncher:
    """Starts every node here."""

    def __init__(self, run: Run) -> None:
        self.addresses = _choose_addresses(run.addresses)
        self._threads = threads_of(os.cpu_count() or 1, run.nb_workers)

    def start(self, node: Node) -> KeptProcess:
        """Start a node; it ends with the cluster, whichever way that ends."""
        return start_here(node, f"--worker_threads={self._threads}")

    def settle(self) -> None:
        """Return at once: what was started here runs."""

    def tend(self) -> None:
        """Do nothing: the system does."""

    def close(self) -> None:
        """Do nothing: nothing was taken."""


def prepare(run: Run) -> LocalLauncher:
    """Return the launcher of a run."""
    return LocalLauncher(run)


def _choose_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Take the asked ports; port 0 means any free ones."""
    if FLAGS.port != 0 or FLAGS.ps_hosts:
        return addresses
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in addresses]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return tuple(f"127.0.0.1:{port}" for port in ports)
