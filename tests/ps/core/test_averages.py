"""Shard 0 averages auxiliary values: exactly in BSP, as a running mean without a barrier."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pushes import push_event
from tests.virtual.shard import core_of, join, of
from tests.virtual.toy import KERNELS, SPEC, method
from thinwire.ops.sharding.split import place_tensors
from thinwire.ops.types import ConfigurationError, Kind, Update
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.core import events
from thinwire.ps.core.averages import WorkerAverages
from thinwire.ps.core.core import PsCore
from thinwire.ps.wire.push_decoder import NonFinite, PushDecoder
from thinwire.runtime.persistence.checkpoint import Checkpoints

START = np.float32([1, 2, 3])


def with_aux(chosen, num_slots=0, statistics=START):
    plain = core_of(chosen)
    aux = WorkerAverages(statistics, num_slots)
    return PsCore(plain.config, chosen, np.zeros(4, np.float32), KERNELS, plain.membership, aux)


def push(core, worker, step, aux, base=0, now=0.0):
    update = Update(None, np.ones(4, np.float32))
    event = push_event(
        worker,
        worker,
        step,
        base,
        0,
        core.membership.epoch,
        update,
        1,
        1,
        1.0,
        np.asarray(aux, np.float32),
    )
    return of(events.Reply, core.handle(event, now))


def test_everybody_starts_with_the_same_values():
    core = with_aux(method("bsp", nb_workers=2))
    join(core, 1)
    (reply,) = of(events.Reply, join(core, 2))[-1:]
    np.testing.assert_array_equal(reply.aux, START)


def test_bsp_is_the_plain_mean():
    core = with_aux(method("bsp", nb_workers=3))
    for worker in (1, 2, 3):
        join(core, worker)
    sent = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
    assert push(core, 1, 1, sent[0]) == push(core, 2, 1, sent[1]) == []
    replies = push(core, 3, 1, sent[2])
    assert len(replies) == 3
    for reply in replies:
        np.testing.assert_array_equal(reply.aux, sent.astype(np.float64).mean(0).astype("f4"))


def test_without_a_barrier_it_is_a_running_mean():
    core = with_aux(method("asgd", nb_workers=4))
    for worker in (1, 2, 3, 4):
        join(core, worker)
    expected = START.astype(np.float64)
    for step, worker in enumerate([1, 2, 1, 3, 4, 4], 1):
        sent = np.float32([step, -step, 0.5])
        expected = expected + 0.25 * (sent - expected)
        (reply,) = push(core, worker, step, sent, base=step - 1)
        np.testing.assert_allclose(reply.aux, expected, rtol=1e-6)


def test_groups_move_it_by_their_share_of_the_live():
    core = with_aux(method("gsp", nb_workers=3, groups=((1, 2), (3,))))
    for worker in (1, 2, 3):
        join(core, worker)
    push(core, 1, 1, [4, 4, 4])
    (reply, _) = push(core, 2, 1, [8, 8, 8])
    np.testing.assert_allclose(reply.aux, START + 2 / 3 * (6 - START), rtol=1e-6)


def test_a_late_joiner_gets_the_means_with_its_model():
    core = with_aux(method("asgd", nb_workers=2))
    join(core, 1)
    push(core, 1, 1, [7, 8, 9])
    (reply,) = of(events.Reply, join(core, 2))
    np.testing.assert_array_equal(reply.aux, [7, 8, 9])


def test_who_has_left_does_not_count_as_live():
    core = with_aux(method("asgd", nb_workers=2))
    join(core, 1)
    join(core, 2)
    core.handle(events.Leave(2, 2, "done"), 1.0)
    (reply,) = push(core, 1, 1, [7, 8, 9], now=1.0)
    np.testing.assert_array_equal(reply.aux, [7, 8, 9])


def test_a_reply_on_its_way_does_not_change():
    core = with_aux(method("asgd", nb_workers=1))
    join(core, 1)
    (first,) = push(core, 1, 1, [7, 8, 9])
    push(core, 1, 2, [1, 1, 1], base=1)
    np.testing.assert_array_equal(first.aux, [7, 8, 9])


def test_observers_see_the_statistics_and_not_the_slots():
    core = with_aux(method("asgd", nb_workers=1), num_slots=2)
    join(core, 1)
    push(core, 1, 1, [7, 8, 9, 5, 6])
    (view,) = of(events.EvaluationReply, core.handle(events.EvaluationPull(1), 0.0))
    np.testing.assert_array_equal(view.reply.aux, [7, 8, 9])


def test_nothing_travels_where_nothing_is_averaged():
    core = core_of(method("asgd", nb_workers=1))
    (reply,) = of(events.Reply, join(core, 1))
    assert reply.aux is None and core.averages.size == 0


def test_a_repeated_push_is_not_merged_twice():
    core = with_aux(method("asgd", nb_workers=2))
    join(core, 1)
    join(core, 2)
    (first,) = push(core, 1, 1, [7, 8, 9])
    (again,) = push(core, 1, 1, [7, 8, 9])
    np.testing.assert_array_equal(first.aux, again.aux)


def test_it_is_in_the_checkpoint(tmp_path):
    chosen = method("asgd", nb_workers=2)
    core = with_aux(chosen, num_slots=1)
    join(core, 1)
    push(core, 1, 1, [7, 8, 9, 10])
    Checkpoints(tmp_path).save(1, core.state_dict())
    other = with_aux(chosen, num_slots=1)
    other.load_state_dict(Checkpoints(tmp_path).load_latest()[1])
    np.testing.assert_array_equal(other.averages.mean, [7, 8, 9, 10])
    with pytest.raises(ConfigurationError, match="4 values .* [0-9]+ values"):
        with_aux(chosen).load_state_dict(Checkpoints(tmp_path).load_latest()[1])


NUMBERS = st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)


@given(st.lists(st.lists(NUMBERS, min_size=2, max_size=2), min_size=1), st.integers(1, 100))
def test_it_stays_within_what_was_sent(rows, num_live):
    aux = WorkerAverages(np.zeros(2, np.float32))
    aux.merge([np.float32(row) for row in rows], num_live)
    sent = np.float32([*rows, [0, 0]])
    assert np.isfinite(aux.mean).all() and aux.mean.dtype == np.float32
    margin = 1e-6 * np.abs(sent).max()
    assert (aux.mean <= sent.max(0) + margin).all() and (aux.mean >= sent.min(0) - margin).all()


class Wire:
    """A push of the whole model [28] with `count` auxiliary values, as a decoder meets it."""

    def __init__(self, count, expected=3):
        (layout,) = place_tensors(SPEC, 1)
        self.decoder = PushDecoder(layout, Kind.GRADIENT, KERNELS, expected)
        blocks = [pb.Block(slot=s, count=piece.size) for s, piece in enumerate(layout.slices)]
        self.push = pb.Push(step=1, samples=1, local_steps=1, blocks=blocks, aux_count=count)

    def decode(self, aux):
        payload = np.arange(28, dtype="<f4").tobytes() + np.asarray(aux, "<f4").tobytes()
        return self.decoder.decode(1, self.push, memoryview(payload))


def test_the_end_of_the_payload_is_carved_off():
    event = Wire(3).decode([7, 8, 9])
    np.testing.assert_array_equal(event.aux, [7, 8, 9])
    np.testing.assert_array_equal(event.update.values, np.arange(28))


@pytest.mark.parametrize("count", [0, 2, 4, 2**32 - 1])
def test_another_count_is_malformed(count):
    with pytest.raises(Malformed, match=f"{count} auxiliary values.*; expected 3"):
        Wire(count).decode([7, 8, 9])


def test_a_payload_that_is_too_short_is_malformed():
    with pytest.raises(Malformed, match="3 auxiliary values .*payload of 8 bytes"):
        messages.carve_aux(memoryview(bytes(8)), 3, (3,))
    with pytest.raises(Malformed, match="ends at byte"):
        Wire(3).decode([7, 8])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_like_an_update(value):
    with pytest.raises(NonFinite, match="aux.* is not finite"):
        Wire(3).decode([7, value, 9])


def test_values_are_little_endian_float32():
    payload, values = messages.carve_aux(memoryview(b"ab" + struct.pack("<2f", 1.5, -2)), 2, (2,))
    assert (bytes(payload), values.tolist(), values.dtype) == (b"ab", [1.5, -2.0], np.float32)


def test_a_drawn_round_replaces_the_statistics_as_a_whole_one_does():
    """The others have not trained: they take part in the mean no more than in the update."""
    chosen = method("bsp", nb_workers=4, fraction=0.5)
    core = with_aux(chosen)
    for worker in (1, 2, 3, 4):
        join(core, worker)
    drawn = [worker for worker in core.rounds.live() if core.rounds.may_proceed(worker)]
    assert len(drawn) == 2
    for worker, values in zip(drawn, ([2, 2, 2], [4, 6, 8]), strict=True):
        push(core, worker, 1, values)
    assert core.version == 1
    np.testing.assert_array_equal(core.averages.mean, np.float32([3, 4, 5]))
