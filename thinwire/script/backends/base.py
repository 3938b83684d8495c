"""The interface of a Keras backend: what a training step needs from its framework."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Created = TypeVar("_Created")


#: Returns a context in which a model's variables have the values of a step's state.
Attached = Callable[[], contextlib.AbstractContextManager[None]]


class Result(NamedTuple):
    """Shape and dtype of an array that a function of the host returns to a training step.

    Attributes:
        shape: Shape of the array.
        dtype: NumPy's name of the array's dtype, for example "float32".
    """

    shape: tuple[int, ...]
    dtype: str


class CompiledSession(Protocol):
    """The session of a model whose backend compiles stateless steps; see `CompiledSteps`."""

    @property
    def extra_variables(self) -> list[Any]:
        """Variables outside of the model's state that a compiled step reads and assigns."""

    def surrounding(self, data: Any, attached: Attached) -> contextlib.AbstractContextManager[None]:
        """Return a context for one step; it joins the run before the first one."""

    def trace(
        self,
        data: Any,
        call: Callable[[Callable[..., Any]], Any],
        scope: Callable[[Any], Any],
        is_untouched: Callable[[Any], bool],
    ) -> tuple[Any, Any, list[Any]]:
        """Call the model's stateless train_step in a trace; return the values to exchange, too."""

    def exchange(self, values: Any) -> Any:
        """Exchange the values of a compiled step, as arrays, with the servers."""

    def take(self, answer: Any) -> None:
        """Assign the servers' answer to the variables, within a scope that holds the state."""


class StepSession(Protocol):
    """A model's session with the servers, as a backend calls it for each training step."""

    @property
    def compiled_steps(self) -> CompiledSession:
        """The steps of a stateless backend."""

    def train_step(self, data: Any) -> Any:
        """Call the model's own train_step with an exchange; for steps that change variables."""


class Sums(Protocol):
    """Sums of a script's assignments to variables; see `held_weights.Assignments`."""

    @property
    def has_any(self) -> Any:
        """Scalar bool tensor: True if a sum has changed since the last `clear`."""

    def add(self, variable: Any, change: Any) -> None:
        """Add a change, a tensor of the variable's shape, to the variable's sum."""

    def read(self, variables: Sequence[Any]) -> list[Any] | None:
        """Return the sums of variables as numpy arrays; None if there is no sum of any variable."""

    def clear(self) -> None:
        """Set all sums to zero."""


class Backend(Protocol):
    """A Keras backend. Tensors are the backend's own; arrays are NumPy's.

    Attributes:
        name: Keras' name of the backend.
        step_errors: Errors by which the framework reports that a host function in a step failed.
        data_errors: Errors by which the framework reports data that does not fit a model.
        is_stateless: True if steps take and return the state of a model instead of changing
            variables (JAX).
        tries_each_plan: True if every train_step is tried once before the first step, to find which
            variables get no gradient.
    """

    name: str
    step_errors: tuple[type[Exception], ...]
    data_errors: tuple[type[Exception], ...]
    is_stateless: bool
    tries_each_plan: bool

    # -- within a step ------------------------------------------------------------------------

    def is_traced(self) -> bool:
        """Return True if the present code is traced for a later execution, False if it runs now."""

    def unconverted(self, function: _Function) -> _Function:
        """Return a function whose code the framework does not rewrite when it traces the call."""

    def call_host(
        self,
        function: Callable[..., Sequence[Any]],
        arguments: Sequence[Any],
        results: Sequence[Result],
    ) -> list[Any]:
        """Call a Python function of arrays in each execution of a step; return its results.

        Args:
            function: Function that gets one array for each argument and returns one array for each
                result. The arrays that it gets may be views of the framework's memory.
            arguments: Tensors.
            results: Shape and dtype of each array that the function returns.
        """

    def host_number(self, function: Callable[[], float]) -> Any:
        """Return a scalar float32 tensor with a number of the host, read in each execution."""

    def note_on_host(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function of small arrays in each execution of a step, without a result.

        A stateless backend does nothing: the caller of the compiled step calls the function.
        """

    def call_until(
        self, is_done: Callable[[], bool], function: Callable[[Any], object], value: Any
    ) -> None:
        """Call a function with eager tensors in each step until `is_done` returns True.

        Args:
            is_done: Function that returns True if `function` need not be called any more.
            function: Function of the structure `value`, with eager tensors in it.
            value: Nested structure of tensors and other objects.
        """

    def outside_of_step(self, function: Callable[[], _Created]) -> _Created:
        """Call a function eagerly, although a step is traced, and return its result."""

    def refuse_compiling(self) -> None:
        """Raise an error if the present trace cannot contain an exchange (XLA of TensorFlow)."""

    def has_values(self, variables: Iterable[Any], build: Callable[[], object]) -> bool:
        """Return False if a trace cannot exchange because it creates the model's variables.

        Args:
            variables: Variables that the optimizer of the step updates.
            build: Function that creates the optimizer's variables, called before False is returned.
        """

    # -- tensors ------------------------------------------------------------------------------

    def dense(self, gradient: Any) -> Any:
        """Return a gradient, which may be sparse, as a dense tensor."""

    def rows_of_gradient(self, gradient: Any) -> Any:
        """Return the row numbers of a sparse gradient, int64, with duplicates; None if dense."""

    def value_of(self, variable: Any) -> Any:
        """Return a tensor with a variable's present value that later assignments do not change."""

    def repeat_rows(self, leaf: Any, repeats: int) -> Any:
        """Return a tensor with its rows repeated as a whole `repeats` times."""

    def is_at_hand(self, data: Any) -> bool:
        """Return True if a batch's tensors are eager or belong to the trace in progress."""

    def new_sums(self) -> Sums:
        """Return an empty record of a script's assignments to variables."""

    # -- models -------------------------------------------------------------------------------

    def begin(self, allowed: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """Patch the framework once per process, before the first exchange.

        Args:
            allowed: Returns a context in which assignments do not count as the script's own.
        """

    def check_model(self, model: Any) -> None:
        """Raise ConfigurationError if the backend cannot train a model in a run."""

    def surround_steps(self, model: Any, session: StepSession) -> dict[str, Any]:
        """Patch a model so that its steps go through the session.

        Returns:
            Maps each patched attribute of the model to its value before.
        """

    def synchronise(self, model: Any) -> None:
        """Write the state of a `fit` in progress to the model's variables (JAX)."""

    def run_eagerly(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which compiled functions run eagerly, in this process."""

    def state_of(self, model: Any) -> tuple[Any, ...]:
        """Return the arguments that a train_step takes before the data: () or (state,)."""

    def try_step(self, model: Any, train_step: Callable[..., Any], data: Any) -> None:
        """Call or trace a train_step once without effect on variables.

        Args:
            model: Keras model whose variables keep their values.
            train_step: The model's own method `train_step`.
            data: A mini-batch.
        """

    def before_first_step(self, model: Any, call: Callable[[Any], object]) -> None:
        """Call a function with the specs of the next batch just before a graph's first step.

        A backend without such specs does nothing: the first step then tries the train_step.
        """

    def build_for_fit(self, model: Any, train_step: Any, arguments: dict[str, Any]) -> None:
        """Create the variables of a model that is not built yet, from the data of a `fit`."""

    def evaluation_iterator(self, model: Any, arguments: dict[str, Any], steps: Any) -> Any:
        """Return the iterator over validation data that Keras' `fit` would make."""
