"""The state of a worker's core over steps and restarts: residuals, BatchNorm's statistics."""

import dataclasses
from typing import ClassVar

import numpy as np
import pytest

from tests.virtual.worker import (
    KERNELS,
    SIZE,
    SPEC,
    STATISTICS,
    core_of,
    float32_block,
    normed_core,
    numbers,
    reply,
    start,
)
from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.downlink.types import Operation
from thinwire.ops.push_head import PushHead
from thinwire.ops.types import Kind, Packet
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.worker.core.core import WorkerCore
from thinwire.worker.core.messages import ScriptFigures


@dataclasses.dataclass(frozen=True)
class LargestWithResidual:
    """A codec that sends one entry per tensor: the smallest codec with a residual."""

    kind: ClassVar[Kind] = Kind.GRADIENT

    def init(self, spec, kernels):
        return {"residual": [np.zeros(tensor.size, np.float32) for tensor in spec.tensors]}

    def encode(self, tensors, state, ctx):
        blocks = []
        for slot, (tensor, residual) in enumerate(zip(tensors, state["residual"], strict=True)):
            residual += tensor
            at = np.abs(residual).argmax()
            blocks.append(float32_block(slot, tensor.size, np.array([at]), [residual[at]]))
            residual[at] = 0
        return Packet(tuple(blocks), self.kind), state

    def undelivered(self, packet, state):
        for block in packet.blocks:
            state["residual"][block.slot][block.indices] += block.values.data
        return state


def keeping_core():
    core = core_of()
    chosen = dataclasses.replace(core.method, codec=LargestWithResidual())
    return WorkerCore(SPEC, core.layouts, chosen, KERNELS, [1, 1])


def test_the_residual_is_kept_from_step_to_step():
    core = keeping_core()
    start(core, numbers())
    residual, total = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    for seed in range(1, 6):
        outgoing = core.begin(numbers(seed), 8, 1.0)
        residual += numbers(seed)
        for block in outgoing.shards[0]:
            at = SPEC.offsets[block.slot] + block.indices
            np.testing.assert_array_equal(block.values.data, residual[at])
            total[at] += block.values.data
            residual[at] = 0
        core.finish([reply(core.layouts[0], Operation.NONE, blocks=[])])
    kept = np.concatenate(core.save()["codec"]["residual"])
    np.testing.assert_array_equal(kept, residual)
    given = sum(numbers(seed) for seed in range(1, 6))
    np.testing.assert_allclose(total + kept, given, atol=1e-5)  # nothing lost, nothing twice


def ahead_core(ahead, local_steps=2):
    """A core with rounds that send one entry of each tensor and start ahead of the model."""
    chosen = {"chunk": 12, "chunk_k": 1, "error_decay": 0.9, "error_ahead": ahead}
    return core_of("sparseloco", value_dtype="float32", local_steps=local_steps, **chosen)


@pytest.mark.parametrize("ahead", [0.0, 0.5, 1.0])
def test_local_steps_begin_ahead_by_a_part_of_the_residual(ahead):
    """w <- b + a e, in the sign of w - b;  e <- 0.9 e + (w after the steps - w before them)."""
    core, twin = ahead_core(ahead), ahead_core(ahead)
    model, error = numbers(), np.zeros(SIZE, np.float32)
    weights = start(core, model)
    for turn in range(5):
        began = model + np.float32(ahead) * error
        np.testing.assert_allclose(weights, began, rtol=1e-6)
        core.begin(numbers(turn), 8, 1.0)
        if turn == 3:  # a restart within the round
            saved = core.save()
            core = twin
            assert core.restore(saved, core.step + 3)
            start(core, model)
            core.resume_round()
        outgoing = core.begin(numbers(turn + 10), 8, 1.0)
        ended = core.weights.copy()
        error = np.float32(0.9) * error + (ended - began)
        for block in outgoing.shards[0]:
            at = SPEC.offsets[block.slot] + block.indices
            np.testing.assert_allclose(block.values.data, error[at], rtol=1e-5, atol=1e-6)
            error[at] = 0
        model = numbers(turn + 20)
        weights = start(core, model)


def test_what_was_refused_returns_to_the_residual():
    core = keeping_core()
    start(core, numbers())
    core.undelivered()  # before anything was sent it is a no-op
    core.begin(numbers(1), 8, 1.0)
    core.undelivered()
    np.testing.assert_array_equal(np.concatenate(core.save()["codec"]["residual"]), numbers(1))


@pytest.mark.parametrize(("applied", "fits"), [(2, True), (1, False), (3, False), (0, False)])
def test_a_residual_comes_back_only_at_its_own_step(applied, fits, tmp_path):
    core = keeping_core()
    start(core, numbers())
    for seed in (1, 2):
        core.begin(numbers(seed), 8, 1.0)
        core.finish([reply(core.layouts[0], Operation.NONE, blocks=[])])
    Checkpoints(tmp_path).save(2, core.save())

    other = keeping_core()
    assert other.restore(Checkpoints(tmp_path).load_latest()[1], applied) is fits
    kept = np.concatenate(core.save()["codec"]["residual"])
    expected = kept if fits else np.zeros(SIZE, np.float32)
    np.testing.assert_array_equal(np.concatenate(other.save()["codec"]["residual"]), expected)
    assert other.step == applied
    start(other, numbers())
    assert other.begin(numbers(3), 8, 1.0).head.step == applied + 1


def test_statistics_go_with_each_push_and_are_replaced_by_the_reply():
    core = normed_core()
    start(core, numbers())
    mine = np.float32([4, 5, 6])
    outgoing = core.begin(numbers(1), 8, 1.0, mine)
    mine[:] = 0  # a retry sends the same packet
    np.testing.assert_array_equal(outgoing.aux, [4, 5, 6])
    core.finish([reply(core.layouts[0], Operation.NONE, blocks=[], aux=np.float32([7, 8, 9]))])
    np.testing.assert_array_equal(core.statistics, [7, 8, 9])
    np.testing.assert_array_equal(outgoing.aux, [4, 5, 6])
    core.finish([reply(core.layouts[0], Operation.NONE, blocks=[])])  # a shard without averages
    np.testing.assert_array_equal(core.statistics, [7, 8, 9])


def test_a_model_without_statistics_sends_none():
    core = core_of()
    start(core, numbers())
    assert core.begin(numbers(1), 8, 1.0, np.empty(0, np.float32)).aux is None
    assert core.aux_size == 0


@pytest.mark.parametrize("local_steps", [1, 3])
def test_statistics_that_are_not_finite_change_nothing(local_steps):
    core = normed_core(local_steps=local_steps, overrides={"pacer": "fixed"})
    start(core, numbers())
    with pytest.raises(NonFiniteUpdate):
        core.begin(numbers(1), 8, 1.0, np.float32([4, np.inf, 6]))
    np.testing.assert_array_equal(core.statistics, STATISTICS)
    np.testing.assert_array_equal(core.weights, numbers())


def test_statistics_of_a_round_come_back_with_it(tmp_path):
    core = normed_core(local_steps=3, overrides={"pacer": "fixed"})
    start(core, numbers())
    core.begin(numbers(1), 8, 1.0, np.float32([4, 5, 6]))
    Checkpoints(tmp_path).save(0, core.save())
    for version, expected in ((0, [4, 5, 6]), (1, [7, 8, 9])):
        other = normed_core(local_steps=3, overrides={"pacer": "fixed"})
        other.restore(Checkpoints(tmp_path).load_latest()[1], 0)
        other.finish(
            [
                reply(
                    core.layouts[0],
                    Operation.NONE,
                    blocks=[],
                    version=version,
                    generation=-1,
                    aux=np.float32([7, 8, 9]),
                )
            ]
        )
        other.resume_round()
        np.testing.assert_array_equal(other.statistics, expected)


def test_a_refused_push_without_an_update_returns_nothing_to_the_residual():
    """The shards have the update of the push before it."""
    core = keeping_core()
    start(core, numbers())
    core.begin(numbers(1), 8, 1.0)
    core.finish([reply(core.layouts[0], Operation.NONE, blocks=[])])
    before = np.concatenate(core.save()["codec"]["residual"]).copy()
    core.begin(numbers(2), 8, 1.0, figures=ScriptFigures(PushHead(overflow=True, loss_scale=2.0)))
    core.undelivered()
    np.testing.assert_array_equal(np.concatenate(core.save()["codec"]["residual"]), before)


@pytest.mark.parametrize("optimizer", [0, 1])
def test_what_was_refused_returns_to_the_optimizer_that_it_was_for(optimizer):
    core = core_of()
    chosen = dataclasses.replace(core.method, codec=LargestWithResidual())
    groups = ((0,), (1, 2))
    core = WorkerCore(SPEC, core.layouts, chosen, KERNELS, [1, 1], groups=groups)
    start(core, numbers())
    core.begin(numbers(1), 8, 1.0, figures=ScriptFigures(PushHead(optimizer=optimizer)))
    core.undelivered()
    saved = core.save()
    for number, state in enumerate((saved["codec"], saved["more_codecs"]["1"])):
        parts = [numbers(1)[SPEC.offsets[n] : SPEC.offsets[n + 1]] for n in groups[number]]
        expected = np.concatenate(parts) if number == optimizer else 0
        np.testing.assert_array_equal(np.concatenate(state["residual"]), expected)


def test_what_a_round_has_counted_comes_back_with_it():
    def round_of(core, numbers_, losses):
        pairs = zip(numbers_, losses, strict=True)
        parts = ScriptFigures(PushHead(batch_parts=2))
        return [core.begin(numbers(n), 4, loss, figures=parts) for n, loss in pairs][-1]

    core, other = (core_of(local_steps=3, overrides={"pacer": "fixed"}) for _ in range(2))
    start(core, numbers())
    assert round_of(core, (1, 2), (1.0, 3.0)) is None
    other.restore(core.save(), 0)
    start(other, numbers())
    other.resume_round()
    outgoing = round_of(other, (3,), (8.0,))
    expected = round_of(core, (3,), (8.0,))
    for push in (outgoing, expected):
        head = push.head
        assert (head.loss, head.samples, head.local_steps, head.batch_parts) == (4.0, 12, 3, 6)


def test_the_loss_of_no_example_is_no_loss():
    core = core_of()
    start(core, numbers())
    push = core.begin(np.zeros(SIZE, np.float32), samples=0, loss=0.0)
    assert (push.head.samples, push.head.loss) == (0, None)


@dataclasses.dataclass(frozen=True)
class SeesEpochs(LargestWithResidual):
    """Records the epochs that it receives."""

    seen: list = dataclasses.field(default_factory=list)

    def encode(self, tensors, state, ctx):
        self.seen.append(ctx.epoch)
        return super().encode(tensors, state, ctx)


def test_codecs_count_the_epochs_of_the_whole_run():
    core, codec = core_of(), SeesEpochs()
    chosen = dataclasses.replace(core.method, codec=codec)
    core = WorkerCore(SPEC, core.layouts, chosen, KERNELS, [1, 1], num_examples=100)
    start(core, numbers())
    for samples in (250, 1000):
        core.finish([reply(core.layouts[0], Operation.NONE, blocks=[], samples=samples)])
        core.begin(numbers(1), 8, 1.0)
    assert codec.seen == [2.5, 10.0]


def test_a_push_says_how_old_its_gradient_is_at_each_shard():
    core = core_of(nb_ps=2)
    start(core, numbers())
    for shard, version in enumerate((7, 3)):
        core.receive(shard, reply(core.layouts[shard], Operation.NONE, blocks=[], version=version))
    cases = (
        ([5, 3], [2, 0]),
        ([9, 3], [0, 0]),  # a shard came back older
        (None, [0, 0]),
    )
    for computed_at, lags in cases:
        push = core.begin(numbers(1), 8, 1.0, computed_at=computed_at)
        assert [origin.lag for origin in push.origins] == lags
