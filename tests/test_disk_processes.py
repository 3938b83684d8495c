"""A PS with a full disk or a removed folder loses no acknowledged update."""

import shutil
import subprocess

import pytest

from tests.checkpoint_files import arrays_of, entries
from tests.test_journal_processes import WORKERS, come_to, end, start, start_ps
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.run.directory import checkpoints_of
from thinwire.runtime.run.settings import EXIT_CONFIGURATION

pytestmark = [pytest.mark.timeout(300), pytest.mark.product]


def mount(folder, size, *options):
    flags = ["-o", ",".join([f"size={size}", *options])]
    command = ["mount", "-t", "tmpfs", *flags, "none", str(folder)]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def disk(nodes):
    """Return the PS's folder, on a small separate disk."""
    folder = checkpoints_of(nodes.run_dir, "ps-0")
    folder.mkdir(parents=True)
    if not mount(folder, "4m"):
        pytest.skip("only root may mount a small disk")
    yield folder
    nodes.reap()
    subprocess.run(["umount", str(folder)], check=True)


def steps_of(nodes):
    return sum(worker["pushes"] for worker in nodes.summary()["workers"])


def test_a_full_disk_ends_the_run_and_the_same_command_goes_on(nodes, disk):
    start(nodes, 1, "--method=asgd", "--iter_max=1000000", "--journal=on")
    assert [nodes.wait(name) for name in ("ps", *WORKERS)] == [EXIT_CONFIGURATION] * 3
    found = nodes.summary()
    assert found["stop_reason"] == "journal_failed" and found["updates"] >= 5
    output = nodes.output("ps")
    assert "No space left on device" in output and "free space on that disk" in output
    assert "Traceback" not in output + nodes.output("worker-1")
    assert sum(path.stat().st_size for path in disk.rglob("*")) > 2 << 20
    assert mount(disk, "400m", "remount")
    start_ps(nodes)
    nodes.worker(1)
    nodes.worker(2)
    summary = end(nodes, found["updates"] + 20)
    assert summary["membership"]["lost_updates"] == 0
    assert f"version {found['updates']}: no update is lost" in nodes.output("ps")
    assert steps_of(nodes) == summary["updates"]


def test_without_space_for_a_snapshot_the_journal_goes_on(nodes, disk):
    """Once there is space again, so do snapshots."""
    start(nodes, 1, "--method=adacomp", "--iter_max=1000000", "--checkpoint_interval_seconds=1")
    nodes.watch(lambda status: status.version >= 10)
    filler = disk / "others"
    with open(filler, "wb") as file:
        free = shutil.disk_usage(disk).free
        file.write(bytes(free - (600 << 10)))
    nodes.watch(lambda status: "are free" in nodes.output("ps"))
    seen = []
    nodes.watch(lambda status: seen.append(status.version) or seen[-1] > seen[0] + 20)
    assert nodes.processes["ps"].poll() is None
    filler.unlink()
    nodes.watch(lambda status: Checkpoints.in_folder(disk).load_latest()[0] > seen[-1])
    nodes.kill("ps")
    start_ps(nodes)
    summary = end(nodes, seen[-1] + 40)
    assert summary["membership"]["lost_updates"] == 0 and steps_of(nodes) == summary["updates"]
    assert "Traceback" not in nodes.output("ps")


def test_a_disk_that_is_full_at_the_start_is_said_in_one_line(nodes, disk):
    assert mount(disk, "64k", "remount")
    start(nodes, 1, "--method=asgd", "--iter_max=1000000")
    assert nodes.wait("ps") == EXIT_CONFIGURATION
    output = nodes.output("ps")
    assert "cannot write a checkpoint into" in output and "free space" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("journal", ["on", "off"])
def test_a_folder_that_is_deleted_comes_back_with_the_next_snapshot(nodes, journal):
    start(
        nodes,
        1,
        "--method=adacomp",
        "--iter_max=1000000",
        f"--journal={journal}",
        "--checkpoint_interval_seconds=1",
    )
    folder = checkpoints_of(nodes.run_dir, "ps-0")
    nodes.watch(lambda status: status.version >= 10)
    doomed = folder.rename(folder.with_name("deleted"))  # the PS may write while it is removed
    shutil.rmtree(doomed)
    seen = []
    nodes.watch(lambda status: seen.append(status.version) or len(entries(folder)) > 1)
    nodes.kill("ps")
    start_ps(nodes)
    summary = end(nodes, seen[-1] + 20)
    assert steps_of(nodes) == summary["updates"]
    assert (summary["membership"]["lost_updates"] == 0) or journal == "off"


@pytest.mark.parametrize(("journal", "code"), [("on", EXIT_CONFIGURATION), ("off", 0)])
def test_a_folder_that_takes_no_files_any_more(nodes, journal, code):
    """With a journal the run ends immediately; without one it continues and reports it later."""
    start(
        nodes,
        1,
        "--method=adacomp",
        "--iter_max=1000000",
        f"--journal={journal}",
        "--checkpoint_interval_seconds=1",
    )
    folder = checkpoints_of(nodes.run_dir, "ps-0")
    nodes.watch(lambda status: status.version >= 10)
    folder.rename(folder.with_name("elsewhere"))
    folder.write_bytes(b"")
    if journal == "off":
        seen = []
        nodes.watch(lambda status: "cannot write the checkpoint" in nodes.output("ps"))
        nodes.watch(
            lambda status: seen.append(status.version) or seen[-1] > seen[0] + 20,
            halt="max_seconds",
        )
    assert [nodes.wait(name) for name in ("ps", *WORKERS)] == [EXIT_CONFIGURATION, code, code]
    why = "journal_failed" if journal == "on" else "max_seconds"
    assert nodes.summary()["stop_reason"] == why
    output = nodes.output("ps")
    assert "cannot be saved" in output and "Traceback" not in output


def test_damaged_snapshots_cost_nothing_until_there_are_no_others(nodes):
    start(nodes, 1, "--method=adacomp", "--iter_max=1000000", "--checkpoint_interval_seconds=1")
    folder = checkpoints_of(nodes.run_dir, "ps-0")
    for least in (30, 60):  # the newest one, then the newest two
        come_to(nodes, least)
        nodes.watch(lambda status: len(entries(folder)) == 3)
        nodes.kill("ps")
        for entry in entries(folder)[-least // 30 :]:
            arrays_of(entry).write_bytes(b"TW")
        start_ps(nodes)
    summary = end(nodes, 90)
    assert summary["membership"]["lost_updates"] == 0 and steps_of(nodes) == summary["updates"]
    assert nodes.output("ps").count("Trying an older") == 3
    for entry in entries(folder):
        entry.write_bytes(b"")
    start_ps(nodes)
    assert nodes.wait("ps") == EXIT_CONFIGURATION
    assert "all of them are damaged" in nodes.output("ps")
