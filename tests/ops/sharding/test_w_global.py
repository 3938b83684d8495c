"""W_global: order, defaults, the compat.v1 collection, and rejected patterns."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from thinwire.ops.sharding import w_global
from thinwire.ops.sharding.w_global import W_global, model_spec, shared_variables
from thinwire.ops.types import ConfigurationError, TensorSpec


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """Each test starts and ends with an empty registry."""
    W_global.clear()
    yield
    W_global.clear()


@pytest.fixture(scope="module")
def model() -> keras.Model:
    """A tiny model with two dense layers and a normalisation between them."""
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(2, name="one"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(4, name="two"),
        ],
        name="tiny",
    )


def test_all_trainable_variables_by_default(model: keras.Model) -> None:
    paths = [variable.path for variable in shared_variables(model)]
    assert paths == [
        "tiny/one/kernel",
        "tiny/one/bias",
        "tiny/norm/gamma",
        "tiny/norm/beta",
        "tiny/two/kernel",
        "tiny/two/bias",
    ]


def test_what_no_step_gives_to_the_optimizer_is_not_shared(model: keras.Model) -> None:
    """For example a copy of the network that a train_step averages."""
    stepped = model.get_layer("two").trainable_variables
    paths = [variable.path for variable in shared_variables(model, stepped)]
    assert paths == ["tiny/two/kernel", "tiny/two/bias"]


def test_a_copy_may_have_the_same_paths_where_they_are_numbered(model: keras.Model) -> None:
    variables = [*model.trainable_variables, *keras.models.clone_model(model).trainable_variables]
    with pytest.raises(ConfigurationError, match="two variables with the path"):
        model_spec(variables)
    paths = [tensor.path for tensor in model_spec(variables, numbers_paths=True).tensors]
    assert {"tiny/one/kernel", "tiny/one/kernel_2"} <= set(paths)


def test_order_is_the_users(model: keras.Model) -> None:
    W_global.add(model.layers[2].bias)
    W_global.extend([model.layers[0].kernel])
    spec = model_spec(shared_variables(model))
    assert spec.tensors == (
        TensorSpec("tiny/two/bias", (4,)),
        TensorSpec("tiny/one/kernel", (3, 2)),
    )
    assert spec.num_parameters == 10


def test_frozen_once_read(model: keras.Model) -> None:
    shared_variables(model)
    with pytest.raises(ConfigurationError, match="inside build_model"):
        W_global.add(model.layers[0].kernel)
    W_global.clear()
    W_global.add(model.layers[0].kernel)
    assert len(W_global) == 1


def test_compat_collection_is_honoured(model: keras.Model) -> None:
    W_global.add(model.layers[0].kernel)
    tf.compat.v1.add_to_collection("W_global", model.layers[2].bias)
    tf.compat.v1.add_to_collection("W_global", model.layers[2].kernel.value)
    assert [variable.path for variable in shared_variables(model)] == [
        "tiny/one/kernel",
        "tiny/two/bias",
        "tiny/two/kernel",
    ]
    W_global.clear()
    assert tf.compat.v1.get_collection("W_global") == []


def test_foreign_tensorflow_variable(model: keras.Model) -> None:
    tf.compat.v1.add_to_collection("W_global", tf.Variable(1.0, name="stranger"))
    with pytest.raises(ConfigurationError, match="stranger"):
        shared_variables(model)


def test_twice_is_refused(model: keras.Model) -> None:
    W_global.add(model.layers[0].kernel)
    with pytest.raises(ConfigurationError, match="tiny/one/kernel .*W_global twice"):
        W_global.add(model.layers[0].kernel)
    tf.compat.v1.add_to_collection("W_global", model.layers[0].kernel)
    with pytest.raises(ConfigurationError, match="two variables with the path 'tiny/one/kernel'"):
        shared_variables(model)


def test_variable_of_another_model_is_refused(model: keras.Model) -> None:
    W_global.add(keras.Variable([1.0], name="stranger"))
    with pytest.raises(ConfigurationError, match="stranger .* not a variable of the model 'tiny'"):
        shared_variables(model)


def test_untrainable_variable_is_refused(model: keras.Model) -> None:
    W_global.add(model.layers[1].moving_mean)
    with pytest.raises(ConfigurationError, match="moving_mean .* not trainable"):
        shared_variables(model)


def test_other_dtypes_are_refused() -> None:
    half = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="float16", name="h")])
    with pytest.raises(ConfigurationError, match="h/kernel has dtype float16; expected float32"):
        shared_variables(half)


def test_nothing_to_share_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"keras\.Input"):
        shared_variables(keras.Sequential([keras.layers.Dense(2)]))
    with pytest.raises(ConfigurationError, match="empty"):
        model_spec([])


def test_what_is_no_variable_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"type int; expected a keras\.Variable"):
        W_global.add(3)  # type: ignore[arg-type]


def test_import_brings_neither_tensorflow_nor_numpy() -> None:
    root = Path(w_global.__file__).resolve().parents[2]
    code = (
        "import sys; from thinwire import W_global; W_global.clear()\n"
        "sys.exit(any(name in sys.modules for name in ('tensorflow', 'keras', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0
