"""Messages: method signatures, their differences in words, and blocks within a message."""

import numpy as np
import pytest

from thinwire.ops.types import Block, CodedValues, ModelSpec, TensorSpec
from thinwire.ops.wire.blocks import IndexChooser, IndexCoding, WireBlock
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed

SPEC = ModelSpec(
    (TensorSpec("conv/kernel", (3, 3, 1, 8)), TensorSpec("conv/bias", (8,)), TensorSpec("s", ()))
)
SIZES = (72, 8, 1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (SPEC.tensors, None),
        (
            (SPEC.tensors[0], TensorSpec("conv/bias", (9,)), SPEC.tensors[2]),
            "shape of conv/bias: expected (8,), got (9,)",
        ),
        (
            (TensorSpec("dense/kernel", (72,)), *SPEC.tensors[1:]),
            "path of variable 0: expected 'conv/kernel', got 'dense/kernel'",
        ),
        (SPEC.tensors[:2], "variable 's' is missing: expected 3 entries, got 2"),
        (
            (*SPEC.tensors, TensorSpec("t", ())),
            "variable 't' is not expected: expected 3 entries, got 4",
        ),
    ],
)
def test_models_are_compared_in_words(changed, words):
    ours, theirs = messages.tensors_of(SPEC), messages.tensors_of(ModelSpec(changed))
    assert messages.first_difference(ours, theirs) == words


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ([("codec", "topk"), ("codec.compression_rate", "0.01")], None),
        (
            [("codec", "topk"), ("codec.compression_rate", "0.1")],
            "codec.compression_rate: expected '0.01', got '0.1'",
        ),
        ([("sync", "bsp")], "name of setting 0: expected 'codec', got 'sync'"),
        ([("codec", "topk")], "codec.compression_rate is missing: expected 2 entries, got 1"),
    ],
)
def test_fingerprints_are_compared_in_words(changed, words):
    ours = messages.settings_of([("codec", "topk"), ("codec.compression_rate", "0.01")])
    assert messages.first_difference(ours, messages.settings_of(changed)) == words


def dense_block(slot: int, values: np.ndarray) -> WireBlock:
    return WireBlock(slot, values.size, IndexCoding.DENSE, 0, b"", "float32", 1.0, values.tobytes())


def sparse_block(slot: int, positions: list[int], values: np.ndarray) -> WireBlock:
    index_bytes = np.array(positions, "<u4").tobytes()
    return WireBlock(
        slot,
        len(positions),
        IndexCoding.UINT32,
        0,
        index_bytes,
        "int8",
        0.5,
        values.astype(np.int8).tobytes(),
    )


def blocks() -> list[WireBlock]:
    return [
        sparse_block(0, [1, 5, 71], np.array([3, -4, 5])),
        dense_block(1, np.arange(8, dtype="<f4")),
    ]


def through_a_message() -> tuple[pb.Push, bytes]:
    push = pb.Push()
    pieces = messages.blocks_to_message(blocks(), push.blocks)
    return push, b"".join(bytes(piece) for piece in pieces)


def test_blocks_survive_a_message():
    push, payload = through_a_message()
    sparse, dense = messages.blocks_from_message(push.blocks, memoryview(payload), SIZES)
    assert (sparse.slot, sparse.size, sparse.values.dtype, sparse.values.scale) == (
        0,
        72,
        "int8",
        0.5,
    )
    np.testing.assert_array_equal(sparse.indices, [1, 5, 71])
    np.testing.assert_array_equal(sparse.values.data, [3, -4, 5])
    assert (dense.slot, dense.size, dense.indices) == (1, 8, None)
    np.testing.assert_array_equal(dense.values.data, np.arange(8))


def test_deflated_exponents_survive_a_message():
    values = np.random.default_rng(1).normal(0, 0.01, 600).astype(np.float32)
    block = Block(0, 5000, np.arange(0, 3000, 5), CodedValues("float32", values))
    message = pb.Push()
    pieces = messages.blocks_to_message([IndexChooser().encode(block)], message.blocks)
    payload = b"".join(bytes(piece) for piece in pieces)
    assert 0 < message.blocks[0].value_bytes < 0.9 * 2400
    (back,) = messages.blocks_from_message(message.blocks, memoryview(payload), [5000])
    np.testing.assert_array_equal(back.values.data, values)
    np.testing.assert_array_equal(back.indices, block.indices)


def test_no_blocks_are_no_payload():
    assert messages.blocks_from_message([], memoryview(b""), SIZES) == []


def _change(number: int, **fields):
    def apply(push: pb.Push, payload: bytes) -> bytes:
        for name, value in fields.items():
            setattr(push.blocks[number], name, value)
        return payload

    return apply


def _swap(push: pb.Push, payload: bytes) -> bytes:
    first, second = (pb.Block.FromString(block.SerializeToString()) for block in push.blocks)
    del push.blocks[:]
    push.blocks.extend([second, first])
    return payload


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_change(1, slot=0), "ascending slots"),
        (_change(1, slot=3), "ascending slots"),
        (_swap, "ascending slots"),
        (_change(0, count=73), "73 values"),
        (_change(1, count=7), "7 values"),
        (_change(1, index_bytes=1), "1 index bytes"),
        (_change(0, coding=99), "coding 99"),
        (_change(0, value_dtype=9), "dtype 9"),
        (_change(0, scale=float("nan")), "scale nan"),
        (_change(0, scale=float("inf")), "scale inf"),
        (_change(0, count=4), "slot 0"),
        (_change(0, index_bytes=2**32 - 1), "ends at byte"),
        (_change(0, value_bytes=3), "value_bytes is 3"),
        (_change(1, value_coding=1, value_bytes=32), "value coding 1 of 8 values"),
        (_change(1, value_coding=2, value_bytes=32), "value coding 2"),
        (_change(0, value_coding=1, value_bytes=3), "values of 1 bytes"),
        (_change(0, value_coding=1, value_bytes=2**32 - 1), "ends at byte"),
        (lambda push, payload: payload[:-1], "ends at byte"),
        (lambda push, payload: payload + b"x", "47 of 48 bytes"),
        (lambda push, payload: payload[:4] + b"\x00" * 4 + payload[8:], "slot 0"),
        (lambda push, payload: payload[:8] + b"\xff" * 4 + payload[12:], "slot 0"),
    ],
)
def test_spoilt_blocks_are_malformed(spoil, words):
    push, payload = through_a_message()
    payload = spoil(push, payload)
    with pytest.raises(Malformed, match=words):
        messages.blocks_from_message(push.blocks, memoryview(payload), SIZES)


def test_every_coding_and_dtype_of_the_wire_is_known():
    assert {coding.name: int(coding) for coding in IndexCoding} == {
        name.removeprefix("INDEX_CODING_"): number for name, number in pb.IndexCoding.items()
    }
    assert set(messages._DTYPE_NAMES) == set(pb.ValueDtype.values())


@pytest.mark.parametrize("channels", [(0,), (1, 1), (2, 1), (8,)])
def test_channels_of_a_manifest_ascend_from_1_to_7(channels):
    def manifest(numbers):
        return pb.Manifest(channels=[pb.Announced(channel=n, count=1) for n in numbers])

    assert messages.manifest_from_message(manifest((1, 7)))
    with pytest.raises(Malformed, match=f"channel {channels[-1]} announced"):
        messages.manifest_from_message(manifest(channels))
