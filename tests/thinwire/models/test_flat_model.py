"""The variables that count as moving statistics, and their order."""

import keras
import numpy as np

from thinwire.models.flat_model import SharedModel, moving_statistics
from thinwire.models.flat_variables import FlatVariables
from thinwire.models.registry import build_network
from thinwire.ops.sharding.split import shard_positions
from thinwire.ops.sharding.w_global import shared_variables
from thinwire.ops.types import ShardLayout, Slice


def small() -> keras.Model:
    """Return a model with an inner model, a frozen layer, dropout, and a normalisation shared."""
    norm = keras.layers.BatchNormalization(name="norm")
    frozen = keras.layers.BatchNormalization(name="frozen", trainable=False)
    inner = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(4, name="dense"), norm], name="inner"
    )
    inputs = keras.Input((4,))
    x = frozen(inner(keras.layers.Dropout(0.5, name="dropout")(inputs)))
    x = keras.layers.Dense(2, name="logits")(inner(x))
    return keras.Model(inputs, x, name="outer")


def test_order_of_inner_and_frozen_layers() -> None:
    names = [variable.path.split("/")[-2:] for variable in moving_statistics(small())]
    assert names == [
        ["norm", "moving_mean"],
        ["norm", "moving_variance"],
        ["frozen", "moving_mean"],
        ["frozen", "moving_variance"],
    ]


def test_live_and_not_shared() -> None:
    model = small()
    statistics = moving_statistics(model)
    shared = shared_variables(model)
    assert not {id(v) for v in statistics} & {id(v) for v in shared}
    before = [variable.numpy() for variable in statistics]
    model(np.random.default_rng(0).random((8, 4), dtype=np.float32), training=True)
    changed = [(old != v.numpy()).any() for old, v in zip(before, statistics, strict=True)]
    assert changed == [True, True, False, False]


def test_none_without_normalisation() -> None:
    assert moving_statistics(build_network("lenet", 28, 1, 10, seed=0)) == []


def test_one_flat_vector_of_them() -> None:
    variables = moving_statistics(small())
    flat = FlatVariables(variables)
    assert flat.size == sum(variable.numpy().size for variable in variables)
    before = np.concatenate([variable.numpy().ravel() for variable in variables])
    np.testing.assert_array_equal(flat.read(), before)
    values = np.arange(flat.size, dtype=np.float32)
    flat.assign(values)
    np.testing.assert_array_equal(flat.read(), values)
    np.testing.assert_array_equal(variables[1].numpy(), values[4:8])
    values[:] = 0  # neither shares memory with the inputs or the returned arrays
    kept = flat.read()
    flat.assign(values)
    np.testing.assert_array_equal(kept, np.arange(flat.size))


def test_no_statistics_are_an_empty_vector() -> None:
    flat = FlatVariables([])
    flat.assign(flat.read())
    assert (flat.size, flat.read().shape, flat.read().dtype) == (0, (0,), np.float32)


def test_a_shard_s_part_is_what_its_layout_says() -> None:
    shared = SharedModel.of(small())
    first, last = shared.spec.tensors[0].size, len(shared.spec.tensors) - 1
    pieces = (Slice(last, 0, 1), Slice(0, 3, first), Slice(0, 0, 2))
    layout = ShardLayout(pieces)
    expected = np.concatenate([shared.flat()[at] for at in shard_positions(shared.spec, layout)])
    np.testing.assert_array_equal(shared.part(layout), expected)
