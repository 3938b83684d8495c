"""Metrics and layouts of evaluations as messages."""

import numpy as np
import pytest

from thinwire.ops.sharding.split import place_tensors
from thinwire.ops.types import ModelSpec, ShardLayout, Slice, TensorSpec
from thinwire.proto.evaluations import (
    decode_layouts,
    decode_metrics,
    encode_layouts,
    encode_metrics,
    numbers_of,
)
from thinwire.proto.framing import Malformed

SPEC = ModelSpec((TensorSpec("a", (3, 2)), TensorSpec("b", ()), TensorSpec("c", (4,))))


def test_metrics_come_back_as_keras_has_them():
    logs = {"loss": float("nan"), "f1": np.float32([[0.5, 1.0]]), "name": "x", "n": np.float32(2)}
    found = decode_metrics(encode_metrics(logs))
    assert list(found) == ["loss", "f1", "n"]
    assert np.isnan(found["loss"])
    np.testing.assert_array_equal(found["f1"], logs["f1"])
    assert found["f1"].dtype == np.float32
    assert numbers_of(encode_metrics({"f1": np.zeros((2, 1))})) == {"f1_0": 0.0, "f1_1": 0.0}
    assert numbers_of(encode_metrics({"f1": np.array([0.25]), "none": np.zeros(0)})) == {"f1": 0.25}


@pytest.mark.parametrize("num_shards", [1, 2])
def test_layouts_come_back(num_shards):
    layouts = place_tensors(SPEC, num_shards, cuts=True)
    assert decode_layouts(encode_layouts(layouts), SPEC) == tuple(layouts)


@pytest.mark.parametrize(
    "slices",
    [
        (),
        (Slice(0, 0, 6), Slice(1, 0, 1), Slice(2, 0, 3)),
        (Slice(0, 0, 6), Slice(1, 0, 1), Slice(2, 0, 4), Slice(2, 0, 4)),
        (Slice(0, 0, 6), Slice(1, 0, 1), Slice(3, 0, 4)),
    ],
)
def test_layouts_of_other_models_are_refused(slices):
    with pytest.raises(Malformed, match="another model"):
        decode_layouts(encode_layouts([ShardLayout(slices)]), SPEC)
