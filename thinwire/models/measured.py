"""What was measured of a script's model, as a file: `thinwire.script.keras.measure` writes it."""

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
    """A script's model and its training, as measured."""

    name: str
    spec: ModelSpec  # of the shared variables
    rows: int  # examples of a mini-batch
    step_seconds: float  # median of a mini-batch, data included
    num_steps: int  # that this is the median of
    optimizer: str  # name of the compiled class
    embedding_share: float  # of the parameters whose gradients are rows
    weights: Float32  # [num_parameters]
    statistics: Float32  # [m] moving statistics
    gradients: list[Float32]  # [num_parameters] each, of the first steps

    def store(self, path: pathlib.Path) -> None:
        """Write the file, whole or not at all."""
        about: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in (*_ARRAYS, "spec", "gradients")
        }
        about["tensors"] = [[each.path, list(each.shape)] for each in self.spec.tensors]
        about["num_gradients"] = len(self.gradients)
        arrays: dict[str, Any] = {f"gradient{n}": each for n, each in enumerate(self.gradients)}
        arrays |= {name: getattr(self, name) for name in _ARRAYS}
        temporary = path.with_name(f".{path.name}")
        with open(temporary, "wb") as file:
            np.savez(file, about=np.array(json.dumps(about)), **arrays)
        os.replace(temporary, path)


def load(path: pathlib.Path) -> MeasuredModel:
    """Read what was stored; raises OSError or ValueError."""
    with np.load(path, allow_pickle=False) as found:
        about = json.loads(str(found["about"]))
        tensors = tuple(TensorSpec(name, tuple(shape)) for name, shape in about.pop("tensors"))
        gradients = [found[f"gradient{n}"] for n in range(about.pop("num_gradients"))]
        arrays = {name: found[name] for name in _ARRAYS}
    return MeasuredModel(spec=ModelSpec(tensors), gradients=gradients, **arrays, **about)
