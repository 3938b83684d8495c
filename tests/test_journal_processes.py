"""A PS that is killed restarts with all acknowledged updates (real processes)."""

import random
import signal

import pytest

from thinwire.ps.persistence import journal as persistence_journal
from thinwire.ps.persistence.journal import numbers
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.run.directory import checkpoints_of

pytestmark = pytest.mark.timeout(300)
LONG = pytest.mark.product
WORKERS = ("worker-1", "worker-2")


def start_ps(nodes, *shards):
    for shard in shards or range(nodes.nb_ps):
        flags = ("--type_node=PS", "--linger_seconds=4", f"--id_ps={shard}")
        nodes.start("ps" if shard == 0 else f"ps-{shard}", *flags)


def start(nodes, nb_ps, *flags):
    nodes.nb_ps = nb_ps
    nodes.common = (*nodes.common, "--nb_workers=2", f"--nb_ps={nb_ps}", *flags)
    start_ps(nodes)
    nodes.worker(1)
    nodes.worker(2)


def come_to(nodes, least):
    nodes.watch(lambda status: status.version >= least, 100)


def end(nodes, least):
    """Let the run come so far, and end; return its summary."""
    nodes.watch(lambda status: status.version >= least, 100, halt="max_seconds")
    shards = ["ps", *(f"ps-{shard}" for shard in range(1, nodes.nb_ps))]
    assert [nodes.wait(name, 60) for name in (*WORKERS, *shards)] == [0] * (2 + nodes.nb_ps)
    return nodes.summary()


@pytest.mark.parametrize(
    ("method", "journal", "pushes", "nb_ps"),
    [
        ("adacomp", "auto", 1, 1),
        pytest.param("bsp", "on", 2, 1, marks=LONG),
        pytest.param("asgd", "on", 1, 2, marks=LONG),
        pytest.param("dgs", "auto", 1, 2, marks=LONG),
    ],
)
def test_a_killed_ps_has_lost_nothing_that_it_acknowledged(nodes, method, journal, pushes, nb_ps):
    start(
        nodes,
        nb_ps,
        f"--method={method}",
        "--iter_max=1000000",
        f"--journal={journal}",
        "--checkpoint_interval_seconds=3",
    )
    least = random.Random(method).randrange(40, 90)
    come_to(nodes, least)
    for shard in reversed(range(nb_ps)):
        nodes.kill("ps" if shard == 0 else f"ps-{shard}")
        start_ps(nodes, shard)
        least += 30
        come_to(nodes, least)
    summary = end(nodes, least + 10)
    assert summary["membership"]["lost_updates"] == 0
    assert summary["journal"]["on"] and summary["journal"]["replayed"] > 0
    assert sum(each["pushes"] for each in summary["workers"]) == pushes * summary["updates"]
    assert len(numbers(checkpoints_of(nodes.run_dir, "ps-0"))) <= 4
    for shard in range(nb_ps):
        assert "no update is lost" in nodes.output("ps" if shard == 0 else f"ps-{shard}")


def pause(nodes, sent):
    for name in WORKERS:
        nodes.kill(name, sent)


def come_to_rest(nodes, least):
    """Let nothing more come; return the version then."""
    come_to(nodes, least)
    pause(nodes, signal.SIGSTOP)
    seen = []

    def rests(status):
        seen.append(status.version)
        return len(seen) > 3 and len({*seen[-3:]}) == 1

    nodes.watch(rests)
    return seen[-1]


@pytest.mark.product
@pytest.mark.parametrize(("method", "nb_ps"), [("bsp", 1), ("asgd", 1), ("asgd", 2)])
def test_the_summary_tells_exactly_how_many_dense_updates_are_lost(nodes, method, nb_ps):
    """Two deaths, one soon after the other, and deaths of every shard."""
    start(
        nodes,
        nb_ps,
        f"--method={method}",
        "--iter_max=1000000",
        "--lease_seconds=60",
        "--checkpoint_interval_seconds=1000",
    )
    lost = 0
    for _ in range(2):
        lost += come_to_rest(nodes, 25)
        for shard in range(nb_ps):
            nodes.kill("ps" if shard == 0 else f"ps-{shard}")
        for shard in range(1, nb_ps):
            lost += persistence_journal.read_mark(
                checkpoints_of(nodes.run_dir, f"ps-{shard}")
            ).version
        for shard in range(nb_ps):  # the state that it resumes
            assert (
                Checkpoints.in_folder(checkpoints_of(nodes.run_dir, f"ps-{shard}")).load_latest()[0]
                == 0
            )
        start_ps(nodes)
        pause(nodes, signal.SIGCONT)
    summary = end(nodes, 20)
    assert not summary["journal"]["on"]
    assert summary["membership"]["lost_updates"] == lost
    assert summary["updates"] * nb_ps + lost >= 40 * nb_ps


@pytest.mark.product
def test_every_start_may_choose_anew_whether_a_journal_is_kept(nodes):
    """A process without a journal loses its updates since its last snapshot."""
    start(
        nodes,
        1,
        "--method=adacomp",
        "--iter_max=1000000",
        "--lease_seconds=60",
        "--checkpoint_interval_seconds=2",
        "--journal=on",
    )
    folder, lost, least = checkpoints_of(nodes.run_dir, "ps-0"), 0, 0
    for journal in ("off", "on", "off", "on"):
        version = come_to_rest(nodes, least + 30)
        nodes.kill("ps")
        saved = Checkpoints.in_folder(folder).load_latest()[0]
        if journal == "on":  # this life kept none
            lost += version - saved
        nodes.start("ps", "--type_node=PS", "--linger_seconds=4", f"--journal={journal}")
        pause(nodes, signal.SIGCONT)
        least = version if journal == "off" else saved
    summary = end(nodes, least + 30)
    assert summary["membership"]["lost_updates"] == lost
    assert summary["journal"]["cuts"] == [] and summary["journal"]["replayed"] > 0
    assert sum(each["pushes"] for each in summary["workers"]) == summary["updates"]
