"""Snapshots on a real S3-compatible server: writers killed during uploads, replaced, rejected."""

import contextlib
import json
import random
import signal
import sys

import pytest

from tests.nodes import Nodes, free_port
from tests.object_storage import BUCKET, SECRET, environment_of, held_writes, s3_server
from tests.waiting import wait_until
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.persistence.fsspec_objects import open_objects
from thinwire.runtime.persistence.object_store import ObjectMissingError

pytestmark = [pytest.mark.timeout(300), pytest.mark.processes, pytest.mark.engines]

ADDRESS = f"s3://{BUCKET}/run"
REPORTS = f"s3://{BUCKET}/reports"
FLAGS = (
    *("--method=asgd", "--iter_max=600", "--checkpoint_interval_seconds=0.2"),
    *(f"--checkpoint_dir={ADDRESS}", "--slowdown=4", "--reconnect_timeout_seconds=60"),
)

#: Generous, because other work runs on the machine; the events come as early as they can.
LONG_SECONDS = 300


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
    found = Checkpoints(store()).load_latest()
    return -1 if found is None else found[0]


def wait_for(condition, nodes, seconds=60):
    wait_until(condition, seconds, lambda: nodes.output("ps")[-2000:])


def assert_no_leftovers(keep=3):
    """Check that the log needs every object, and that the log has no more than the limit."""
    names = set(store().names())
    logs = {name for name in names if name.startswith("log/")}
    contents = [entry(int(name[4:-5])) for name in logs]
    parts = {part["name"] for each in contents for part in each.get("parts", [])}
    assert names == logs | parts
    assert sum(each["kind"] == "snapshot" for each in contents) <= keep
    assert set(open_objects(ADDRESS, "checkpoint_dir").names()) == {f"ps-0/{n}" for n in names}


def assert_no_secrets(nodes):
    files = [path for path in nodes.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_a_killed_ps_goes_on_from_the_newest_snapshot_of_another_machine(nodes, tmp_path):
    nodes.cluster(1, *FLAGS, "--iter_max=120", "--slowdown=1")
    wait_for(lambda: newest() >= 5, nodes)
    nodes.kill("ps")
    kept = newest()
    nodes.run_dir = tmp_path / "another machine"
    nodes.start("ps", "--type_node=PS", "--id_ps=0", "--linger_seconds=1")
    assert [nodes.wait(name) for name in ("ps", "worker-1")] == [0, 0], nodes.output("ps")
    assert 5 <= kept <= newest() == 120
    assert_no_leftovers()
    assert_no_secrets(nodes)


@pytest.mark.product
def test_a_supervisor_keeps_its_records_elsewhere_too(nodes):
    nodes.cluster(1, *FLAGS, "--iter_max=120", f"--report_dir={REPORTS}", supervisor=True)
    names = ("ps", "worker-1", "supervisor")
    assert [nodes.wait(name) for name in names] == [0, 0, 0], nodes.output("supervisor")
    reports = open_objects(REPORTS, "report_dir")
    assert json.loads(reports.get("summary.json"))["updates"] == 120
    assert {"best.keras", "metrics.jsonl", "report/index.html"} <= set(reports.names())
    assert_no_secrets(nodes)


def entries():
    """Return the contents of the log by number."""
    found = {}
    for number in numbers():
        with contextlib.suppress(ObjectMissingError):  # the PS has just removed it
            found[number] = entry(number)
    return found


def entry(number):
    """Return the log's lines at a number."""
    return json.loads(store().get(f"log/{number:09d}.json"))["content"]


def numbers():
    """Return the numbers of the log."""
    return [int(name[4:-5]) for name in store().names() if name.startswith("log/")]


def unfinished():
    """Return the parts that no entry names."""
    found = entries().values()
    parts = {part["name"] for each in found for part in each.get("parts", [])}
    return {name for name in store().names() if name.startswith("parts/")} - parts


@pytest.mark.product
@pytest.mark.timeout(1200)
def test_kills_in_mid_upload_and_the_newest_whole_snapshot_each_time(nodes, tmp_path):
    """Each time another machine resumes exactly the newest complete state."""
    kills, rng, num_unfinished = 30, random.Random(7), 0
    with held_writes() as writes:
        flags = ("--checkpoint_interval_seconds=0.2", "--keep_checkpoints=6")
        nodes.cluster(1, *FLAGS, *flags, "--iter_max=1000000")
        wait_for(lambda: newest() >= 0, nodes)
        for kill in range(1, kills + 1):
            with writes.hold(rng.randrange(1, 12), before=rng.random() < 0.5):
                assert writes.is_held.wait(LONG_SECONDS), nodes.output("ps")[-2000:]
                nodes.kill("ps")
            kept, newest_entry = newest(), max(numbers())
            num_unfinished += bool(unfinished())
            nodes.run_dir = tmp_path / f"machine {kill}"
            nodes.start("ps", "--type_node=PS", "--id_ps=0", "--linger_seconds=4")
            wait_for(lambda low=newest_entry: max(numbers()) >= low + 2, nodes, LONG_SECONDS)
            claim, first = entry(newest_entry + 1), entry(newest_entry + 2)
            assert (claim["kind"], claim["generation"]) == ("claim", kill)
            assert (first["kind"], first["step"]) == ("snapshot", kept)
        nodes.kill("ps", signal.SIGTERM)
        assert [nodes.wait(name, LONG_SECONDS) for name in ("ps", "worker-1")] == [130, 130]
    assert_no_leftovers(6)
    sys.stdout.write(f"{num_unfinished} of {kills} kills left parts without an entry\n")
    assert num_unfinished


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
