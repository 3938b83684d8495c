"""Choice of Keras' backend (TensorFlow, JAX or PyTorch) in a process that does not need one itself.

A parameter server runs Keras code only for some optimizers, and any backend will do. Keras reads
its backend once, when it is first imported, so `choose_backend` sets it before that import.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.devices import ON_SHARED_CORES, unless_set

#: Backend of Keras -> the extra of Thinwire's package that installs it. The order is the order of
#: preference. Keras' other backends are no way out: numpy's imports JAX, and openvino's only
#: predicts.
EXTRAS = {"tensorflow": "cpu", "jax": "jax", "torch": "torch"}
#: Backend of Keras -> environment variables that keep its arrays on the processor, and that it
#: reads when it is first imported. TensorFlow has none: --device selects its devices.
_PROCESSOR: dict[str, dict[str, str]] = {
    "tensorflow": {},
    "jax": {"JAX_PLATFORMS": "cpu"},
    "torch": {"KERAS_TORCH_DEVICE": "cpu"},
}
#: Name of the environment variable from which Keras reads its backend.
_VARIABLE = "KERAS_BACKEND"


def installed_backends() -> tuple[str, ...]:
    """Return the names of Keras' backends that this Python can import, in order of preference.

    No backend is imported.
    """
    return tuple(filter(_is_installed, EXTRAS))


def backend_in_use() -> str:
    """Return the name of the backend that Keras uses in this process, or would use if imported.

    The backend is the one of the imported Keras, else the environment variable KERAS_BACKEND, else
    the "backend" of Keras' configuration file if it is installed, else the first that is installed.
    Keras itself writes "tensorflow" into its configuration file, also where TensorFlow is missing,
    so a backend of the file that is not installed is no choice of the user's.

    Raises:
        ConfigurationError: No backend is installed, or KERAS_BACKEND names a backend that is not
            installed or that Thinwire does not support.
    """
    imported: Any = getattr(sys.modules.get("keras"), "backend", None)
    if hasattr(imported, "backend"):  # another thread may be importing Keras now
        return str(imported.backend())
    installed, wanted = installed_backends(), os.environ.get(_VARIABLE, "")
    if wanted:
        return _checked(wanted, installed)
    if not installed:
        raise ConfigurationError(
            f"Keras has no backend in this environment, but this process needs one; {_expected()}."
        )
    configured = _of_keras_file().get("backend")
    return configured if configured in installed else installed[0]


def choose_backend() -> str:
    """Choose the backend of this process for Keras' first import, and return its name.

    `choose_backend` sets the environment variable KERAS_BACKEND, which child processes inherit. If
    Keras is imported already, its backend is returned, and nothing is set.

    Raises:
        ConfigurationError: No backend is installed, or KERAS_BACKEND names a backend that is not
            installed or that Thinwire does not support.
    """
    backend = backend_in_use()
    if "keras" not in sys.modules and os.environ.get(_VARIABLE) != backend:
        os.environ[_VARIABLE] = backend
        logging.info("Keras uses its backend %s in this process", backend)
    return backend


def choose_backend_on_processor() -> str:
    """Choose the backend like `choose_backend`, and keep its arrays on the processor.

    The parameter server's weights are in host memory, and its steps are too short to gain from a
    GPU. An environment variable of the backend that the user has set is replaced: a GPU of the
    machine belongs to its workers.

    Raises:
        ConfigurationError: As `choose_backend`.
    """
    backend = choose_backend()
    if "keras" not in sys.modules:
        os.environ.update(_PROCESSOR.get(backend, {}))
        os.environ.update(unless_set(ON_SHARED_CORES))
    return backend


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a stub module, or an import hook that refuses the module
        return False


def _checked(wanted: str, installed: tuple[str, ...]) -> str:
    """Return the backend that KERAS_BACKEND names if it is supported and installed."""
    if wanted not in EXTRAS:
        raise ConfigurationError(
            f"{_VARIABLE}={wanted}: Thinwire does not support this backend of Keras; expected one "
            f"of {', '.join(EXTRAS)}. Set {_VARIABLE} to one of them, or unset it."
        )
    if wanted not in installed:
        others = f" Or set {_VARIABLE}={installed[0]}, which is installed." if installed else ""
        raise ConfigurationError(
            f"{_VARIABLE}={wanted}, but {wanted} is not installed; expected "
            f'pip install "thinwire[{EXTRAS[wanted]}]".{others}'
        )
    return wanted


def _expected() -> str:
    """Return the words that name the commands which install a backend."""
    commands = [f'pip install "thinwire[{extra}]" ({name})' for name, extra in EXTRAS.items()]
    return f"expected one of TensorFlow, JAX and PyTorch: {', '.join(commands)}"


def _of_keras_file() -> Mapping[str, Any]:
    """Return Keras' configuration file as a dict, from the place where Keras reads it; else {}."""
    home = os.environ.get("KERAS_HOME")
    if home is None:
        user = os.path.expanduser("~")
        user = user if os.access(user, os.W_OK) else "/tmp"
        home = os.path.join(user, ".keras")
    try:
        text = pathlib.Path(home, "keras.json").expanduser().read_text()
        values = json.loads(text)
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
