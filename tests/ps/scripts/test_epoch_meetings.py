"""Meetings of scripts at epoch ends, on a fake clock: who waits, and what the scripts receive."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ps.scripts.test_run_control import Script
from tests.ps.streams import Shard
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.scripts.epoch_meetings import HELD_SECONDS, EpochMeetings


def steps_end(epoch, waits=True, fit=1, **metrics):
    states = [
        pb.MetricState(name=name, values=np.asarray(values, "<f8").tobytes())
        for name, values in metrics.items()
    ]
    return pb.EpochMeeting(fit=fit, epoch=epoch, waits=waits, states=states)


def epoch_ends(epoch, stops=False, waits=True, fit=1):
    return pb.EpochMeeting(fit=fit, epoch=epoch, waits=waits, stops=stops, after_callbacks=True)


class World:
    """Some scripts in their first fit, at a clock that the test moves."""

    def __init__(self, *workers):
        self.present, self.held, self.now, self.version = set(workers), set(), 0.0, 0
        self.meetings = EpochMeetings(
            lambda now: sorted(self.present), lambda: self.held, self.stop_fit
        )
        self.outcomes, self.stops = [], []
        self.wait(0)
        for worker in workers:
            self.begin(worker)

    def begin(self, worker, incarnation=1):
        self.note(self.meetings.begin(worker, incarnation, self.now))
        return self.note(self.meetings.arrive(worker, "fit-1-begin", self.now))

    def note(self, outcomes):
        self.outcomes += outcomes
        return self

    def stop_fit(self, worker, fit, epochs, now):
        self.stops.append((worker, fit, epochs))
        return []

    def meet(self, worker, meeting):
        return self.note(self.meetings.meet(worker, meeting, self.now))

    def wait(self, seconds, updates=0):
        self.now, self.version = self.now + seconds, self.version + updates
        return self.note(self.meetings.tick(self.now, self.version))

    @property
    def answers(self):
        """Return worker -> its answer, since the last look; `ends` are the fits ended meanwhile."""
        taken, self.outcomes = self.outcomes, []
        self.ends, self.stops = self.stops, []
        return {each.to: each.message.epoch_meeting for each in taken}


def sums(answer):
    return {each.name: np.frombuffer(each.values, "<f8").tolist() for each in answer.states}


def test_all_wait_and_get_the_sums_of_what_all_have():
    world = World(1, 2, 3)
    world.meet(1, steps_end(0, loss=[1.0, 2.0], auc=[1], own=[5]))
    world.meet(3, steps_end(0, loss=[3.0, 4.0], auc=[1, 2], own=[6]))
    assert world.answers == {}
    world.meet(2, steps_end(0, auc=[1], loss=[0.5, 0.25]))
    answers = world.answers
    assert set(answers) == {1, 2, 3}
    assert [sums(each) for each in answers.values()] == [{"loss": [4.5, 6.25]}] * 3


@given(st.permutations([1, 2, 3]), st.permutations([1, 2, 3]))
@settings(max_examples=20, deadline=None)
def test_sums_do_not_depend_on_who_comes_first(order, other):
    def total(arrivals):
        world = World(1, 2, 3)
        for worker in arrivals:
            world.meet(worker, steps_end(0, loss=[10.0**-worker, 1e16 * worker]))
        return [each.SerializeToString() for _, each in sorted(world.answers.items())]

    assert total(order) == total(other)


def test_without_rounds_each_gets_the_newest_of_all_at_once():
    world = World(1, 2, 3)
    world.meet(1, steps_end(0, waits=False, loss=[1]))
    assert sums(world.answers[1]) == {"loss": [1.0]}
    world.meet(2, steps_end(0, waits=False, loss=[10]))
    assert sums(world.answers[2]) == {"loss": [11.0]}
    world.meet(2, steps_end(1, waits=False, loss=[20]))
    assert sums(world.answers[2]) == {"loss": [21.0]}
    world.present.discard(2)
    world.meet(3, steps_end(0, waits=False, loss=[100]))
    assert sums(world.answers[3]) == {"loss": [101.0]}, "a lost worker's rows are in no sum"
    world.meet(1, steps_end(0, waits=False, fit=2, loss=[7]))
    assert sums(world.answers[1]) == {"loss": [7.0]}, "those of this fit only"


def test_with_rounds_one_script_ends_the_fit_of_all_after_the_same_epoch():
    world = World(1, 2)
    world.meet(1, epoch_ends(3))
    world.meet(2, epoch_ends(3, stops=True))
    assert {worker: each.epochs for worker, each in world.answers.items()} == {1: 4, 2: 4}
    assert world.ends == [(2, 1, 4)]
    world.meet(1, epoch_ends(0, fit=2))
    world.meet(2, epoch_ends(0, fit=2))
    assert {worker: each.epochs for worker, each in world.answers.items()} == {1: 0, 2: 0}


@pytest.mark.parametrize(
    ("where", "epochs"),
    [
        (steps_end(6, waits=False), 7),  # it ends its seventh epoch
        (epoch_ends(6, waits=False), 8),  # it is in its eighth
        (None, 3),  # it is in its first
    ],
)
def test_without_rounds_the_fit_ends_after_the_epoch_that_the_fastest_is_in(where, epochs):
    world = World(1, 2)
    if where is not None:
        world.meet(2, where)
    world.meet(1, steps_end(2, waits=False))
    world.meet(1, epoch_ends(2, stops=True, waits=False))
    assert world.answers[1].epochs == epochs
    assert world.ends == [(1, 1, epochs)]
    world.meet(2, epoch_ends(epochs - 1, waits=False))
    assert world.answers[2].epochs == epochs
    assert world.ends == [], "once"


def test_a_script_that_has_ended_its_fit_counts_with_the_epochs_that_it_had():
    world = World(1, 2)
    world.meet(2, steps_end(4, waits=False))
    world.note(world.meetings.arrive(2, "fit-1-end", world.now))
    world.meet(1, epoch_ends(1, stops=True, waits=False))
    assert world.answers[1].epochs == 5


@pytest.mark.parametrize("epochs_before", [0, 5])
def test_a_script_whose_fit_had_no_epochs_counts_with_none_of_an_earlier_fit(epochs_before):
    world = World(1, 2)
    if epochs_before:
        world.meet(2, steps_end(epochs_before - 1, waits=False))
    world.note(world.meetings.arrive(2, "fit-2-end", world.now))
    world.meet(1, epoch_ends(0, stops=True, waits=False, fit=2))
    assert world.answers[1].epochs == 1


def test_an_end_within_an_epoch_is_an_end_behind_it_for_those_who_meet():
    world = World(1, 2)
    world.meetings.end_fit(1, 0)
    world.meet(1, epoch_ends(2))
    world.meet(2, epoch_ends(2))
    assert {each.epochs for each in world.answers.values()} == {3}


@pytest.mark.parametrize("cause", ["lost", "ended its fit", "in a later fit"])
def test_nobody_waits_for_a_script_that_does_not_come(cause):
    world = World(1, 2)
    world.meet(1, steps_end(0, loss=[1]))
    if cause == "lost":
        world.present.discard(2)
        world.wait(0)
    else:
        barrier = "fit-1-end" if cause == "ended its fit" else "fit-2-begin"
        world.note(world.meetings.arrive(2, barrier, world.now))
    assert sums(world.answers[1]) == {"loss": [1.0]}


def test_one_that_was_started_again_is_behind_and_gets_what_is_known():
    world = World(1, 2)
    for epoch in range(3):
        for worker in (1, 2):
            world.meet(worker, steps_end(epoch, loss=[worker]))
    world.begin(2, incarnation=2)
    assert world.answers
    world.meet(1, steps_end(3, loss=[1]))
    assert sums(world.answers[1]) == {"loss": [1.0]}
    world.meet(2, steps_end(1, loss=[9]))
    assert sums(world.answers[2]) == {"loss": [3.0]}, "as all had in that epoch"


def test_one_whose_worker_waits_in_a_round_is_not_waited_for_long():
    world = World(1, 2)
    world.meet(1, steps_end(0, loss=[1]))
    world.held = {2}
    assert world.wait(HELD_SECONDS / 2).answers == {}
    world.wait(HELD_SECONDS / 2, updates=1)
    assert world.answers == {}, "rounds go on"
    assert set(world.wait(HELD_SECONDS).answers) == {1}


def test_a_slow_script_is_waited_for_as_long_as_it_takes():
    world = World(1, 2)
    for epoch in range(3):
        world.meet(1, steps_end(epoch, loss=[1]))
        assert world.wait(3600.0).answers == {}, "its device is slow, or it writes a large file"
        world.meet(2, steps_end(epoch, loss=[2]))
        assert [sums(each) for each in world.answers.values()] == [{"loss": [3.0]}] * 2
        for worker in (1, 2):
            world.meet(worker, epoch_ends(epoch))
        assert len(world.answers) == 2


def test_one_that_is_many_epochs_behind_gets_an_answer():
    world = World(1, 2)
    for epoch in range(8):
        for worker in (1, 2):
            world.meet(worker, steps_end(epoch, loss=[worker]))
        for worker in (1, 2):
            world.meet(worker, epoch_ends(epoch))
    assert world.answers
    world.begin(2, incarnation=2)
    for meeting in (steps_end(0, loss=[9]), epoch_ends(0), steps_end(1, loss=[8])):
        world.meet(2, meeting)
        assert set(world.answers) == {2}
    world.meet(1, steps_end(8, loss=[1]))
    assert set(world.answers) == {1}, "it waits for nobody who is behind"


def test_a_stop_that_comes_late_ends_the_fit_after_the_epoch_that_has_begun():
    world = World(1, 2)
    world.meet(1, epoch_ends(2))
    world.held = {2}
    world.wait(0).wait(HELD_SECONDS)
    assert world.answers[1].epochs == 0
    world.meet(2, epoch_ends(2, stops=True))
    assert world.answers[2].epochs == 4
    assert world.ends == [(2, 1, 4)]
    world.meet(1, epoch_ends(3))
    world.meet(2, epoch_ends(3))
    assert {each.epochs for each in world.answers.values()} == {4}


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6), st.booleans()), max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_order_of_meetings_is_answered_or_waits(calls):
    """Scripts come in any order, also to places that others have left: nothing is raised."""
    world = World(1, 2, 3)
    for worker, epoch, after_callbacks in calls:
        meeting = epoch_ends(epoch) if after_callbacks else steps_end(epoch, loss=[1])
        world.meet(worker, meeting).wait(0.1)
    world.present.clear()
    world.wait(1.0)
    assert not world.meetings._waiting()


def test_a_shard_that_is_started_again_gives_the_answers_of_before():
    world = World(1, 2)
    for worker in (1, 2):
        world.meet(worker, steps_end(0, loss=[worker]))
    known = world.answers[1]
    shard = EpochMeetings(lambda now: [1, 2], frozenset, world.stop_fit)
    outcomes = shard.begin(2, 1, 0.0) + shard.meet(2, steps_end(0, loss=[2]), 0.0)
    assert outcomes == [], "worker 1 may have more to say"
    known.answers = True
    outcomes = shard.begin(1, 1, 0.0) + shard.meet(1, known, 0.0)
    (answer,) = outcomes
    assert (answer.to, sums(answer.message.epoch_meeting)) == (2, {"loss": [3.0]})


def test_scripts_meet_at_a_real_shard_and_hear_of_an_early_end():
    shard = Shard()
    one, two = Script(shard, 1), Script(shard, 2)
    for script in (one, two):
        script.send(barrier=pb.Barrier(name="fit-1-begin"))
    one.send(epoch_meeting=steps_end(0, loss=[1]))
    assert one.last("epoch_meeting") is None
    two.send(epoch_meeting=steps_end(0, loss=[2]))
    assert sums(one.last("epoch_meeting")) == sums(two.last("epoch_meeting")) == {"loss": [3.0]}
    one.send(epoch_meeting=epoch_ends(0, stops=True))
    two.send(epoch_meeting=epoch_ends(0))
    assert one.last("epoch_meeting").epochs == two.last("epoch_meeting").epochs == 1
    assert two.last("stop_fit") == pb.StopFit(fit=1, epochs=1)


@pytest.mark.parametrize(
    "meeting",
    [
        steps_end(0, fit=0),
        pb.EpochMeeting(fit=1, states=[pb.MetricState(name="loss", values=b"1234567")]),
        pb.EpochMeeting(fit=1, states=[pb.MetricState(name="loss")] * 2),
        pb.EpochMeeting(fit=1, states=[pb.MetricState(name="loss" * 1000)]),
    ],
)
def test_states_that_no_script_has_are_rejected(meeting):
    script = Script(Shard(), 1).send(epoch_meeting=meeting)
    assert not script.is_open


def test_infinite_states_are_added_as_they_are():
    world = World(1, 2)
    world.meet(1, steps_end(0, loss=[math.inf]))
    world.meet(2, steps_end(0, loss=[1.0]))
    assert sums(world.answers[2]) == {"loss": [math.inf]}
