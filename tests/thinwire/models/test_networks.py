"""The networks by name: sizes, layers, weights, one step; the example and user files.

Each network is built once for all tests, so all tests of whole networks are in this file.
"""

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.models.built import IMAGES, SEED, Built, build
from thinwire.data.registry import from_user_module
from thinwire.models import registry
from thinwire.models.flat_model import SharedModel, moving_statistics
from thinwire.models.tasks import TASKS
from thinwire.ops.kernels.numpy_ops import aligned
from thinwire.ops.sharding.w_global import W_global, model_spec, shared_variables
from thinwire.ops.types import ConfigurationError
from thinwire.worker.train_step import TrainStep

ROOT = Path(registry.__file__).resolve().parents[2]

#: Trainable values and BatchNormalization's moving values, counted by hand from the layer lists.
PARAMETERS = {
    "cnn": (421_642, 0),
    "mnist_cnn": (1_199_882, 0),
    "lenet": (61_706, 0),
    "alexnet": (57_029_322, 0),
    "resnet18-v1": (11_175_370, 9_600),
    "resnet50-v1": (23_541_130, 53_120),
    "resnet50-v2": (23_514_698, 45_570),
    "resnet18-cifar": (11_173_962, 9_600),
    "mobilenet-v1": (3_216_650, 21_888),
    "mobilenet-v2": (2_237_184, 34_176),
    "inception-v3": (21_805_482, 34_432),
    "inception-bn-small": (1_651_114, 3_424),
    "mlp": (109_386, 0),
    "autoencoder": (209_968, 0),
    "gru": (19_786, 0),
    "decoder": (804_106, 0),
    "decoder-tiny": (4_666, 0),
    "decoder-small": (55_498, 0),
    "decoder-3m": (2_685_706, 0),
    "decoder-10m": (9_891_210, 0),
    "decoder-30m": (28_415_498, 0),
    "decoder-100m": (99_881_610, 0),
}
#: Output shapes of networks; all other networks have (None, 10).
OUTPUTS = {
    "autoencoder": (None, 28, 28, 1),
    **dict.fromkeys(TASKS["tokens"].networks, (None, None, 10)),
}

#: Built in another process too: at least one of each file, for the sake of time.
ELSEWHERE = (
    "cnn",
    "alexnet",
    "resnet18-v1",
    "resnet50-v2",
    "mobilenet-v2",
    "inception-v3",
    "inception-bn-small",
)

#: Trained values for ImageNet's images and classes, 224 x 224 x 3 and 1,000. ResNet-18's are those
#: of torchvision; ResNet-50 has 18,880 more for the biases of its 1 x 1 convolutions.
ON_IMAGENET = {"resnet18-v1": 11_689_512, "resnet50-v1": 25_575_912}

#: Height of layers' outputs; the images are 28 x 28 (CIFAR: 32 x 32) for every network.
HEIGHTS = {
    "alexnet": {"resize": 224, "conv1": 55, "pool1": 27, "conv2": 27, "pool2": 13, "pool5": 6},
    "resnet18-v1": {
        "stem_conv": 14,
        "stem_pool": 7,
        "stage1_block2_add": 7,
        "stage2_block2_add": 4,
        "stage3_block2_add": 2,
        "stage4_block2_add": 1,
    },
    "resnet50-v1": {"stem_pool": 7, "stage2_block1_conv1": 4, "stage4_block3_add": 1},
    "resnet50-v2": {"stem_pool": 7, "stage2_block1_conv1": 7, "stage2_block1_conv2": 4},
    "resnet18-cifar": {"stem_conv": 32, "stage1_block2_add": 32, "stage4_block2_add": 4},
    "mobilenet-v1": {"stem_conv": 14, "block2_depthwise_conv": 7, "block13_pointwise_conv": 1},
    "mobilenet-v2": {"stem_conv": 14, "block2_project_conv": 7, "head_conv": 1},
    "inception-v3": {"resize": 299, "a1_concat": 35, "c1_concat": 17, "e1_concat": 8},
    "inception-bn-small": {"a2_concat": 32, "a3_concat": 16, "b4_concat": 16, "c2_concat": 8},
}

#: Whose weights take seconds to draw; the smaller decoders are made of the same layers.
LONG_DRAWN = ("decoder-3m", "decoder-10m", "decoder-30m", "decoder-100m")
#: Whose steps take seconds.
LARGE = ("alexnet", "inception-v3", "mobilenet-v2", "resnet50-v1", "resnet50-v2", *LONG_DRAWN)

Network = Callable[[str], Built]


def with_slow(slow: Sequence[str]) -> list[Any]:
    """Return all names; slow networks run only in ``make product``."""
    return [pytest.param(name, marks=[pytest.mark.product] * (name in slow)) for name in PARAMETERS]


@pytest.fixture(scope="module")
def network() -> Network:
    """Build each network at its first use; tests must leave its weights unchanged."""
    return functools.cache(build)


@pytest.fixture(scope="module", autouse=True)
def elsewhere() -> Iterator[subprocess.Popen]:
    """A second process that builds networks at the same time; a name and checksum a line."""
    code = (
        "from tests.thinwire.models import built, test_networks\n"
        "for name in test_networks.ELSEWHERE: print(name, built.build(name).digest)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture
def eagerly() -> Iterator[None]:
    """Run tf.functions without tracing, which takes the large networks many seconds each."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


def test_every_network_is_tested() -> None:
    assert PARAMETERS.keys() == registry.NETWORKS.keys()


@pytest.mark.parametrize("name", with_slow(LONG_DRAWN))
def test_parameter_counts_and_logits(network: Network, name: str) -> None:
    shared = network(name).shared
    trainable, moving = PARAMETERS[name]
    assert shared.spec.num_parameters == trainable
    assert sum(int(np.prod(v.shape)) for v in shared.model.trainable_variables) == trainable
    assert sum(int(np.prod(v.shape)) for v in moving_statistics(shared.model)) == moving
    assert shared.model.count_params() == trainable + moving
    assert shared.model.output_shape == OUTPUTS.get(name, (None, 10))
    assert getattr(shared.model.layers[-1], "activation", None) in (
        None,
        keras.activations.linear,
    )


@pytest.mark.parametrize("name", ["resnet18-v1", "resnet50-v1"])
def test_residual_networks_take_imagenet(name: str) -> None:
    model = registry.build_network(name, 224, 3, 1000, seed=0)
    assert model.input_shape == (None, 224, 224, 3) and model.output_shape == (None, 1000)
    assert [model.get_layer(f"stage{n}_block2_add").output.shape[1] for n in (1, 2, 3, 4)] == [
        56,
        28,
        14,
        7,
    ]
    assert model_spec(shared_variables(model)).num_parameters == ON_IMAGENET[name]


@pytest.mark.parametrize("name", HEIGHTS)
def test_heights(network: Network, name: str) -> None:
    model = network(name).model
    assert {layer: model.get_layer(layer).output.shape[1] for layer in HEIGHTS[name]} == (
        HEIGHTS[name]
    )
    assert model.input_shape == (None, IMAGES.get(name, (28, 1))[0], *model.input_shape[2:])


def layers_of(model: keras.Model, kind: type) -> list[Any]:
    return [layer for layer in model.layers if isinstance(layer, kind)]


def test_resnet50_strides_and_biases(network: Network) -> None:
    first, second = (network(f"resnet50-{v}").model for v in ("v1", "v2"))
    strided = [
        {layer.name for layer in layers_of(model, keras.layers.Conv2D) if layer.strides == (2, 2)}
        for model in (first, second)
    ]
    begins = [f"stage{stage}_block1" for stage in (2, 3, 4)]
    for names, convolution in zip(strided, ("conv1", "conv2"), strict=True):
        expected = {
            f"{begin}_{part}" for begin in begins for part in (convolution, "shortcut_conv")
        }
        assert names == {"stem_conv", *expected}
    for layer in layers_of(first, keras.layers.Conv2D):
        is_outer = layer.name.endswith(("_conv1", "_conv3"))
        assert layer.use_bias == is_outer, layer.name
    assert not any(layer.use_bias for layer in layers_of(second, keras.layers.Conv2D))
    assert len(second.get_layer("input_norm").trainable_variables) == 0
    assert len(second.get_layer("final_norm").trainable_variables) == 2


@pytest.mark.parametrize(
    ("name", "num_norms", "epsilon"), [("mobilenet-v2", 53, 1e-5), ("inception-v3", 94, 1e-3)]
)
def test_normalisation_and_activations(
    network: Network, name: str, num_norms: int, epsilon: float
) -> None:
    model = network(name).model
    norms = layers_of(model, keras.layers.BatchNormalization)
    assert len(norms) == num_norms
    assert {(norm.momentum, norm.epsilon) for norm in norms} == {(0.9, epsilon)}
    activations = layers_of(model, keras.layers.ReLU)
    is_v2 = name == "mobilenet-v2"
    assert len(activations) == num_norms - 17 * is_v2  # no activation after a projection
    assert {layer.max_value for layer in activations} == {6.0 if is_v2 else None}


def test_initial_weights_are_xavier(network: Network) -> None:
    model = network("resnet18-v1").model
    one, other = (model.get_layer(f"stage2_block2_conv{n}").kernel.numpy() for n in (1, 2))
    limit = np.sqrt(6 / (9 * 128 + 9 * 128))
    for kernel in (one, other):
        assert 0.99 * limit < np.abs(kernel).max() <= limit
        assert kernel.std() == pytest.approx(limit / np.sqrt(3), rel=0.01)
    assert (one != other).any()
    assert not model.get_layer("logits").bias.numpy().any()


def test_moving_statistics_have_the_same_order_on_every_node(network: Network) -> None:
    both = (
        network("mobilenet-v1").model,
        registry.build_network("mobilenet-v1", 28, 1, 10, seed=0),
    )
    paths = [[variable.path for variable in moving_statistics(model)] for model in both]
    assert paths[0] == paths[1]
    assert paths[0][:3] == [
        "stem_norm/moving_mean",
        "stem_norm/moving_variance",
        "block1_depthwise_norm/moving_mean",
    ]
    assert len(paths[0]) == len(set(paths[0])) == 2 * 27


def test_same_weights_in_another_process(network: Network, elsewhere: subprocess.Popen) -> None:
    theirs = dict(line.split() for line in elsewhere.stdout)
    assert theirs == {name: network(name).digest for name in ELSEWHERE}


def examples(name: str, shared: SharedModel, count: int, rng: np.random.Generator) -> Any:
    if name in TASKS["tokens"].networks:
        tokens = rng.integers(10, size=(count, 7), dtype=np.int32)
        return tokens[:, :-1], tokens[:, 1:]
    images = rng.random((count, *shared.model.input_shape[1:]), dtype=np.float32)
    return images, shared.task.labels.read(np.arange(count), images)


@pytest.mark.parametrize("name", with_slow(LARGE))
def test_one_step(network: Network, eagerly: None, name: str) -> None:
    shared = network(name).shared
    step = TrainStep(shared)
    generator = np.random.default_rng(5)
    num_images = 2 if "resize" in HEIGHTS.get(name, {}) else 4
    images, labels = examples(name, shared, num_images, generator)
    before = [v.numpy() for v in moving_statistics(shared.model)]
    gradient = np.full(shared.spec.num_parameters, np.nan, np.float32)
    loss = step.gradients(images, labels, gradient)
    assert np.isfinite(loss) and np.isfinite(gradient).all()
    offsets = shared.spec.offsets
    for tensor, start, stop in zip(shared.spec.tensors, offsets, offsets[1:], strict=False):
        assert gradient[start:stop].any(), tensor.path
    after = [v.numpy() for v in moving_statistics(shared.model)]
    assert all((one != other).any() for one, other in zip(before, after, strict=True))
    if any(isinstance(layer, keras.layers.Dropout) for layer in shared.model.layers):
        return  # its next loss is of other units
    square = float(gradient @ gradient)
    initial, weights = shared.flat(), aligned(shared.spec.num_parameters)
    weights[:] = initial - 0.01 * loss / square * gradient
    step.set_weights(weights)
    np.testing.assert_array_equal(shared.flat(), weights)
    lower = step.gradients(images, labels, gradient)
    shared.assign(initial)
    assert lower == pytest.approx(0.99 * loss, rel=0.005)


def test_adacomp_cnn_layers_and_initial_weights() -> None:
    model = registry.build_network("cnn", 28, 1, 10, seed=SEED)
    variables = {variable.path: variable.numpy() for variable in model.trainable_variables}
    assert {path: value.size for path, value in variables.items()} == {
        "cnn/conv1/kernel": 288,
        "cnn/conv1/bias": 32,
        "cnn/conv2/kernel": 18_432,
        "cnn/conv2/bias": 64,
        "cnn/hidden/kernel": 401_408,
        "cnn/hidden/bias": 128,
        "cnn/logits/kernel": 1_280,
        "cnn/logits/bias": 10,
    }
    for path, value in variables.items():
        if path.endswith("bias"):
            assert (value == np.float32(0.1)).all()
        else:
            assert np.abs(value).max() <= 0.2
    # Truncation at two standard deviations leaves 0.0880 of 0.1.
    assert variables["cnn/hidden/kernel"].std() == pytest.approx(0.0880, abs=0.0005)


def test_same_seed_same_model() -> None:
    first, again, other = (
        registry.build_network("lenet", 28, 1, 10, seed=seed) for seed in (3, 3, 4)
    )
    for ours, theirs, third in zip(first.variables, again.variables, other.variables, strict=True):
        assert ours.path == theirs.path == third.path
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    assert (again.variables[0].numpy() != other.variables[0].numpy()).any()


def test_unknown_network() -> None:
    with pytest.raises(ConfigurationError, match="cnn, mnist_cnn, lenet"):
        registry.build_network("cmm", 28, 1, 10, seed=0)


def test_image_too_small_for_the_network() -> None:
    with pytest.raises(ConfigurationError, match="--image_size 4"):
        registry.build_network("lenet", 4, 1, 10, seed=0)


def test_names_need_no_keras() -> None:
    code = (
        "import sys, thinwire.models.registry\n"
        "sys.exit('keras' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_example_of_an_own_model() -> None:
    path = ROOT / "examples" / "own_model.py"
    assert len(path.read_text().splitlines()) <= 30
    module = registry.load_user_model(str(path))
    model = registry.build_user_model(module, seed=1)
    dataset = from_user_module(module, seed=1)
    assert model_spec(shared_variables(model)).num_parameters == 65 * 32 + 33 * 4
    outputs = model(dataset.test_images[:5])
    assert outputs.shape == (5, 4) and set(dataset.train_labels.tolist()) == {0, 1, 2, 3}
    assert dataset.train_images.shape == (2000, 8, 8, 1)


def test_building_clears_the_registry() -> None:
    module = registry.load_user_model(str(ROOT / "examples" / "own_model.py"))
    first = shared_variables(registry.build_user_model(module, seed=1))
    second = shared_variables(registry.build_user_model(module, seed=1))
    assert len(W_global) == len(second) == len(first) == 4
    assert all(one is not two for one, two in zip(first, second, strict=True))
    registry.build_network("lenet", 28, 1, 10, seed=0)
    assert len(W_global) == 0


def test_user_file_sees_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("SIZE = 3\n")
    path = tmp_path / "mine.py"
    path.write_text("from neighbour_of_mine import SIZE\ndef build_model():\n    return SIZE\n")
    assert registry.load_user_model(str(path)).build_model() == 3


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "no Python file"),
        ("import no_such_module_anywhere", "ModuleNotFoundError"),
        ("def build_model(:", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("x = 1", "no function build_model"),
        ("build_model = 3", "no function build_model"),
    ],
)
def test_bad_user_files(tmp_path: Path, content: str | None, expected: str) -> None:
    path = tmp_path / "mine.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigurationError, match=expected):
        registry.load_user_model(str(path))


@pytest.mark.parametrize(
    ("body", "expected"), [("return 3", "of type int"), ("return 1 / 0", "ZeroDivisionError")]
)
def test_bad_build_model(tmp_path: Path, body: str, expected: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"def build_model():\n    {body}\n")
    with pytest.raises(ConfigurationError, match=expected):
        registry.build_user_model(registry.load_user_model(str(path)), seed=0)


def test_decoders_see_no_later_token(network: Network) -> None:
    model = network("decoder-tiny").model
    tokens = np.random.default_rng(2).integers(10, size=(3, 9)).astype(np.int32)
    others = tokens.copy()
    others[:, 6:] = (others[:, 6:] + 1) % 10
    one, other = model(tokens).numpy(), model(others).numpy()
    np.testing.assert_allclose(one[:, :6], other[:, :6], atol=1e-6)
    assert np.abs(one[:, 6:] - other[:, 6:]).max(axis=(0, 2)).min() > 1e-4


def test_the_decoder_is_the_one_that_figures_are_of(network: Network) -> None:
    model = registry.build_network("decoder", 28, 1, 256, seed=SEED)
    assert model.count_params() == 867_328
    again = keras.Model.from_config(model.get_config())
    again.set_weights(model.get_weights())
    tokens = np.arange(10, dtype=np.int32)[None]
    np.testing.assert_array_equal(model(tokens), again(tokens))
