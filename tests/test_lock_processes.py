"""A second process in a run directory is refused before it changes anything (real processes)."""

import contextlib
import pathlib
import signal
import threading

import pytest

from tests.nodes import free_port
from tests.test_journal_processes import WORKERS, come_to_rest, end, start, start_ps
from thinwire.runtime.run.directory import lock_of
from thinwire.runtime.run.lock import LockOwner, owner_of
from thinwire.runtime.run.settings import EXIT_CONFIGURATION

pytestmark = pytest.mark.timeout(300)

FIRST = ("ps", *WORKERS, "supervisor")
#: Second process -> its flags, and the role and id of the process that holds the lock.
SECOND = {
    "PS": ((), "PS", 0),
    "Worker": (("--id_worker=2",), "Worker", 2),
    "Supervisor": ((), "Supervisor", 0),
    "Standalone": ((), "Supervisor", 0),
    "Simulator": ((), "Supervisor", 0),
    "Cluster": ((), "Cluster", 0),
    "Advisor": ((), "Advisor", 0),
}


def stand_still(nodes):
    """Stop all nodes: any later change is made by another process."""
    for name in FIRST:
        nodes.kill(name, signal.SIGSTOP)
    stats = [pathlib.Path(f"/proc/{nodes.processes[name].pid}/stat") for name in FIRST]
    while any(stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in stats):
        threading.Event().wait(0.01)


def contents(run_dir):
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@pytest.mark.product
def test_whoever_comes_second_is_refused_and_nothing_is_lost(nodes):
    """The second process is also refused with --overwrite, and on another port."""
    with contextlib.ExitStack() as held:
        for role in ("Cluster", "Advisor"):  # here, in this process
            lock = lock_of(nodes.run_dir, role, 0)
            held.enter_context(lock.take(LockOwner.here(role, 0)))
        start(
            nodes,
            1,
            "--method=adacomp",
            "--iter_max=1000000",
            "--lease_seconds=60",
            "--checkpoint_interval_seconds=1000",
        )
        nodes.start("supervisor", "--type_node=Supervisor", "--eval_interval_seconds=1000")
        version = come_to_rest(nodes, 30)
        nodes.watch(lambda status: (nodes.run_dir / "best.keras").exists())
        stand_still(nodes)
        before, port = contents(nodes.run_dir), free_port()
        for role, (flags, _, _) in SECOND.items():
            nodes.start(f"2-{role}", f"--type_node={role}", *flags, "--overwrite", f"--port={port}")
        for role, (_, first, number) in SECOND.items():
            code, output = nodes.wait(f"2-{role}"), nodes.output(f"2-{role}")
            owner = owner_of(lock_of(nodes.run_dir, first, number).path)
            assert code == EXIT_CONFIGURATION and "Traceback" not in output, output
            assert f"{first} {number}, pid {owner.pid} on host {owner.host}" in output
            assert str(nodes.run_dir) in output and "another --run_dir" in output
        assert contents(nodes.run_dir) == before
    nodes.kill("ps")
    start_ps(nodes)  # at once: a death frees the lock
    for name in FIRST[1:]:
        nodes.kill(name, signal.SIGCONT)
    assert end(nodes, version + 5)["membership"]["lost_updates"] == 0
    assert f"version {version}: no update is lost" in nodes.output("ps")
    assert nodes.wait("supervisor") == 0
