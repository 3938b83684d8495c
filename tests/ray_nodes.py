"""Ray clusters of several nodes on one machine; a test can remove a node."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

from tests.waiting import wait_until

#: Ray's own: small, and silent to the world.
#: Every node's agent needs a separate port, because all nodes share one machine.
NODE = {"num_cpus": 3, "object_store_memory": 80_000_000, "dashboard_agent_listen_port": 0}


def command_line(pid: int) -> list[str]:
    """Return a process's; nothing where it has ended."""
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (OSError, UnicodeDecodeError):
        return []


def family(pid: int) -> list[int]:
    """Return a process and all that come from it."""
    parents = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(") ")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


class RayNodes:
    """A cluster; all nodes except the head node can be removed."""

    def __init__(self, number: int, dashboard: bool = False) -> None:
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        head = NODE | {"include_dashboard": dashboard}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self._cluster.add_node(**NODE) for _ in range(number - 1)]
        self.address: str = self._cluster.address
        self.jobs_address = f"http://{self._cluster.head_node.webui_url}" if dashboard else ""

    def roles(self, node: Any) -> set[str]:
        """Return the flags that name the nodes of a run which are on a node of Ray."""
        words = [word for pid in self._processes(node) for word in command_line(pid)]
        return {word for word in words if word.startswith(("--id_ps=", "--id_worker="))}

    def lose(self) -> set[str]:
        """Kill all processes on a node that has a PS and a worker; return the killed processes."""
        for node in self.nodes:
            lost = self.roles(node)
            if {word.partition("=")[0] for word in lost} == {"--id_ps", "--id_worker"}:
                pids = self._processes(node)
                for number in (signal.SIGSTOP, signal.SIGKILL):  # together, as a power cut does
                    for pid in pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, number)
                return lost
        raise AssertionError([self.roles(node) for node in self.nodes])

    def close(self) -> None:
        """End all nodes, and see to it that nothing is left of them."""
        pids = [pid for node in self._all() for pid in self._processes(node)]
        self._cluster.shutdown()

        def left() -> list[Any]:
            return [command_line(pid) for pid in pids if any(command_line(pid))]

        wait_until(lambda: not left(), 30, lambda: f"an end of {left()}")

    def _all(self) -> list[Any]:
        return [self._cluster.head_node, *self.nodes]

    def _processes(self, node: Any) -> list[int]:
        started = [each.process.pid for each in node.all_processes.get("raylet", [])]
        return [pid for first in started for pid in family(first)]


@contextlib.contextmanager
def ray_nodes(number: int, dashboard: bool = False) -> Iterator[RayNodes]:
    """Start a cluster, and end it."""
    cluster = RayNodes(number, dashboard)
    try:
        yield cluster
    finally:
        cluster.close()
