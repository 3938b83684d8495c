"""A shard of a collective run counts rounds and stores the weights that its workers send."""

import numpy as np
import pytest

from tests.pushes import push_event
from tests.virtual.shard import core_of, join, of
from tests.virtual.toy import method
from thinwire.ops.downlink.types import Operation
from thinwire.ops.types import ConfigurationError, Update
from thinwire.ps.core import events

NONE = Update(np.empty(0, np.int64), np.empty(0, np.float32))


def ring(nb_workers=3, **choices):
    return method(choices.pop("name", "bsp"), nb_workers, collective="ring", **choices)


def whole(value):
    return Update(None, np.full(4, value, np.float32))


def done(core, worker, round_, update=NONE, now=0.0, base=None, samples=8, incarnation=None):
    base = round_ - 1 if base is None else base
    event = push_event(
        worker,
        incarnation or worker,
        round_,
        base,
        core.config.generation,
        core.membership.epoch,
        update,
        samples,
        min(samples, 1),
        1.0,
    )
    return core.handle(event, now)


def running(nb_workers=3, **config):
    core = core_of(ring(nb_workers), **config)
    for worker in range(1, nb_workers + 1):
        join(core, worker)
    return core


def test_a_round_is_a_version_and_only_the_first_brings_weights():
    core = running()
    assert not done(core, 2, 1)
    assert not done(core, 1, 1, whole(7))
    replies = of(events.Reply, done(core, 3, 1))
    assert [(reply.worker, reply.version) for reply in replies] == [(1, 1), (2, 1), (3, 1)]
    assert {reply.operation for reply in replies} == {Operation.NONE}
    np.testing.assert_array_equal(core.model.theta, np.full(4, 7))
    assert (core.samples, core.counters.worker(3).pushes) == (24, 1)
    assert not core.model.lags


def test_a_round_without_weights_leaves_the_shard_behind():
    core = running()
    for worker in (1, 2, 3):
        done(core, worker, 1)
    assert (core.version, core.model.lags) == (1, True)
    np.testing.assert_array_equal(core.model.theta, np.zeros(4))


def test_who_missed_a_round_pulls_first():
    core = running()
    for worker in (1, 2, 3):
        done(core, worker, 1, whole(7))
    (refusal,) = of(events.Reject, done(core, 2, 3, base=0))
    assert refusal.reason == "STALE_GENERATION"
    (reply,) = of(events.Reply, core.handle(events.Pull(2, 2, None, 0), 0.0))
    assert (reply.operation, reply.version) == (Operation.FULL, 1)
    np.testing.assert_array_equal(reply.update.values, np.full(4, 7))
    (reply,) = of(events.Reply, core.handle(events.Pull(2, 2, 1, 0), 0.0))
    assert reply.operation is Operation.NONE


def test_a_repeated_push_is_answered_not_counted():
    core = running()
    for worker in (1, 2, 3):
        done(core, worker, 1)
    (reply,) = of(events.Reply, done(core, 2, 1))
    assert (reply.step, reply.version, core.version) == (1, 1, 1)
    assert core.counters.worker(2).pushes == 1


def test_a_joiner_waits_for_the_end_of_the_round_even_if_nobody_has_pushed():
    core = running()
    core.handle(events.Leave(3, 3, "done"), 0.0)
    actions = join(core, 3, incarnation=33)
    assert core.rounds.live() == (1, 2)
    assert not of(events.Reply, actions)
    done(core, 1, 1, whole(7))
    replies = of(events.Reply, done(core, 2, 1))
    assert [reply.worker for reply in replies] == [1, 2, 3]
    assert [reply.operation for reply in replies] == [Operation.NONE] * 2 + [Operation.FULL]
    assert core.rounds.live() == (1, 2, 3)


def test_a_joiner_of_an_empty_group_goes_on_at_once():
    core = running(2)
    for worker in (1, 2):
        core.handle(events.Leave(worker, worker, "done"), 0.0)
    assert [r.worker for r in of(events.Reply, join(core, 2, incarnation=22))] == [2]


def test_a_round_ends_when_the_missing_member_leaves():
    core = running()
    done(core, 1, 1, whole(7))
    done(core, 2, 1)
    replies = of(events.Reply, core.handle(events.Leave(3, 3, "killed"), 0.0))
    assert [reply.worker for reply in replies] == [1, 2]
    assert core.version == 1


def test_a_run_that_lags_at_its_end_waits_for_the_weights():
    core = running(iter_max=2)
    for round_ in (1, 2):
        for worker in (1, 2, 3):
            actions = done(core, worker, round_)
    assert not of(events.RunEnded, actions)
    assert {reply.stop_reason for reply in of(events.Reply, actions)} == {"iter_max"}
    assert core.handle(events.Leave(2, 2, "done"), 0.1) is not None
    actions = done(core, 1, 3, whole(9), base=2, samples=0, now=0.2)
    assert [action.reason for action in of(events.RunEnded, actions)] == ["iter_max"]
    (reply,) = of(events.Reply, actions)
    assert (reply.worker, reply.stop_reason) == (1, "iter_max")
    (snapshot,) = of(events.SaveSnapshot, actions)
    np.testing.assert_array_equal(snapshot.state["model"]["theta"], np.full(4, 9))
    assert (core.version, core.samples) == (2, 48)


@pytest.mark.parametrize("reason", ["target_accuracy", "max_seconds"])
def test_an_end_from_outside_waits_too_but_not_for_ever(reason):
    core = running(max_seconds=50.0)
    for worker in (1, 2, 3):
        done(core, worker, 1)
    event = events.Stop(reason) if reason == "target_accuracy" else events.Tick()
    for worker in (1, 2, 3):
        core.handle(events.WorkerAlive(worker), 49.9)
    assert not of(events.RunEnded, core.handle(event, 50.0))
    assert not of(events.RunEnded, core.handle(events.Tick(), 51.0))
    assert core.next_deadline() > 51.0
    (ended,) = of(events.RunEnded, core.handle(events.Tick(), 55.1))
    assert ended.reason == reason


def test_an_end_that_does_not_lag_is_an_end():
    core = running()
    for worker in (1, 2, 3):
        done(core, worker, 1, whole(7))
    assert of(events.RunEnded, core.handle(events.Stop("target_accuracy"), 1.0))


def test_everybody_gone_ends_a_lagging_run():
    core = running(2, iter_max=1)
    for worker in (1, 2):
        done(core, worker, 1)
    core.handle(events.Leave(1, 1, "done"), 0.1)
    assert of(events.RunEnded, core.handle(events.Leave(2, 2, "done"), 0.1))


def test_resume_takes_the_weights_for_those_of_the_version():
    core = running()
    for worker in (1, 2, 3):
        done(core, worker, 1, whole(7))
        done(core, worker, 2)
    saved = core.state_dict()
    again = core_of(ring(), generation=1)
    again.load_state_dict(saved)
    assert (again.version, again.model.lags) == (core.version, False)
    np.testing.assert_array_equal(again.model.theta, np.full(4, 7))


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"name": "asgd"}, "--sync=asp"),
        ({"name": "ssp"}, "--sync=ssp"),
        ({"name": "gsp", "groups": ((1, 2), (3,)), "overrides": {"weighting": "none"}}, "gsp"),
        ({"name": "adacomp", "overrides": {"sync": "bsp"}}, "--codec=topk"),
        ({"overrides": {"codec": "topk"}}, "--codec=topk"),
        ({"overrides": {"down_codec": "delta"}}, "--down_codec=delta"),
        ({"overrides": {"weighting": "inverse"}}, "--weighting=inverse"),
        ({"value_dtype": "float16"}, "--value_dtype=float16"),
    ],
)
def test_what_needs_a_parameter_server_is_refused(choices, words):
    with pytest.raises(ConfigurationError, match=words):
        ring(**choices)


def test_synchronous_methods_may_sum_among_workers():
    for chosen in (ring(), ring(name="esync"), ring(overrides={"pacer": "fixed"}, local_steps=4)):
        assert chosen.warnings == ()
    assert ("collective", "ring") in ring().fingerprint()
