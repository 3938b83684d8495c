"""The choice of Keras' backend before Keras is imported."""

import json
import logging
import os
import sys
from types import SimpleNamespace

import pytest

from thinwire.ops.types import ConfigurationError
from thinwire.runtime import keras_backend
from thinwire.runtime.keras_backend import (
    backend_in_use,
    choose_backend,
    choose_backend_on_processor,
    installed_backends,
)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that sets the installed backends, KERAS_BACKEND and Keras' file."""
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    for name in ("KERAS_BACKEND", "JAX_PLATFORMS", "KERAS_TORCH_DEVICE", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))

    def make(*installed, wanted=None, file=None):
        found = {name: object() for name in installed}
        monkeypatch.setattr(keras_backend.importlib.util, "find_spec", found.get)
        if wanted is not None:
            monkeypatch.setenv("KERAS_BACKEND", wanted)
        if file is not None:
            (tmp_path / "keras.json").write_text(file)

    return make


@pytest.mark.parametrize(
    ("installed", "wanted", "file", "expected"),
    [
        (["torch", "jax", "tensorflow"], None, None, "tensorflow"),
        (["torch", "jax"], None, None, "jax"),
        (["torch"], None, None, "torch"),
        (["torch", "jax"], "torch", None, "torch"),
        (["torch", "jax"], "", None, "jax"),  # Keras ignores an empty variable
        (["torch", "jax"], None, {"backend": "torch"}, "torch"),
        (["torch", "jax"], "jax", {"backend": "torch"}, "jax"),
        (["torch", "jax"], None, {"backend": "tensorflow"}, "jax"),  # as Keras writes it
        (["jax"], None, {"floatx": "float32"}, "jax"),
    ],
)
def test_the_choice(machine, installed, wanted, file, expected):
    machine(*installed, wanted=wanted, file=None if file is None else json.dumps(file))
    assert backend_in_use() == expected
    assert choose_backend() == expected == os.environ["KERAS_BACKEND"]


@pytest.mark.parametrize("text", ["{", "[1]", '"jax"'])
def test_an_unreadable_file_of_keras_is_no_choice(machine, text):
    machine("torch", file=text)
    assert choose_backend() == "torch"


def test_the_file_is_read_in_the_home_directory(machine, monkeypatch, tmp_path):
    machine("torch", "jax")
    monkeypatch.delenv("KERAS_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".keras").mkdir()
    (tmp_path / ".keras" / "keras.json").write_text('{"backend": "torch"}')
    assert backend_in_use() == "torch"


def test_without_a_backend_the_error_names_the_extras(machine):
    machine()
    with pytest.raises(ConfigurationError) as caught:
        choose_backend()
    for extra in ("cpu", "jax", "torch"):
        assert f'pip install "thinwire[{extra}]"' in str(caught.value)
    assert "KERAS_BACKEND" not in os.environ


@pytest.mark.parametrize("name", ["numpy", "openvino", "theano"])
def test_an_unsupported_backend_is_refused(machine, name):
    machine("tensorflow", "jax", wanted=name)
    with pytest.raises(ConfigurationError, match=f"KERAS_BACKEND={name}.*tensorflow, jax, torch"):
        choose_backend()


def test_a_backend_that_is_not_installed_is_refused(machine):
    machine("jax", wanted="torch")
    with pytest.raises(ConfigurationError, match=r"thinwire\[torch\].*KERAS_BACKEND=jax"):
        choose_backend()


def test_an_imported_keras_keeps_its_backend(machine, monkeypatch):
    machine("tensorflow", "jax", wanted="tensorflow")
    imported = SimpleNamespace(backend=SimpleNamespace(backend=lambda: "jax"))
    monkeypatch.setitem(sys.modules, "keras", imported)
    assert choose_backend() == choose_backend_on_processor() == "jax"
    assert os.environ["KERAS_BACKEND"] == "tensorflow"
    assert "JAX_PLATFORMS" not in os.environ


def test_the_choice_is_logged_once(machine, caplog):
    machine("jax")
    with caplog.at_level(logging.INFO, "absl"):
        choose_backend()
        choose_backend()
    assert [record.getMessage() for record in caplog.records] == [
        "Keras uses its backend jax in this process"
    ]


@pytest.mark.parametrize(
    ("name", "variable"), [("jax", "JAX_PLATFORMS"), ("torch", "KERAS_TORCH_DEVICE")]
)
def test_arrays_stay_on_the_processor(machine, monkeypatch, name, variable):
    machine(name)
    monkeypatch.setenv(variable, "cuda")
    assert choose_backend_on_processor() == name
    assert os.environ[variable] == "cpu"


def test_devices_of_tensorflow_are_those_of_the_flag(machine):
    machine("tensorflow")
    before = dict(os.environ)
    choose_backend_on_processor()
    added = {"KERAS_BACKEND": "tensorflow", "OMP_WAIT_POLICY": "PASSIVE"}
    assert dict(os.environ) == before | added


def test_a_user_decides_how_idle_threads_wait(machine, monkeypatch):
    machine("torch")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    choose_backend_on_processor()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_the_backends_of_this_environment_are_found_without_an_import():
    assert set(installed_backends()) <= set(keras_backend.EXTRAS)
    assert installed_backends()
