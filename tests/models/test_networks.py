"""The networks by name: sizes, paths, reproducible weights; the example and user files."""

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import models
from data import datasets
from ops.collection import W_global, model_spec, shared_variables
from ops.types import ConfigurationError

ROOT = Path(models.__file__).resolve().parents[1]
PARAMETERS = {"cnn": 421_642, "mnist_cnn": 1_199_882, "lenet": 61_706}


@pytest.fixture(scope="module")
def built() -> dict[str, keras.Model]:
    """Every network once, seed 3."""
    return {name: models.build(name, 28, 1, 10, seed=3) for name in models.NETWORKS}


@pytest.mark.parametrize("name", models.NETWORKS)
def test_parameter_counts_and_logits(built: dict[str, keras.Model], name: str) -> None:
    model = built[name]
    assert model.count_params() == PARAMETERS[name]
    assert sum(int(np.prod(v.shape)) for v in model.trainable_variables) == PARAMETERS[name]
    assert model.output_shape == (None, 10)
    assert model.layers[-1].activation is keras.activations.linear


def test_adacomp_cnn_layers_and_initial_weights(built: dict[str, keras.Model]) -> None:
    variables = {variable.path: variable.numpy() for variable in built["cnn"].trainable_variables}
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


def test_same_seed_same_model(built: dict[str, keras.Model]) -> None:
    again, other = (models.build("lenet", 28, 1, 10, seed=seed) for seed in (3, 4))
    for ours, theirs, third in zip(
        built["lenet"].variables, again.variables, other.variables, strict=True
    ):
        assert ours.path == theirs.path == third.path
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    assert (again.variables[0].numpy() != other.variables[0].numpy()).any()


def test_unknown_network() -> None:
    with pytest.raises(ConfigurationError, match="cnn, mnist_cnn, lenet"):
        models.build("cmm", 28, 1, 10, seed=0)


def test_image_too_small_for_the_network() -> None:
    with pytest.raises(ConfigurationError, match="--image_size 4"):
        models.build("lenet", 4, 1, 10, seed=0)


def test_names_need_no_keras() -> None:
    code = "import sys, models; sys.exit('keras' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_example_of_an_own_model() -> None:
    path = ROOT / "examples" / "own_model.py"
    assert len(path.read_text().splitlines()) <= 30
    module = models.load_user_model(str(path))
    model = models.build_user_model(module, seed=1)
    dataset = datasets.from_user_module(module, seed=1)
    assert model_spec(shared_variables(model)).num_parameters == 65 * 32 + 33 * 4
    outputs = model(dataset.test_images[:5])
    assert outputs.shape == (5, 4) and set(dataset.train_labels.tolist()) == {0, 1, 2, 3}
    assert dataset.train_images.shape == (2000, 8, 8, 1)


def test_building_clears_the_registry() -> None:
    module = models.load_user_model(str(ROOT / "examples" / "own_model.py"))
    first = shared_variables(models.build_user_model(module, seed=1))
    second = shared_variables(models.build_user_model(module, seed=1))
    assert len(W_global) == len(second) == len(first) == 4
    assert all(one is not two for one, two in zip(first, second, strict=True))
    models.build("lenet", 28, 1, 10, seed=0)
    assert len(W_global) == 0


def test_user_file_sees_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("SIZE = 3\n")
    path = tmp_path / "mine.py"
    path.write_text("from neighbour_of_mine import SIZE\ndef build_model():\n    return SIZE\n")
    assert models.load_user_model(str(path)).build_model() == 3


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "not a Python file"),
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
        models.load_user_model(str(path))


@pytest.mark.parametrize(
    ("body", "expected"), [("return 3", "returned a int"), ("return 1 / 0", "ZeroDivisionError")]
)
def test_bad_build_model(tmp_path: Path, body: str, expected: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"def build_model():\n    {body}\n")
    with pytest.raises(ConfigurationError, match=expected):
        models.build_user_model(models.load_user_model(str(path)), seed=0)
