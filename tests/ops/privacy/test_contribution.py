"""A worker's contribution has at most the clip norm, and moves a mean by at most clip / n."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.virtual.toy import KERNELS, SPEC, method
from thinwire.ops.codecs.base import EncodeContext, NonFiniteUpdate
from thinwire.ops.codecs.packets import decoded
from thinwire.ops.types import Update
from thinwire.worker.core.core import UpdatePacker

#: Codecs that round, leave out, keep back and factorise.
CODECS = {
    "dense": {},
    "int8": {"value_dtype": "int8"},
    "bfloat16": {"value_dtype": "bfloat16"},
    "topk": {"overrides": {"codec": "topk"}, "compression_rate": 0.2},
    "random_k": {"overrides": {"codec": "random_k"}, "compression_rate": 0.2},
    "feedback": {
        **{"overrides": {"codec": "topk"}, "compression_rate": 0.1},
        **{"error_feedback": True, "value_dtype": "int8", "dense_below": 5},
    },
    "sparseloco": {
        **{"overrides": {"codec": "chunked_topk"}, "chunk": 8, "chunk_k": 2},
        **{"error_feedback": True, "error_decay": 0.95, "value_dtype": "int2"},
    },
    "sign": {"value_dtype": "sign", "error_feedback": True},
    "powersgd": {"overrides": {"codec": "powersgd"}, "powersgd_rank": 1},
}
SIZE = SPEC.num_parameters
_VALUES = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
_ROUNDS = st.lists(
    st.one_of(arrays(np.float32, SIZE, elements=_VALUES), st.just(np.zeros(SIZE, np.float32))),
    min_size=1,
    max_size=5,
)


def private(nb_workers=2, **choices):
    overrides = {"pacer": "fixed", "down_codec": "dense"} | choices.pop("overrides", {})
    choices = {"dp_clip": 0.5, "local_steps": 3} | choices
    return method("bsp", nb_workers, overrides=overrides, **choices)


def packer(chosen, seed=0):
    return UpdatePacker(SPEC, chosen.place(SPEC, 1), chosen, KERNELS, [seed, 1])


def flat(packet):
    """[num_parameters] float64 that a packet decodes to."""
    found = np.zeros(SIZE)
    for block in packet.blocks:
        where, values = decoded(block)
        found[SPEC.offsets[block.slot] :][: block.size][where] = values
    return found


def norm(values):
    return math.sqrt(float(np.square(values, dtype=np.float64).sum()))


@pytest.mark.parametrize("name", CODECS)
@given(rounds=_ROUNDS, clip=st.sampled_from([1e-3, 0.5, 7.0]))
@settings(max_examples=40, deadline=None)
def test_one_worker_moves_the_mean_by_at_most_the_clip_over_n(name, rounds, clip):
    chosen = private(nb_workers=3, dp_clip=clip, **CODECS[name])
    mine = packer(chosen)
    others = [packer(chosen, seed) for seed in (1, 2)]
    rng = np.random.default_rng(0)
    for step, change in enumerate(rounds, 1):
        sent = [flat(mine.encode(change, step, 0.1, 0.0))]
        theirs = rng.normal(size=SIZE).astype(np.float32)
        sent += [flat(each.encode(theirs, step, 0.1, 0.0)) for each in others]
        assert norm(sent[0]) <= clip
        with_me, without = (
            chosen.aggregate.merge([Update(None, row.astype(np.float32)) for row in rows], SIZE)
            for rows in (sent, [np.zeros(SIZE), *sent[1:]])
        )
        moved = norm(with_me.values.astype(np.float64) - without.values)
        assert moved <= clip / 3 * (1 + 1e-6)


def test_error_feedback_alone_would_exceed_the_clip():
    """Residuals of earlier rounds make one round's update larger than the round's change."""
    chosen = private(**CODECS["feedback"])
    unbounded = dataclasses.replace(chosen, codec=chosen.codec.inner)
    bounded, plain = packer(chosen), packer(unbounded)
    largest = 0.0
    change = np.linspace(0.5, 1, SIZE).astype(np.float32)
    for step in range(1, 30):
        assert norm(flat(bounded.encode(change, step, 0.1, 0.0))) <= 0.5
        largest = max(largest, norm(flat(plain.encode(change, step, 0.1, 0.0))))
    assert largest > 0.75


def test_a_small_change_is_sent_as_it_is():
    change = np.full(SIZE, 0.01, np.float32)
    sent = flat(packer(private()).encode(change, 1, 0.1, 0.0))
    np.testing.assert_array_equal(sent, change)


def test_a_large_change_keeps_its_direction():
    change = np.linspace(-3, 5, SIZE).astype(np.float32)
    sent = flat(packer(private()).encode(change, 1, 0.1, 0.0))
    np.testing.assert_allclose(sent, 0.5 * change / norm(change), rtol=3e-6)


def test_what_is_not_finite_is_refused():
    change = np.full(SIZE, np.nan, np.float32)
    with pytest.raises(NonFiniteUpdate):
        packer(private()).encode(change, 1, 0.1, 0.0)


def test_what_was_refused_comes_back_and_stays_bounded():
    made = packer(private(**CODECS["feedback"]))
    for step in range(1, 20):
        assert norm(flat(made.encode(np.ones(SIZE, np.float32), step, 0.1, 0.0))) <= 0.5
        made.undelivered()


def test_the_state_of_what_is_inside_is_kept():
    chosen = private(**CODECS["feedback"])
    state = chosen.codec.init(SPEC, KERNELS)
    tensors = [np.ones(tensor.size, np.float32) for tensor in SPEC.tensors]
    context = EncodeContext(1, 0.1, np.random.default_rng(0), KERNELS)
    _, after = chosen.codec.encode(tensors, state, context)
    assert after.keys() == state.keys()
