"""Who may join: what the PS compares of a worker's settings, and what it leaves to the worker."""

import threading

import pytest

from tests.command_line import given
from tests.virtual.toy import SPEC
from thinwire.flags.run import read_run
from thinwire.ops.run import fingerprint
from thinwire.ops.types import Link
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.service.handshake import check_hello, hello_to_leader, identity
from thinwire.worker.client.exchange import Exchange


def hello_of(*flags):
    """Return what a worker with these flags says to shard 0."""
    with given("--nb_workers=2", *flags):
        run = read_run()
    layouts = run.method.place(SPEC, 1)
    return Exchange(run, 1, SPEC, layouts, Link(), threading.Event()).shards[0].hello


def judged(ps, worker):
    with given("--nb_workers=2", *ps):
        run = read_run()
    return check_hello(
        hello_of(*worker), identity("run", 0, 1, 0, fingerprint.fingerprint(run), SPEC, [])
    )


@pytest.mark.parametrize(
    ("ps", "worker", "words"),
    [
        (["--seed=1"], ["--seed=2"], "seed: expected '1', got '2'"),
        ([], ["--partition=class"], "partition: expected 'iid', got 'class'"),
        (
            ["--partition=dirichlet"],
            ["--partition=dirichlet", "--dirichlet_alpha=2"],
            "dirichlet_alpha: expected 'None', got '2.0'",
        ),
        (
            ["--partition=class", "--no_block_shuffle"],
            ["--partition=class"],
            "no_block_shuffle: expected 'True', got 'False'",
        ),
        (["--method=bsp"], ["--method=bsp", "--seed=3", "--codec=topk"], "codec: expected 'dense'"),
    ],
)
def test_workers_that_would_deal_out_the_data_otherwise_are_refused(ps, worker, words):
    reason, message = judged(ps, worker)
    assert reason == pb.REASON_FINGERPRINT
    assert words in message
    assert "--partition" in message


def test_each_worker_may_have_a_batch_size_of_its_own():
    assert judged([], ["--batch_size=77", "--clip_norm=1"]) is None
    assert judged(["--seed=5"], ["--seed=5", "--batch_size=77"]) is None


@pytest.mark.parametrize(("phase", "reason"), [(1, True), (2, False), (3, True)])
def test_a_following_shard_joins_in_the_phase_of_shard_0_alone(phase, reason):
    """One that is ahead has another model as well, and would take epochs of the former phase."""
    mine = identity("run", 0, 2, 0, [], SPEC, [], phase=2)
    theirs = identity("run", 1, 2, 0, [], SPEC, [], phase=phase)
    found = check_hello(hello_to_leader(theirs), mine)
    assert (found is not None) == reason
    if found is not None:
        assert found[0] == pb.REASON_STARTING and f"PS 1 in {phase}" in found[1]
