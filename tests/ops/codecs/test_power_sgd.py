"""PowerSGD equals its algorithm in ten lines of numpy; its limits and its cost."""

import numpy as np
import pytest

from tests.ops.drivers import BODIES
from tests.virtual.run import MiniRun
from tests.virtual.toy import method
from thinwire.ops.codecs.base import EncodeContext
from thinwire.ops.codecs.error_feedback import ErrorFeedback, coding_of
from thinwire.ops.codecs.power_sgd import PowerSgd
from thinwire.ops.codecs.registry import build_codec
from thinwire.ops.types import (
    VALUE_DTYPES,
    Block,
    ConfigurationError,
    Kind,
    LowRankBlock,
    ModelSpec,
    TensorSpec,
)
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.ops.wire.low_rank import expanded

#: A dense layer, a convolution, and two that are no larger than their factors.
SHAPES = ((30, 20), (3, 3, 4, 8), (8,), (2, 2))
SPEC = ModelSpec(tuple(TensorSpec(str(shape), shape) for shape in SHAPES))


def context(number=1):
    return EncodeContext(number, 0.1, np.random.default_rng([7, number]), BODIES)


def gradients(number, spec=SPEC):
    rng = np.random.default_rng([3, number])
    return [rng.standard_normal(tensor.size, np.float32) for tensor in spec.tensors]


def flat(packet, spec=SPEC):
    """A packet's values of each tensor, 0 where nothing is sent."""
    tensors = [np.zeros(tensor.size, np.float32) for tensor in spec.tensors]
    for block in packet.blocks:
        tensors[block.slot][:] = BODIES.dequantise(expanded(block).values)
    return tensors


def one(matrix, right=None, number=1, rank=2, **choices):
    """Encode one matrix without error feedback: return (block or None, decoded matrix)."""
    spec = ModelSpec((TensorSpec("m", matrix.shape),))
    codec = PowerSgd(rank, **choices)
    state = codec.init(spec, BODIES)
    if right is not None:
        state = {"right": [right]}
    packet, state = codec.encode([matrix.ravel()], state, context(number))
    block = packet.blocks[0] if packet.blocks else None
    return block, flat(packet, spec)[0].reshape(matrix.shape), state["right"][0]


def paper(steps, columns, right):
    """Algorithm 1 with error feedback on one worker, as the paper prints it."""
    left_over, sent = 0.0, []
    for gradient in steps:
        matrix = gradient.astype(float).reshape(-1, columns) + left_over
        left = np.linalg.qr(matrix @ right)[0]
        right = matrix.T @ left
        sent.append(left @ right.T)
        left_over = matrix - sent[-1]
    return sent


@pytest.mark.parametrize("rank", [1, 3])
def test_it_is_the_algorithm_of_the_paper(rank):
    codec = build_codec("powersgd", dict(powersgd_rank=rank))
    state, sent = codec.init(SPEC, BODIES), []
    for number in range(1, 7):
        packet, state = codec.encode(gradients(number), state, context(number))
        assert packet.kind is Kind.GRADIENT
        sent.append(flat(packet))
    draws = np.random.default_rng([7, 1])
    for slot, columns in ((0, 20), (1, 8)):
        right = draws.standard_normal((columns, rank), np.float32)
        expected = paper([gradients(number)[slot] for number in range(1, 7)], columns, right)
        for ours, theirs in zip(sent, expected, strict=True):
            np.testing.assert_allclose(ours[slot], theirs.ravel(), atol=2e-4)
    for slot in (2, 3):
        np.testing.assert_array_equal(sent[4][slot], gradients(5)[slot])


def test_what_has_the_rank_arrives_as_it_is():
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((50, 3), np.float32) @ rng.standard_normal((3, 40), np.float32)
    block, decoded, _ = one(matrix, rank=3)
    assert isinstance(block, LowRankBlock) and block.rank == 3
    np.testing.assert_allclose(decoded, matrix, atol=1e-5 * np.abs(matrix).max())
    whole, decoded, _ = one(matrix, rank=40)  # the factors would be larger than the matrix
    assert type(whole) is Block
    np.testing.assert_array_equal(decoded, matrix)


def test_the_warm_start_leads_to_the_best_approximation():
    matrix = np.random.default_rng(0).standard_normal((30, 20), np.float32)
    left, lengths, right = np.linalg.svd(matrix.astype(float))
    best = np.linalg.norm(matrix - (left[:, :2] * lengths[:2]) @ right[:2])
    _, decoded, start = one(matrix)
    assert np.linalg.norm(matrix - decoded) > 1.02 * best
    for number in range(2, 60):
        _, decoded, start = one(matrix, start, number)
    assert np.linalg.norm(matrix - decoded) < 1.001 * best


@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_nothing_is_lost(dtype):
    """Sent values plus residual equal the inputs; an update that did not arrive is sent later."""
    codec = build_codec("powersgd", dict(value_dtype=dtype))
    state = codec.init(SPEC, BODIES)
    total = [np.zeros(tensor.size) for tensor in SPEC.tensors]
    for number in range(1, 9):
        packet, state = codec.encode(gradients(number), state, context(number))
        for slot, (came, went) in enumerate(zip(gradients(number), flat(packet), strict=True)):
            total[slot] += came.astype(float) - (went if number != 5 else 0)
        if number == 5:
            state = codec.undelivered(packet, state)
        for left_over, expected in zip(state["residual"], total, strict=True):
            np.testing.assert_allclose(left_over, expected, atol=1e-5)
    assert all(block.values.dtype == dtype for block in packet.blocks)


def test_zeros_send_nothing_and_leave_a_start():
    codec = build_codec("powersgd", dict())
    zeros = [np.zeros(tensor.size, np.float32) for tensor in SPEC.tensors]
    packet, state = codec.encode(zeros, codec.init(SPEC, BODIES), context(1))
    assert [block.slot for block in packet.blocks] == [2, 3]
    packet, state = codec.encode(gradients(2), state, context(2))
    assert np.linalg.norm(flat(packet)[0]) > 1


def test_a_start_without_the_direction_is_left():
    """The first columns of P then belong to the first rows, which are zero as well."""
    matrix = np.zeros((20, 10), np.float32)
    matrix[-1, 0] = 1
    block, _, right = one(matrix, np.eye(10, dtype=np.float32)[:, 5:7])
    assert block is None
    _, decoded, _ = one(matrix, right)
    np.testing.assert_allclose(decoded, matrix, atol=1e-6)


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e15, 1e36, 3e38])
@pytest.mark.parametrize("dtype", VALUE_DTYPES)
def test_the_range_of_float32(size, dtype):
    matrix = np.full((40, 30), np.float32(size))
    right = None
    for number in range(1, 4):
        block, decoded, right = one(matrix, right, number, value_dtype=dtype)
        assert np.isfinite(decoded).all() and np.isfinite(right).all()
    if dtype in ("float32", "bfloat16") and size > 1e-35:
        np.testing.assert_allclose(decoded, matrix, rtol=0.02)
    if size == 3e38:
        assert type(block) is Block  # factors would be infinite


@pytest.mark.parametrize(
    ("name", "choices", "message"),
    [
        ("powersgd", {"powersgd_rank": 0}, "--powersgd_rank=0: expected.* 1"),
        ("powersgd", {"powersgd_rank": -3}, "--powersgd_rank=-3"),
        ("powersgd", {"value_dtype": "int4"}, "int4.*float16"),
        ("powersgd", {"error_feedback": True}, "--error_feedback.*--codec=powersgd"),
        ("powersgd", {"warmup_epochs": 2}, "--warmup_epochs.*--codec=powersgd"),
        ("topk", {"powersgd_rank": 4}, "--powersgd_rank=4.*--codec=powersgd.*--codec=topk"),
    ],
)
def test_nonsense_is_refused(name, choices, message):
    with pytest.raises(ConfigurationError, match=message):
        method("asgd", overrides={"codec": name}, **choices)


def test_what_it_is_built_of():
    assert build_codec("powersgd", dict(powersgd_rank=4)) == ErrorFeedback(PowerSgd(4))
    chosen = method("bsp", overrides={"codec": "powersgd", "down_codec": "delta"})
    assert "replies are dense" in chosen.warnings[0]
    assert ("codec.PowerSgd.powersgd_rank", "2") in chosen.fingerprint()
    assert coding_of(chosen.codec) == PowerSgd()


MNIST_CNN = ((3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), (9216, 128), (128,), (128, 10), (10,))


@pytest.mark.parametrize(
    ("rank", "dtype", "num_bytes"),
    [(1, "float32", 40_484), (2, "float32", 79_984), (4, "float32", 158_984), (2, "int8", 20_032)],
)
def test_bytes_of_a_push_are_those_in_the_documents(rank, dtype, num_bytes):
    spec = ModelSpec(tuple(TensorSpec(str(shape), shape) for shape in MNIST_CNN))
    codec = PowerSgd(rank, dtype)
    packet, _ = codec.encode(gradients(1, spec), codec.init(spec, BODIES), context())
    coded = [IndexChooser().encode(block) for block in packet.blocks]
    assert sum(len(each.index_bytes) + len(each.value_bytes) for each in coded) == num_bytes


@pytest.mark.parametrize("name", ["bsp", "asgd"])
def test_it_learns_over_several_shards(name):
    chosen = method(name, nb_workers=2, powersgd_rank=1, overrides={"codec": "powersgd"})
    run = MiniRun(chosen, iter_max=150, nb_ps=3).run()
    assert run.problem.accuracy(run.theta) > 0.85
