"""The Worker role's loop, part by part: the warm-up, interrupts, and reuse of gradient buffers."""

from types import SimpleNamespace

import numpy as np
import pytest

from thinwire.worker.core.worker_round import RoundAction, SendPush
from thinwire.worker.role import Worker


class Statistics:
    """Variables that each step moves, as BatchNorm's statistics and dropout's seeds do."""

    def __init__(self):
        self.value, self.num_steps = 5.0, 0

    def move(self, images, labels):
        assert len(images) == len(labels) == 4
        self.value += 1.0
        self.num_steps += 1

    def save_local(self):
        return {"0": self.value}

    def restore_local(self, state):
        self.value = state["0"]


def test_measuring_a_device_leaves_no_trace_in_the_model():
    step = Statistics()
    session = SimpleNamespace(step_seconds=0.0)
    worker = SimpleNamespace(
        step=step,
        shard=SimpleNamespace(num_examples=10, images=np.zeros((10, 2)), labels=np.zeros(10)),
        run=SimpleNamespace(batch_size=4),
        own=SimpleNamespace(device=SimpleNamespace(slowdown=1.0, step_seconds=0.0)),
        pause_seconds=0.0,
        session=session,
        _gradient=step.move,
    )
    Worker._warm_up(worker)
    assert step.num_steps > 1 and session.step_seconds > 0
    assert step.value == 5.0


def test_with_overlap_the_next_gradient_is_written_elsewhere_than_the_one_under_way():
    """The gradient under way may have to be sent again unchanged."""
    one, other = np.zeros(2), np.zeros(2)
    worker = SimpleNamespace(
        personal=SimpleNamespace(step=lambda rate: None),
        gradient=one,
        _spare_gradient=other,
        _rate=0.1,
    )
    for free in (other, one, other):
        Worker._load(worker, SendPush(None, ends_step=True))
        assert worker.gradient is free
    Worker._load(worker, SendPush(None, ends_step=False))  # an empty update has no gradient
    assert worker.gradient is other


@pytest.mark.parametrize(
    "actions",
    [
        [SendPush(None, ends_step=True), RoundAction.WAIT, RoundAction.LOAD_ROUND],
        [RoundAction.LOAD_STEP],
    ],
    ids=["push", "local step"],
)
def test_an_interrupt_during_a_mini_batch_waits_for_the_actions_that_follow_it(actions):
    """The checkpoint of an interrupted worker has no mini-batch that the shards lack."""
    following = [*actions, RoundAction.POLL]
    carried_out = []

    def carry_out(action):
        carried_out.append(action)
        return RoundAction.COMPUTE if action is RoundAction.POLL else following.pop(0)

    session = SimpleNamespace(
        begin=lambda: None,
        steps=SimpleNamespace(begin=lambda: RoundAction.POLL, diverged=None),
        stopped=False,
        core=SimpleNamespace(stopped=False),
        closing=SimpleNamespace(is_set=lambda: True),
    )

    def one_step():
        session.stopped = True
        return following.pop(0)

    worker = SimpleNamespace(
        session=session,
        _one_step=one_step,
        _carry_out=carry_out,
        _take_over=lambda weights: None,
        run=SimpleNamespace(checkpoint_interval_seconds=60.0),
        _settle=lambda: carried_out.append("settle"),
        save=lambda: carried_out.append("save"),
    )
    assert Worker._loop(worker) == "interrupted"
    assert carried_out == [RoundAction.POLL, *actions, "settle", "save"]
