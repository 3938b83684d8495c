"""Order of computing, exchanging and waiting: every event in every stage, and whole trainings."""

from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import pytest

from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.worker.core.messages import ShardReply
from thinwire.worker.core.worker_round import (
    MiniBatch,
    Restore,
    RoundAction,
    RoundStage,
    SendPush,
    WorkerRound,
)

BATCH = MiniBatch(None, 4, 0.5)
ACCEPTED = [SimpleNamespace(refused="")]


class Core:
    """The part of a worker's engine that the machine calls: `due` steps end a round."""

    def __init__(self, overlap=False, due=1):
        self.method, self.own = SimpleNamespace(overlap=overlap), None
        self.stopped, self.learning_rate = False, 0.1
        self.refuses, self.due, self.steps, self.number = False, due, 0, 0
        self.log = []

    def begin(self, values, samples, loss, statistics, computed_at, figures):
        if self.refuses:
            raise NonFiniteUpdate("NaN")
        self.steps += 1
        self.log.append("step")
        return self.end_round() if self.steps >= self.due else None

    def end_round(self):
        self.steps, self.number = 0, self.number + 1
        self.log.append(f"push {self.number}")
        return self.number

    begin_empty = end_round

    def end_training(self):
        return None

    def settle(self, replies):
        self.log.append("settle")


@pytest.fixture(autouse=True)
def _plain_replies(monkeypatch):
    monkeypatch.setattr(
        "thinwire.worker.core.worker_round.was_accepted", lambda replies: replies == ACCEPTED
    )


def machine(stage=RoundStage.READY, overlap=False, is_under_way=False, **core):
    made = WorkerRound(Core(overlap, **core))
    made.stage = stage
    made.under_way = 7 if is_under_way else None
    return made


#: Stages in which a push is under way; in READY only with overlap.
UNDER_WAY = {RoundStage.SENDING, RoundStage.WAITING, RoundStage.AHEAD, RoundStage.HELD}
EVENTS = {
    "begin": lambda made: made.begin(),
    "polled": lambda made: made.polled(False),
    "end_round": lambda made: made.end_round(),
    "end_training": lambda made: made.end_training(),
    "computed": lambda made: made.computed(BATCH),
    "computed_ahead": lambda made: made.computed_ahead(),
    "refused": lambda made: made.refused(NonFiniteUpdate("NaN")),
    "replied": lambda made: made.replied(ACCEPTED),
}
#: Event -> stage -> action and next stage. All other pairs are mistakes of the driver.
ALLOWED = {
    "begin": {RoundStage.READY: (RoundAction.POLL, RoundStage.READY)},
    "polled": {RoundStage.READY: (RoundAction.COMPUTE, RoundStage.COMPUTING)},
    "end_round": {RoundStage.READY: (SendPush(1, ends_step=False), RoundStage.SENDING)},
    "end_training": {RoundStage.READY: (None, RoundStage.READY)},
    "computed": {
        RoundStage.COMPUTING: (SendPush(1, ends_step=True), RoundStage.SENDING),
        RoundStage.AHEAD: (RoundAction.WAIT, RoundStage.HELD),
    },
    "computed_ahead": {RoundStage.COMPUTING: (RoundAction.LOAD_STEP, RoundStage.LOADING)},
    "refused": {RoundStage.COMPUTING: (Restore, RoundStage.LOADING)},
    "replied": {
        RoundStage.WAITING: (RoundAction.LOAD_ROUND, RoundStage.LOADING),
        RoundStage.AHEAD: (RoundAction.LOAD_ROUND, RoundStage.LOADING_AHEAD),
        RoundStage.HELD: (RoundAction.LOAD_ROUND, RoundStage.LOADING_HELD),
    },
}


@pytest.mark.parametrize("stage", RoundStage, ids=lambda stage: stage.name)
@pytest.mark.parametrize("event", EVENTS)
def test_every_event_in_every_stage(event, stage):
    made = machine(stage, is_under_way=stage in UNDER_WAY)
    expected = ALLOWED[event].get(stage)
    if expected is None:
        with pytest.raises(RuntimeError, match=stage.name):
            EVENTS[event](made)
        return
    action, after = expected
    found = EVENTS[event](made)
    assert isinstance(found, Restore) if action is Restore else found == action
    assert made.stage is after


@pytest.mark.parametrize(
    ("stage", "overlap", "action", "after"),
    [
        (RoundStage.SENDING, False, RoundAction.WAIT, RoundStage.WAITING),
        (RoundStage.SENDING, True, RoundAction.POLL, RoundStage.READY),
        (RoundStage.LOADING, False, RoundAction.POLL, RoundStage.READY),
        (RoundStage.LOADING_AHEAD, True, None, RoundStage.COMPUTING),
    ],
)
def test_what_follows_a_finished_action(stage, overlap, action, after):
    made = machine(stage, overlap, is_under_way=stage is RoundStage.SENDING)
    assert made.done() == action
    assert made.stage is after


@pytest.mark.parametrize(
    ("stage", "is_under_way", "action", "after"),
    [
        (RoundStage.READY, False, None, RoundStage.READY),
        (RoundStage.READY, True, RoundAction.WAIT, RoundStage.WAITING),
        (RoundStage.COMPUTING, False, None, RoundStage.READY),
        (RoundStage.AHEAD, True, RoundAction.WAIT, RoundStage.WAITING),
        (RoundStage.OVER, False, None, RoundStage.OVER),
    ],
)
def test_a_pause_waits_for_what_is_under_way(stage, is_under_way, action, after):
    made = machine(stage, overlap=True, is_under_way=is_under_way)
    assert made.settle() == action
    assert made.stage is after


def test_after_a_failed_exchange_there_is_none():
    made = machine(RoundStage.WAITING, is_under_way=True)
    made.abandon()
    assert (made.stage, made.under_way, made.settle()) == (RoundStage.OVER, None, None)


def test_without_examples_a_worker_pushes_nothing_and_waits():
    made = WorkerRound(Core(overlap=True), has_examples=False)
    assert made.polled(False) == SendPush(1, ends_step=False)
    assert made.done() is RoundAction.WAIT  # otherwise it would push again before the replies


def test_a_script_s_own_step_is_exchanged_whole():
    """Its thread waits for the replies; the script computes meanwhile."""
    core = Core(overlap=True)
    core.own = object()
    made = WorkerRound(core)
    made.polled(False)
    assert made.computed(BATCH) == SendPush(1, ends_step=True)
    assert made.done() is RoundAction.WAIT


def test_a_held_mini_batch_is_dropped_if_the_run_ends():
    made = machine(RoundStage.AHEAD, overlap=True, is_under_way=True)
    assert made.computed(BATCH) is RoundAction.WAIT
    made.replied(ACCEPTED)
    made.core.stopped = True
    assert made.done() is RoundAction.END and made.core.log == ["settle"]


@pytest.mark.parametrize("kind", ["not finite", "rejected"])
def test_a_hundred_unusable_mini_batches_in_a_row_are_borne(kind):
    made = machine()
    made.core.refuses = kind == "not finite"
    replies = [SimpleNamespace(refused="too large")]
    action = made.begin()
    for _ in range(101):
        assert made.diverged is None
        assert action is RoundAction.POLL and made.polled(False) is RoundAction.COMPUTE
        action = made.computed(BATCH)
        if isinstance(action, SendPush):
            assert made.done() is RoundAction.WAIT
            assert made.replied(replies) is RoundAction.LOAD_ROUND
        action = made.done()
    assert action is RoundAction.END and "101 mini-batches in a row" in str(made.diverged)
    assert made.num_non_finite == (101 if kind == "not finite" else 0)


def test_one_usable_mini_batch_ends_the_count():
    made = machine(due=2)
    made.core.refuses = True
    for _ in range(60):
        made.stage = RoundStage.COMPUTING
        made.computed(BATCH)
        made.done()
    made.core.refuses = False
    made.stage = RoundStage.COMPUTING
    assert made.computed(BATCH) is RoundAction.LOAD_STEP
    made.core.refuses = True
    for _ in range(100):
        made.stage = RoundStage.COMPUTING
        made.computed(BATCH)
    assert made.diverged is None


@hypothesis.given(
    st.booleans(),
    st.integers(1, 3),
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40),
)
def test_whole_trainings_as_two_plain_loops(overlap, due, draws):
    """Draws: whether the pacer ends a round early, and whether a mini-batch is not finite."""
    due = 1 if overlap else due
    made, core = machine(overlap=overlap, due=due), Core(overlap, due)
    action = made.begin()
    for is_due, is_bad in draws:
        is_due = is_due and not overlap and made.core.steps > 0
        while action is not RoundAction.POLL:
            action = follow(made, action)
        action = made.polled(is_due)
        if action is RoundAction.COMPUTE:
            made.core.refuses = is_bad
            action = made.computed(BATCH)
            while action is RoundAction.WAIT or action in (
                RoundAction.LOAD_STEP,
                RoundAction.LOAD_ROUND,
            ):
                action = follow(made, action)
    plain(core, overlap, draws)
    assert made.core.log == core.log
    assert made.num_steps == sum(word == "step" for word in core.log) + made.num_non_finite


def follow(made, action):
    """Carry out an action that computes nothing."""
    if action is RoundAction.WAIT:
        made.replied(ACCEPTED)
    return made.done()


def plain(core, overlap, draws):
    """Train as a reader would write it down."""
    is_under_way = False
    for number, (is_due, is_bad) in enumerate(draws):
        is_last = number == len(draws) - 1
        if is_due and not overlap and core.steps > 0:
            core.end_round()
            request = True
        else:
            if overlap and is_under_way:
                core.settle(ACCEPTED)
                is_under_way = False
            core.refuses = is_bad
            try:
                request = core.begin(None, 4, 0.5, None, None, None)
            except NonFiniteUpdate:
                request = None
        if request is None:
            continue
        if overlap:
            is_under_way = True
        elif not is_last:  # the last push is not sent any more
            core.settle(ACCEPTED)


def test_replies_of_shards_are_of_the_type_that_the_core_takes():
    """The replies of these tests are stand-ins; `was_accepted` reads this field."""
    assert "refused" in ShardReply.__dataclass_fields__
