"""A Cluster starts no node and clears no file in a directory that other processes use."""

import pytest

from tests.command_line import given
from thinwire.flags.run import read_run
from thinwire.flags.slurm import SlurmStep
from thinwire.launcher.run_start import claim_run_directory
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.directory import lock_of
from thinwire.runtime.run.lock import LockOwner


def claim(folder, *flags):
    with given("--type_node=Cluster", "--nb_workers=2", f"--run_dir={folder}", *flags):
        run = read_run()
    claim_run_directory(run, patience_seconds=0.0)


def held(folder, role, number):
    return lock_of(folder, role, number).take(LockOwner.here(role, number))


@pytest.fixture
def used(tmp_path):
    """Return a run directory that a PS and an eighth worker have written to, and a Cluster."""
    kept = tmp_path / "checkpoints" / "ps-0" / "kept"
    kept.parent.mkdir(parents=True)
    kept.write_text("")
    for role, number in (("PS", 0), ("Worker", 8)):
        held(tmp_path, role, number).release()
    with held(tmp_path, "Cluster", 0):
        yield tmp_path


@pytest.mark.parametrize(
    ("role", "number", "flags", "free"),
    [
        ("PS", 0, (), False),
        ("PS", 0, ("--overwrite",), False),
        ("Worker", 2, (), False),
        ("Worker", 8, (), True),  # a node of another Cluster: it may wait for its PS
        ("Worker", 8, ("--overwrite",), False),
        ("Supervisor", 0, (), False),
        ("Advisor", 0, ("--overwrite",), True),
    ],
)
def test_nodes_of_others_are_in_the_way(used, role, number, flags, free):
    with held(used, role, number):
        if free:
            claim(used, *flags)
        else:
            with pytest.raises(ConfigurationError, match=f"in use .*{role} {number}, pid"):
                claim(used, *flags)
            assert (used / "checkpoints" / "ps-0" / "kept").exists()
    claim(used, *flags)
    assert (used / "checkpoints").exists() is not bool(flags)
    for each in (("PS", 0), ("Worker", 8)):  # given back
        held(used, *each).release()


def test_a_part_of_a_run_clears_nothing_of_the_others(used):
    """Nodes clear their own files when they start; nodes of another part may run already."""
    with given("--type_node=Cluster", "--nb_workers=2", f"--run_dir={used}", "--overwrite"):
        run = read_run()
    part = SlurmStep(1, 1, 0, ("here", "there"), (1, 1), 20000, 1)
    claim_run_directory(run, part, patience_seconds=0.0)
    assert (used / "checkpoints" / "ps-0" / "kept").exists()
