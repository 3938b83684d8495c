"""Snapshots on a real S3-compatible server: killed in mid-upload, replaced, refused."""

import json
import signal
import time

import pytest

from tests.nodes import Nodes, free_port
from tests.object_storage import BUCKET, SECRET, environment_of, s3_server
from thinwire.ops.persistence.fsspec_objects import open_objects
from thinwire.ops.persistence.stored_checkpoints import StoredCheckpoints

pytestmark = [pytest.mark.timeout(300), pytest.mark.processes]

ADDRESS = f"s3://{BUCKET}/run"
FLAGS = (
    *("--method=asgd", "--iter_max=600", "--checkpoint_interval_seconds=0.2"),
    *(f"--checkpoint_dir={ADDRESS}", "--slowdown=4", "--reconnect_timeout_seconds=60"),
)


@pytest.fixture
def s3():
    with s3_server() as environment, environment_of(environment):
        yield environment


@pytest.fixture
def nodes(tmp_path, s3):
    started = Nodes(tmp_path)
    started.environment = dict(s3)
    yield started
    started.reap()


def store():
    return open_objects(f"{ADDRESS}/ps-0", "checkpoint_dir")


def newest():
    found = StoredCheckpoints(store()).load_latest()
    return -1 if found is None else found[0]


def wait_for(condition, nodes, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, nodes.output("ps")[-2000:]
        time.sleep(0.01)


def assert_no_leftovers():
    """Every object is one that the log needs, and the log has no more than is kept."""
    names = set(store().names())
    logs = {name for name in names if name.startswith("log/")}
    entries = [json.loads(store().get(name))["content"] for name in logs]
    parts = {part["name"] for entry in entries for part in entry.get("parts", [])}
    assert names == logs | parts
    assert sum(entry["kind"] == "snapshot" for entry in entries) <= 3
    assert set(open_objects(ADDRESS, "checkpoint_dir").names()) == {f"ps-0/{n}" for n in names}


def assert_no_secrets(nodes):
    files = [path for path in nodes.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_killed_ps_goes_on_from_the_newest_snapshot_of_another_machine(nodes, tmp_path):
    nodes.cluster(1, *FLAGS)
    wait_for(lambda: newest() >= 20, nodes)
    nodes.kill("ps")
    kept = newest()
    nodes.run_dir = tmp_path / "another machine"
    nodes.start("ps", "--type_node=PS", "--id_ps=0", "--linger_seconds=4")
    assert [nodes.wait(name) for name in ("ps", "worker-1")] == [0, 0], nodes.output("ps")
    assert kept >= 20 and newest() == 600
    assert nodes.summary()["updates"] == 600
    assert_no_leftovers()
    assert_no_secrets(nodes)


@pytest.mark.product
def test_an_old_ps_that_wakes_up_ends_with_a_clear_word(nodes, tmp_path):
    nodes.cluster(1, *FLAGS)
    wait_for(lambda: newest() >= 5, nodes)
    nodes.kill("ps", signal.SIGSTOP)
    nodes.processes["old"] = nodes.processes["ps"]
    nodes.run_dir = tmp_path / "another machine"
    nodes.common = tuple(
        f"--ps_hosts=127.0.0.1:{free_port()}" if flag.startswith("--ps_hosts=") else flag
        for flag in nodes.common
    )
    nodes.start("new", "--type_node=PS", "--id_ps=0", "--linger_seconds=4")
    wait_for(lambda: "listens" in nodes.output("new"), nodes)
    nodes.kill("old", signal.SIGCONT)
    assert nodes.wait("old") == 2, nodes.output("ps")
    assert "has been taken over by PS 0" in nodes.output("ps")
    assert "as generation 1" in nodes.output("ps")
    nodes.kill("new", signal.SIGTERM)
    assert nodes.wait("new") == 130
    assert_no_leftovers()
