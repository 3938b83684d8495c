"""Defines the file with measurements of a script's model, which `script.keras.measure` writes."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.ops.types import ModelSpec, TensorSpec

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

_ARRAYS = ("weights", "statistics")


@dataclasses.dataclass(frozen=True)
class MeasuredModel:
    """Measurements of a script's Keras model and of the model's training steps."""

    name: str
    spec: ModelSpec  # names and shapes of the shared variables
    rows: int  # number of examples in a mini-batch of the script
    step_seconds: float  # median time of a mini-batch, including its data, in seconds
    num_steps: int  # number of mini-batches that were timed to measure step_seconds
    optimizer: str  # class name of the optimizer that the script compiled
    embedding_share: float  # fraction of the model's parameters that get row-sparse gradients
    weights: Float32  # initial values of the shared variables, [num_parameters]
    statistics: Float32  # initial moving statistics of BatchNormalization layers, [m]
    gradients: list[Float32]  # gradients [num_parameters] of the first training steps

    def store(self, path: pathlib.Path) -> None:
        """Write the measurements of the script's model to a file atomically."""
        about: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in (*_ARRAYS, "spec", "gradients")
        }
        about["tensors"] = [[tensor.path, list(tensor.shape)] for tensor in self.spec.tensors]
        about["num_gradients"] = len(self.gradients)
        arrays: dict[str, Any] = {
            f"gradient{n}": gradient for n, gradient in enumerate(self.gradients)
        }
        arrays |= {name: getattr(self, name) for name in _ARRAYS}
        temporary = path.with_name(f".{path.name}")
        with open(temporary, "wb") as file:
            np.savez(file, about=np.array(json.dumps(about)), **arrays)
        os.replace(temporary, path)


def load(path: pathlib.Path) -> MeasuredModel:
    """Read a file of `MeasuredModel.store`; raise OSError, or ValueError for wrong content."""
    with np.load(path, allow_pickle=False) as file:
        about = json.loads(str(file["about"]))
        tensors = tuple(TensorSpec(name, tuple(shape)) for name, shape in about.pop("tensors"))
        gradients = [file[f"gradient{n}"] for n in range(about.pop("num_gradients"))]
        arrays = {name: file[name] for name in _ARRAYS}
    return MeasuredModel(spec=ModelSpec(tensors), gradients=gradients, **arrays, **about)
