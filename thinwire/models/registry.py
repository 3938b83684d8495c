"""Builds networks by name, and the user's own model from a file.

Each network is built by a function of ``(image_size, image_depth, nb_classes)`` that returns a
Keras model without a final activation. The networks' layers have fixed names, so that
``variable.path`` is the same on every node. Only the building functions import Keras, because flags
and ``--help`` need only the networks' names.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from thinwire.ops.sharding.w_global import W_global
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.user_file import import_file

if TYPE_CHECKING:
    import keras

#: Value of --network -> (module, function) that builds the network.
NETWORKS = {
    "cnn": ("thinwire.models.sequential", "build_cnn"),
    "mnist_cnn": ("thinwire.models.sequential", "build_mnist_cnn"),
    "lenet": ("thinwire.models.sequential", "build_lenet"),
    "alexnet": ("thinwire.models.alexnet", "build_model"),
    "resnet18-v1": ("thinwire.models.resnet", "build_resnet18_v1"),
    "resnet50-v1": ("thinwire.models.resnet", "build_resnet50_v1"),
    "resnet50-v2": ("thinwire.models.resnet", "build_resnet50_v2"),
    "resnet18-cifar": ("thinwire.models.resnet", "build_resnet18_cifar"),
    "mobilenet-v1": ("thinwire.models.mobilenet", "build_mobilenet_v1"),
    "mobilenet-v2": ("thinwire.models.mobilenet", "build_mobilenet_v2"),
    "inception-v3": ("thinwire.models.inception", "build_model"),
    "inception-bn-small": ("thinwire.models.inception_small", "build_model"),
    "mlp": ("thinwire.models.sequential", "build_mlp"),
    "autoencoder": ("thinwire.models.sequential", "build_autoencoder"),
    "gru": ("thinwire.models.sequential", "build_gru"),
    "decoder": ("thinwire.models.decoder", "build_decoder"),
    "decoder-tiny": ("thinwire.models.decoder", "build_tiny"),
    "decoder-small": ("thinwire.models.decoder", "build_decoder_small"),
    "decoder-3m": ("thinwire.models.decoder", "build_decoder_3m"),
    "decoder-10m": ("thinwire.models.decoder", "build_decoder_10m"),
    "decoder-30m": ("thinwire.models.decoder", "build_decoder_30m"),
    "decoder-100m": ("thinwire.models.decoder", "build_decoder_100m"),
}

_USER_MODULE = "thinwire_user_model"


def build_network(
    network: str, image_size: int, image_depth: int, nb_classes: int, seed: int
) -> keras.Model:
    """Build a network by name, with the same initial weights for the same seed.

    Args:
        network: Name of a built-in network, one of ``NETWORKS``.
        image_size: Height and width of an image in pixels.
        image_depth: Number of channels of an image.
        nb_classes: Size of the network's output, which is a number of classes, regressed numbers,
            labels or words, depending on the task.
        seed: Seed of the random numbers of Python, numpy and Keras (initializers, dropout).

    Raises:
        ConfigurationError: The network is unknown, or cannot be built for this size of images.
    """
    if network not in NETWORKS:
        raise ConfigurationError(
            f"--network {network} is unknown; expected one of {', '.join(NETWORKS)}, or --model "
            "with a file of your own."
        )
    import keras

    W_global.clear()
    keras.utils.set_random_seed(seed)
    try:
        module, function = NETWORKS[network]
        build_model = getattr(importlib.import_module(module), function)
        model: keras.Model = build_model(image_size, image_depth, nb_classes)
    except ValueError as error:
        raise ConfigurationError(
            f"--network {network} cannot be built for --image_size {image_size} --image_depth "
            f"{image_depth} --nb_classes {nb_classes}: {error}. Choose a larger --image_size or "
            "another --network."
        ) from error
    return model


def load_user_model(path: str) -> ModuleType:
    """Import the user's model file, which can import modules from its folder.

    Raises:
        ConfigurationError: The user's file is missing, fails on import, or has no ``build_model``.
    """
    module = import_file("model", path, _USER_MODULE, "build_model() and load_data()")
    if not callable(getattr(module, "build_model", None)):
        raise ConfigurationError(
            f"--model {path} has no function build_model(); expected a function without arguments "
            "that returns a keras.Model. Add the function."
        )
    return module


def build_user_model(module: ModuleType, seed: int) -> keras.Model:
    """Call the user's ``build_model()``, with the same initial weights for the same seed.

    Args:
        module: The module that ``load_user_model`` returned.
        seed: Seed of the random numbers of Python, numpy and Keras.

    Raises:
        ConfigurationError: ``build_model()`` raises, or returns something other than a Keras model.
    """
    import keras

    where = getattr(module, "__file__", None) or module.__name__
    W_global.clear()
    keras.utils.set_random_seed(seed)
    try:
        model = module.build_model()
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"build_model() of {where} failed: {type(error).__name__}: {error}. Expected a "
            "function that returns a keras.Model; call the function alone to see where it fails."
        ) from error
    if not isinstance(model, keras.Model):
        raise ConfigurationError(
            f"build_model() of {where} returned an object of type {type(model).__name__}; "
            "expected a keras.Model. Return the model itself."
        )
    return model
