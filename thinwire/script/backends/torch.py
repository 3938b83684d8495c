"""Training steps on torch, which run eagerly and change variables."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from keras.src.backend.torch.trainer import TorchEpochIterator

from thinwire.script.backends.base import Result, StepSession
from thinwire.script.backends.eager import (
    HostSums,
    call_and_restore,
    replace_train_step,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Created = TypeVar("_Created")


class TorchBackend:
    """Keras on torch; see `thinwire.script.backends.base.Backend`."""

    name = "torch"
    step_errors: tuple[type[Exception], ...] = ()
    data_errors: tuple[type[Exception], ...] = (ValueError, RuntimeError)
    is_stateless = False
    tries_each_plan = True

    def is_traced(self) -> bool:
        """Return False: every step runs eagerly."""
        return False

    def unconverted(self, function: _Function) -> _Function:
        """Return a function whose call `torch.compile` leaves to Python.

        A process that has not compiled anything keeps the function: `torch.compiler` would import
        the compiler, which takes seconds.
        """
        if "torch._dynamo" not in sys.modules:
            return function
        converted: _Function = torch.compiler.disable(function)
        return converted

    def call_host(
        self,
        function: Callable[..., Sequence[Any]],
        arguments: Sequence[Any],
        results: Sequence[Result],
    ) -> list[Any]:
        """Call a Python function of arrays, which are views of tensors in the host's memory."""
        # the step's first tensor shows the device on which its results are needed
        devices = [value.device for value in arguments if isinstance(value, torch.Tensor)]
        device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
        returned = function(*map(_array, arguments))
        return [
            torch.as_tensor(value, dtype=getattr(torch, result.dtype)).to(device)
            for value, result in zip(returned, results, strict=True)
        ]

    def host_number(self, function: Callable[[], float]) -> float:
        """Return a number of the host."""
        return float(function())

    def note_on_host(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function now."""
        function(*map(_array, arguments))

    def call_until(
        self, is_done: Callable[[], bool], function: Callable[[Any], object], value: Any
    ) -> None:
        """Call a function now unless `is_done` returns True, without a record for gradients."""
        if not is_done():
            with torch.no_grad():
                function(value)

    def outside_of_step(self, function: Callable[[], _Created]) -> _Created:
        """Call a function now."""
        return function()

    def refuse_compiling(self) -> None:
        """Do nothing: `unconverted` keeps an exchange out of compiled code."""

    def has_values(self, variables: Iterable[Any], build: Callable[[], object]) -> bool:
        """Return True: an eager step has created its variables before its optimizer steps."""
        return True

    # -- tensors ------------------------------------------------------------------------------

    def dense(self, gradient: Any) -> Any:
        """Return a gradient, which may be sparse (COO), as a dense tensor."""
        return gradient.to_dense() if gradient.is_sparse else gradient

    def rows_of_gradient(self, gradient: Any) -> Any:
        """Return the row numbers of a sparse gradient; None for a dense gradient."""
        if gradient is not None and gradient.is_sparse:
            return gradient._indices()[0].to(torch.int64)
        return None

    def value_of(self, variable: Any) -> Any:
        """Return a copy of a variable's present value, which assignments would overwrite."""
        return variable.value.detach().clone()

    def repeat_rows(self, leaf: Any, repeats: int) -> Any:
        """Return a tensor with its rows repeated."""
        return torch.cat([torch.as_tensor(leaf)] * repeats, 0)

    def is_at_hand(self, data: Any) -> bool:
        """Return True: all tensors are eager."""
        return True

    def new_sums(self) -> _TorchSums:
        """Return an empty record of assignments."""
        return _TorchSums()

    # -- models -------------------------------------------------------------------------------

    def begin(self, allowed: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """Do nothing."""

    def check_model(self, model: Any) -> None:
        """Accept every model."""

    def surround_steps(self, model: Any, session: StepSession) -> dict[str, Any]:
        """Replace the model's train_step by the session's."""
        return replace_train_step(model, session)

    def synchronise(self, model: Any) -> None:
        """Do nothing: the model's variables always have their values."""

    def run_eagerly(self) -> contextlib.AbstractContextManager[None]:
        """Return a context without effect."""
        return contextlib.nullcontext()

    def state_of(self, model: Any) -> tuple[Any, ...]:
        """Return no arguments: a train_step takes the data alone."""
        return ()

    def try_step(self, model: Any, train_step: Callable[..., Any], data: Any) -> None:
        """Call a train_step once, and restore the variables and torch's random numbers."""
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            call_and_restore(model, lambda: train_step(data))

    def before_first_step(self, model: Any, call: Callable[[Any], object]) -> None:
        """Do nothing: the first step tries the train_step with its batch."""

    def build_for_fit(self, model: Any, train_step: Any, arguments: dict[str, Any]) -> None:
        """Create the variables of a model from the first batch of a `fit`, as Keras' fit does."""
        model._symbolic_build(iterator=TorchEpochIterator(**arguments, shuffle=False))

    def evaluation_iterator(self, model: Any, arguments: dict[str, Any], steps: Any) -> Any:
        """Return the iterator over validation data that Keras' `fit` would make."""
        return TorchEpochIterator(
            **arguments,
            steps_per_epoch=steps,
            shuffle=False,
            steps_per_execution=model.steps_per_execution,
        )


class _TorchSums(HostSums):
    """Sums of a script's assignments; changes are tensors of torch."""

    def add(self, variable: Any, change: Any) -> None:
        super().add(variable, _array(change))


def _array(value: Any) -> Any:
    """Return a tensor as an array, which shares the memory of a tensor on the host."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if value.dtype is torch.bfloat16 else value).numpy()
