"""Measures a script for `thinwire advise`: its model, its first gradients, its step times.

The patched `fit` trains for a few steps with the script's data and compiled optimizer, but without
the script's callbacks and validation data. Then the patched `fit` writes the measurement file and
ends the process, so that no later line of the script runs and the script leaves no files.
"""

from __future__ import annotations

import inspect
import os
import pathlib
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

import keras
import numpy as np
from keras import ops

from thinwire.models import flat_tensors
from thinwire.models.flat_model import SharedModel
from thinwire.models.flat_variables import FlatVariables
from thinwire.models.measured import MeasuredModel
from thinwire.ops.sharding.w_global import shared_variables
from thinwire.ops.types import ConfigurationError
from thinwire.script.backends.present import backend
from thinwire.script.data.rows import count_rows
from thinwire.script.keras.step import dense_gradients, inner

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: Limits of the gradients that a measurement stores: at most eight gradients, and at most 2 GiB of
#: memory for a large model.
_MOST_GRADIENTS, _MOST_GRADIENT_BYTES = 8, 1 << 31
#: Number of first steps that are not timed, because the step is compiled during these steps.
_WARM_STEPS = 2
#: A measurement ends after `_STEPS` steps, or after `_MOST_SECONDS` seconds if at least
#: `_LEAST_STEPS` steps were taken.
_STEPS, _MOST_SECONDS = 30, 10.0
_LEAST_STEPS = _WARM_STEPS + 2
#: Arguments of `fit` that are dropped while its steps are measured.
_LEFT_OUT = ("self", "validation_data", "validation_steps", "validation_batch_size")


def measure_fit(model: keras.Model, path: pathlib.Path) -> None:
    """Patch a model's `fit` to measure a few steps, write the measurement and end the process.

    Args:
        model: Keras model. The script may compile the model before or after the call of
            `measure_fit`.
        path: Path of the file to which the measured gradients and times are written.
    """
    alone = model.fit

    def fit(*args: Any, **keywords: Any) -> NoReturn:
        bound = inspect.signature(keras.Model.fit).bind(model, *args, **keywords).arguments
        arguments = {name: value for name, value in bound.items() if name not in _LEFT_OUT}
        measurement = _Measurement(model)
        arguments |= {"callbacks": [measurement], "verbose": 0, "initial_epoch": 0}
        arguments |= dict.fromkeys(("epochs", "validation_freq"), sys.maxsize)
        alone(**arguments)
        measurement.measured().store(path)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    model.fit = fit


class _Measurement(keras.callbacks.Callback):
    """Records each step's gradients, time and rows, and ends `fit` after enough steps.

    The method `_apply` takes the place of the optimizer's `apply`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.set_model(model)
        # On JAX, a LossScaleOptimizer calls only `apply` of the optimizer inside it.
        scaled = model.optimizer
        self._optimizer = inner(scaled) if backend().is_stateless else scaled
        self._gradients: list[Float32] = []
        self._times: list[float] = []
        self._num_rows: list[int] = []
        self._embedding_share = 0.0
        self._rows: Any = None  # number of rows of the mini-batch in the step that is traced
        self._was_applied = False  # True once the step that is traced has called the optimizer
        self._apply_alone, train_step = self._optimizer.apply, model.train_step

        def step(*state_and_data: Any) -> Any:
            self._rows, self._was_applied = count_rows(state_and_data[-1]), False
            logs = train_step(*state_and_data)
            if not self._was_applied:
                raise ConfigurationError(
                    f"the train_step of {model.name!r} does not step with the optimizer that the "
                    "model is compiled with. thinwire advise measures the steps of that optimizer; "
                    "expected self.optimizer.apply_gradients(...) in the train_step. Or leave out "
                    "thinwire advise: thinwire run also trains with several optimizers."
                )
            return logs

        self._optimizer.apply, model.train_step = self._apply, step
        # a graph of TensorFlow for XLA, and compiled code of torch, cannot record a step
        model.jit_compile = model.jit_compile and backend().is_stateless
        model.train_function = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Set `model.stop_training` once enough steps have been measured."""
        times = self._times
        if len(times) >= _LEAST_STEPS:
            is_done = len(times) > _STEPS or times[-1] - times[0] > _MOST_SECONDS
            self.model.stop_training = self.model.stop_training or is_done

    def _apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        grads, self._was_applied = list(grads), True
        variables = trainable_variables
        if variables is None:
            variables = self._optimizer._trainable_variables
        gradient_of = {id(v): gradient for gradient, v in zip(grads, variables, strict=True)}
        shared = shared_variables(self.model)
        sizes = [int(np.prod(variable.shape)) for variable in shared]
        rows = [
            backend().rows_of_gradient(gradient_of.get(id(variable))) is not None
            for variable in shared
        ]
        self._embedding_share = sum(np.multiply(sizes, rows)) / max(1, sum(sizes))
        gradients = [gradient_of.get(id(variable)) for variable in shared]
        flat = flat_tensors.join(dense_gradients(gradients, shared))
        scale = getattr(self._optimizer, "dynamic_scale", None)
        if scale is not None:
            flat = flat / ops.cast(scale.value, "float32")
        backend().call_host(self._record, [flat, ops.cast(self._rows, "int32")], [])
        return self._apply_alone(grads, trainable_variables)

    def _record(self, gradient: Float32, rows: np.int64) -> tuple[()]:
        self._times.append(time.perf_counter())
        self._num_rows.append(int(rows))
        most = max(1, min(_MOST_GRADIENTS, _MOST_GRADIENT_BYTES // max(1, gradient.nbytes)))
        if len(self._gradients) < most and np.isfinite(gradient).all():
            self._gradients.append(gradient.copy())
        return ()

    def measured(self) -> MeasuredModel:
        """Return the recorded steps as a JSON document that `thinwire advise` reads."""
        shared = SharedModel.of(self.model)
        # without the time of the first steps, which compile
        seconds = np.diff(self._times[_WARM_STEPS:]).tolist()
        return MeasuredModel(
            name=self.model.name,
            spec=shared.spec,
            rows=int(statistics.median(self._num_rows)),
            step_seconds=statistics.median(seconds),
            num_steps=len(seconds),
            optimizer=type(inner(self._optimizer)).__name__,
            embedding_share=self._embedding_share,
            weights=shared.flat(),
            statistics=FlatVariables(shared.statistics).read(),
            gradients=self._gradients,
        )
