"""Admission of workers: settings that the PS compares, and settings that may differ."""

import math
import threading

import pytest

from tests.command_line import given
from tests.virtual.toy import SPEC
from thinwire.flags.run import read_run
from thinwire.ops.types import Link
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.service.handshake import Identity, check_hello, checked_link, hello_to_leader
from thinwire.runtime.run import fingerprint
from thinwire.worker.client.exchange import Exchange


def hello_of(*flags):
    """Return the Hello that a worker with these flags sends to shard 0."""
    with given("--nb_workers=2", *flags):
        run = read_run()
    layouts = run.method.place(SPEC, 1)
    return Exchange(run, 1, SPEC, layouts, Link(), threading.Event()).shards[0].hello


def judged(ps, worker):
    with given("--nb_workers=2", *ps):
        run = read_run()
    return check_hello(
        hello_of(*worker), Identity("run", 0, 1, 0, fingerprint.fingerprint(run), SPEC, [])
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


@pytest.mark.parametrize(
    "link",
    [{}, {"mbps": 1e-3}, {"mbps": 1e6}, {"delay_ms": 60_000.0}, {"loss": 0.95}],
)
def test_the_slowest_and_the_fastest_link_may_be_emulated(link):
    found = checked_link(pb.EmulatedLink(**link))
    assert found == Link(**{"mbps": 0, **link})


@pytest.mark.parametrize(
    "link",
    [
        *({"mbps": value} for value in (-1, 0.9e-3, 1.1e6, math.nan)),
        *({"delay_ms": value} for value in (-1, 60_001, math.nan)),
        *({"loss": value} for value in (-0.1, 0.96, math.nan)),
    ],
)
def test_a_link_that_no_flag_sets_is_refused(link):
    with pytest.raises(Malformed, match=r"expected 0 \(no limit\) or 0.001 to 1e\+06 Mbit/s"):
        checked_link(pb.EmulatedLink(**link))


def test_each_worker_may_have_a_batch_size_of_its_own():
    assert judged([], ["--batch_size=77", "--clip_norm=1"]) is None
    assert judged(["--seed=5"], ["--seed=5", "--batch_size=77"]) is None


@pytest.mark.parametrize(
    ("role", "looks_only", "is_refused"),
    [
        (pb.ROLE_SUPERVISOR, True, False),
        (pb.ROLE_SUPERVISOR, False, True),
        (pb.ROLE_SCRIPT, True, True),
        (pb.ROLE_EVALUATOR, True, True),
        (pb.ROLE_WORKER, True, True),
    ],
)
def test_only_a_supervisor_that_looks_need_not_know_the_number_of_shards(
    role, looks_only, is_refused
):
    mine = Identity("run", 0, 2, 0, [], SPEC, [])
    model = [] if looks_only else messages.tensors_of(SPEC)
    found = check_hello(pb.Hello(role=role, model=model), mine)
    assert (found is not None and found[0] == pb.REASON_TOPOLOGY) == is_refused
    if role == pb.ROLE_SUPERVISOR:
        found = check_hello(pb.Hello(role=role, model=model, num_shards=3), mine)
        assert found is not None and found[0] == pb.REASON_TOPOLOGY


@pytest.mark.parametrize(("number", "is_refused"), [(0, True), (1, False), (2, False), (3, True)])
def test_a_following_shard_is_one_of_the_others(number, is_refused):
    mine = Identity("run", 0, 3, 0, [], SPEC, [])
    found = check_hello(pb.Hello(role=pb.ROLE_SHARD, id=number, num_shards=3), mine)
    assert (found is not None and f"PS {number} does not follow shard 0" in found[1]) == is_refused


@pytest.mark.parametrize(("phase", "reason"), [(1, True), (2, False), (3, True)])
def test_a_following_shard_joins_in_the_phase_of_shard_0_alone(phase, reason):
    """A worker in a later phase has another model, and would take epochs of the earlier phase."""
    mine = Identity("run", 0, 2, 0, [], SPEC, [], phase=2)
    theirs = Identity("run", 1, 2, 0, [], SPEC, [], phase=phase)
    found = check_hello(hello_to_leader(theirs), mine)
    assert (found is not None) == reason
    if found is not None:
        assert found[0] == pb.REASON_STARTING and f"phase {phase}" in found[1]
