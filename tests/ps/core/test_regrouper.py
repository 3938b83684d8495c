"""Groups formed and changed during a run: several shards, deaths, restarts, stops."""

import dataclasses

import numpy as np
import pytest

from tests.pushes import push_event
from tests.virtual.shard import core_of
from tests.virtual.timed import TimedRun
from tests.virtual.toy import method
from thinwire.ops.sync.groups import AutoGroups, format_groups, parse_groups_file
from thinwire.ops.types import ConfigurationError, Update
from thinwire.ps.core import events
from thinwire.ps.core.regrouper import RegroupFollower, RegroupPlanner
from thinwire.ps.wire.epochs import decode_epoch, encode_epoch
from thinwire.runtime.run.sync_files import write_groups

SPEEDS = [0.1, 0.1, 0.3, 0.3]


def auto(nb_workers=4, warmup=20, interval=5.0, **choices):
    return method("gsp", nb_workers=nb_workers, auto_groups=AutoGroups(warmup, interval), **choices)


def groups_of(run):
    return {format_groups(core.rounds.groups) for core in run.shards}


def formed(run):
    return [action for _, action in run.actions if isinstance(action, events.GroupsChanged)]


def assert_ended(run, updates, lost=0):
    """A push of a worker that died between two shards is on one of them alone."""
    assert run.shards[0].stop_reason == "iter_max"
    assert run.shards[0].version == updates
    assert all(updates - lost <= core.version <= updates for core in run.shards)
    assert np.isfinite(run.theta).all()


@pytest.mark.parametrize(
    ("seed", "late", "nb_ps"),
    [(0, 0.02, 1), (1, 0.02, 2), (2, 0.02, 3), (0, 0.4, 3), (1, 0.4, 1), (2, 0.4, 2), (1, 0.4, 3)],
)
def test_groups_form_by_speed_and_every_shard_merges_the_same(nb_ps, late, seed):
    run = TimedRun(auto(), SPEEDS, nb_ps=nb_ps, iter_max=120, seed=seed, late=late).play()
    assert len(groups_of(run)) == 1
    assert late > 0.1 or groups_of(run) == {"1,2|3,4"}
    assert_ended(run, 120)
    for rounds in run.rounds[1:]:
        # Shards may differ only in the rounds that were open when the budget was spent.
        differs = set(rounds[:110]) - set(run.rounds[0]) | set(run.rounds[0][:110]) - set(rounds)
        assert not differs
    first = next(number for number, members in enumerate(run.rounds[0]) if len(members) > 1)
    assert first >= 20  # the warm-up is asynchronous


def test_like_speeds_make_one_group():
    run = TimedRun(auto(3), [0.1, 0.105, 0.11], iter_max=60).play()
    assert groups_of(run) == {"1,2,3"}
    assert_ended(run, 60)
    assert run.shards[0].counters.groups.summary()["1,2,3"]["staleness"]["max"] == 1


@pytest.mark.parametrize(("nb_ps", "seed"), [(1, 0), (2, 1)])
def test_groups_follow_the_speeds(nb_ps, seed):
    run = TimedRun(auto(), SPEEDS, nb_ps=nb_ps, iter_max=700, seed=seed, late=0.2)
    run.play(until=20.0)
    assert groups_of(run) == {"1,2|3,4"}
    run.seconds[2] = 0.3
    run.play(until=45.0)
    assert groups_of(run) == {"1|2,3,4"}
    run.seconds[1] = 0.3
    run.play(until=75.0)
    assert groups_of(run) == {"1,2,3,4"}
    for rounds in run.rounds[1:]:
        common = min(len(rounds), len(run.rounds[0])) - 10
        assert not set(rounds[:common]) - set(run.rounds[0])
    assert [
        (core._planner if core.membership.leads else core._follower).num_formed
        for core in run.shards
    ] == [3] * nb_ps
    run.play()
    assert_ended(run, 700)


def test_groups_change_no_more_often_than_the_interval_says():
    run = TimedRun(auto(interval=30.0), SPEEDS, iter_max=900).play(until=10.0)
    assert groups_of(run) == {"1,2|3,4"}
    run.seconds[2] = 0.3
    run.play(until=25.0)
    assert groups_of(run) == {"1,2|3,4"}
    run.play(until=50.0)
    assert groups_of(run) == {"1|2,3,4"}


def test_an_interval_of_zero_forms_groups_once():
    run = TimedRun(auto(interval=0.0), SPEEDS, iter_max=400).play(until=10.0)
    run.seconds[2] = 0.3
    run.play()
    assert groups_of(run) == {"1,2|3,4"}
    assert_ended(run, 400)


def test_small_changes_of_speed_change_nothing():
    run = TimedRun(auto(interval=2.0), SPEEDS, iter_max=600).play(until=10.0)
    run.seconds |= {1: 0.105, 2: 0.097, 3: 0.31, 4: 0.28}
    run.play()
    assert len(formed(run)) == 1


@pytest.mark.parametrize(("bound", "nb_ps"), [(0, 1), (0, 2), (1, 2), (3, 1)])
def test_groups_by_speed_with_a_bound(bound, nb_ps):
    run = TimedRun(auto(staleness_bound=bound), SPEEDS, nb_ps=nb_ps, iter_max=160).play()
    assert groups_of(run) == {"1,2|3,4"}
    assert_ended(run, 160)


@pytest.mark.parametrize(
    ("seed", "nb_ps"), [(0, 1), (4, 1), (1, 2), (3, 2), *((seed, 3) for seed in range(6))]
)
def test_a_worker_killed_while_groups_change_blocks_nobody(nb_ps, seed):
    """Killed at the very moment shard 0 waits for it; it comes back, or stays away."""
    run = TimedRun(auto(), SPEEDS, nb_ps=nb_ps, iter_max=120, seed=seed)
    core = run.shards[0]
    while core._planner._target is None and core._planner.formed is None:
        run.play(limit=1)
    victim = 3 + seed % 2
    assert core._planner._target is not None
    run.kill(victim)
    run.play(until=run.now + 11.5)
    assert core._planner.formed is not None
    if seed % 3:
        run.revive(victim)
    run.play()
    assert_ended(run, 120, lost=2)
    assert len(groups_of(run)) == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_worker_killed_before_the_other_shards_have_changed_groups(seed):
    run = TimedRun(auto(), SPEEDS, nb_ps=3, iter_max=120, seed=seed, late=0.5)
    while not any(core._follower.is_waiting for core in run.shards):
        run.play(limit=1)
    victim = 1 + seed % 4
    run.kill(victim)
    if seed % 2:
        run.play(until=run.now + 0.05)
        run.revive(victim)
    run.play()
    assert_ended(run, 120, lost=2)
    assert len(groups_of(run)) == 1


@pytest.mark.parametrize("reason", ["target_accuracy", "interrupted"])
def test_the_end_of_the_run_waits_for_no_change_of_groups(reason):
    run = TimedRun(auto(), SPEEDS, iter_max=300)
    core = run.shards[0]
    while core._planner._target is None:
        run.play(limit=1)
    run.feed(0, events.Stop(reason))
    run.play(until=run.now + 1.0)  # no worker takes longer for a step
    assert all(worker.core.stopped for worker in run.workers.values())
    run.play(until=run.now + 10.0)
    assert core.stop_reason == reason
    assert not any(worker.computing for worker in run.workers.values())


def test_a_joiner_during_the_change_is_let_in():
    run = TimedRun(auto(), SPEEDS, nb_ps=2, iter_max=300)
    core = run.shards[0]
    while core._planner._target is None:
        run.play(limit=1)
    run.kill(4)
    run.revive(4)  # its old incarnation is still known: the new one takes over
    run.play()
    assert_ended(run, 300)


def test_groups_survive_a_restart_of_shard_0():
    run = TimedRun(auto(), SPEEDS, iter_max=900).play(until=10.0)
    again = core_of(auto(), size=28, generation=1)
    again.load_state_dict(run.shards[0].state_dict())
    assert format_groups(again.rounds.groups) == "1,2|3,4"
    assert not again.has_started  # rounds of groups wait for all members again
    assert again._planner.formed.groups == ((1, 2), (3, 4))
    assert again._planner.formed.epoch == again.membership.epoch


def test_a_shard_that_missed_a_change_catches_up():
    """The shard missed all groups except the newest: no worker may wait for ever."""
    run = TimedRun(auto(), SPEEDS, nb_ps=2, iter_max=600)
    lost = []

    def send(stream, deliver, real=run.send):
        if stream == ("epochs", 1) and run.shards[0]._planner.formed and run.now < 12.0:
            lost.append(deliver)
            return
        real(stream, deliver)

    run.send = send
    run.play(until=12.0)
    lost[-1]()  # the shard learns the newest epoch
    run.play()
    assert_ended(run, 600)
    assert len(groups_of(run)) == 1


def test_given_groups_never_change():
    run = TimedRun(method("gsp", nb_workers=4, groups=((1, 3), (2, 4))), SPEEDS, iter_max=80).play()
    assert groups_of(run) == {"1,3|2,4"}
    assert not formed(run)
    assert run.shards[0]._planner.summary() == {}


def test_the_summary_tells_the_speeds():
    run = TimedRun(auto(), SPEEDS, iter_max=120, delay=0.001).play()
    told = run.shards[0]._planner.summary()
    assert told["times_formed"] == 1
    assert told["samples_per_second"]["1"] == pytest.approx(80, rel=0.1)
    assert told["samples_per_second"]["4"] == pytest.approx(80 / 3, rel=0.1)


@pytest.mark.parametrize(
    "told", [None, events.GroupAssignment(7, ((1, 4), (2, 3)), {1: 0, 2: 5, 4: 2**40})]
)
def test_epochs_pass_the_wire(told):
    epoch = events.MembershipEpoch(9, (1, 2, 4), True, told, incarnations=(7, 2**63, 0))
    message = encode_epoch(epoch, ((1, 4), (2, 3)))
    assert decode_epoch(type(message).FromString(message.SerializeToString())) == epoch


def test_the_proposal_is_left_behind_as_files(tmp_path):
    speeds = {1: 4.0, 2: 4.0, 3: 1.0}
    told = write_groups(tmp_path, ((1, 2), (3,)), speeds)
    path = tmp_path / "groups.txt"
    assert f"--groups_file={path} --partition=file --data_sharding_file=" in told
    assert parse_groups_file(path.read_text(), "g") == ((1, 2), (3,))
    from thinwire.data.fractions import read_fractions

    fractions = read_fractions(tmp_path / "data_sharding.txt", 3)
    assert [end - start for start, end in fractions] == pytest.approx([4 / 9, 4 / 9, 1 / 9])


def test_groups_by_speed_are_for_groups():
    with pytest.raises(ConfigurationError, match="--sync=bsp"):
        method("bsp", auto_groups=AutoGroups(5))
    rule = auto().sync
    assert rule.groups == ((1,), (2,), (3,), (4,))
    assert dataclasses.replace(rule, groups=((1, 2), (3, 4))).auto == rule.auto


def test_a_worker_that_left_is_measured_again_before_groups_form():
    """It may return on another machine."""
    planner = RegroupPlanner(AutoGroups(1, 5.0), 2)

    def measure(worker, seconds, count=3):
        for step in range(1, count + 1):
            planner.replied(worker, step, 0.0)
            update = Update(None, np.ones(4, np.float32))
            push = push_event(worker, worker, step + 1, 0, 0, 0, update)
            planner.pushed(push, seconds)

    measure(1, 0.1)
    measure(2, 0.1)
    planner.left(2)
    assert not planner.propose(1.0, [1, 2], 10, ((1,), (2,)))
    measure(2, 0.9)
    assert planner.propose(1.0, [1, 2], 10, ((1,), (2,)))
    assert planner.speeds_found == pytest.approx({1: 10, 2: 1 / 0.9})


def test_nobody_is_waited_for_who_left_before_the_next_groups_came_into_force():
    """Two changes of groups are announced, and worker 3 leaves between them."""
    follower, at_start = RegroupFollower(), ((1,), (2,), (3,))

    def announce(number, groups, after):
        formed = events.GroupAssignment(number, groups, after)
        live = tuple(sorted(after))
        follower.receive(events.MembershipEpoch(number, live, True, formed), at_start)

    announce(1, ((1, 2), (3,)), {1: 4, 2: 4, 3: 4})
    announce(2, ((1,), (2, 3)), {1: 6, 2: 6, 3: 6})
    follower.left(3)
    assert follower.ready({1: 4, 2: 4, 3: 4}, [1, 2]).epoch == 1
    assert follower.ready({1: 6, 2: 5, 3: 4}, [1, 2]) is None
    assert follower.ready({1: 6, 2: 6, 3: 4}, [1, 2]).epoch == 2
