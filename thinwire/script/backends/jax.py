"""Training steps on JAX, which are compiled functions from a state to a new state.

Between two steps of a `fit`, Keras holds a model's values in the state of its trainer, and the
model's variables are empty. A step of a `fit` is compiled without the exchange: the compiled part
returns the values to send, Python exchanges them with the servers, and the answer replaces values
of the new state. In a loop of the script's own, whose compiled function Thinwire does not call,
`stateless_apply` exchanges by a callback from the compiled code.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, TypeVar

import jax
import keras
import numpy as np
from jax._src.core import trace_state_clean
from jax.experimental import io_callback
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.backend.jax.trainer import JAXEpochIterator, JAXTrainer

from thinwire.ops.types import ConfigurationError
from thinwire.script.backends.base import CompiledSession, Result, StepSession
from thinwire.script.backends.eager import HostSums

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Created = TypeVar("_Created")
#: State of a JAX trainer: values of the trainable, the other, the optimizer's, the metrics'
#: variables.
State = tuple[list[Any], list[Any], list[Any], list[Any]]
#: Variables of a model in the order of a state.
VariableLists = tuple[list[Any], list[Any], list[Any], list[Any]]


class JaxBackend:
    """Keras on JAX; see `thinwire.script.backends.base.Backend`."""

    name = "jax"
    step_errors: tuple[type[Exception], ...] = (jax.errors.JaxRuntimeError,)
    data_errors: tuple[type[Exception], ...] = (ValueError, TypeError)
    is_stateless = True
    tries_each_plan = False

    def is_traced(self) -> bool:
        """Return True within the trace of a JAX transformation such as jit."""
        return not trace_state_clean()

    def unconverted(self, function: _Function) -> _Function:
        """Return the function: JAX does not rewrite Python code."""
        return function

    def call_host(
        self,
        function: Callable[..., Sequence[Any]],
        arguments: Sequence[Any],
        results: Sequence[Result],
    ) -> list[Any]:
        """Call a Python function of arrays, in the order of the program's calls."""

        def call(*arrays: Any) -> list[Any]:
            # the arrays are JAX's, and their buffers may be reused after the call
            returned = function(*(np.array(array) for array in arrays))
            return [
                np.asarray(value, dtype).reshape(result.shape)
                for value, result, dtype in zip(returned, results, dtypes, strict=True)
            ]

        # without jax_enable_x64, JAX has no int64
        dtypes = [jax.dtypes.canonicalize_dtype(result.dtype) for result in results]

        if not self.is_traced():
            return [jax.numpy.array(value) for value in call(*arguments)]
        shapes = [
            jax.ShapeDtypeStruct(result.shape, dtype)
            for result, dtype in zip(results, dtypes, strict=True)
        ]
        return list(io_callback(call, shapes, *arguments, ordered=True))

    def host_number(self, function: Callable[[], float]) -> Any:
        """Return a scalar float32 tensor with a number of the host, read in each execution."""
        shape = jax.ShapeDtypeStruct((), np.float32)
        # The callback takes no tensors, so it is no part of a gradient.
        return io_callback(lambda: np.float32(function()), shape)

    def note_on_host(self, function: Callable[..., object], *arguments: Any) -> None:
        """Do nothing: the caller of the compiled step calls the function."""

    def call_until(
        self, is_done: Callable[[], bool], function: Callable[[Any], object], value: Any
    ) -> None:
        """Call a function unless `is_done` returns True or a tensor has no value yet (a trace)."""
        leaves = keras.tree.flatten(value)
        if not is_done() and not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            function(value)

    def outside_of_step(self, function: Callable[[], _Created]) -> _Created:
        """Call a function in another thread if this thread traces a step.

        Traces and Keras' scopes of a step belong to a thread.
        """
        if not (self.is_traced() or in_stateless_scope()):
            return function()
        with futures.ThreadPoolExecutor(1) as outside:
            return outside.submit(function).result()

    def refuse_compiling(self) -> None:
        """Do nothing: compiled code can call back."""

    def has_values(self, variables: Iterable[Any], build: Callable[[], object]) -> bool:
        """Return True: Keras creates a model's variables before it traces a step."""
        return True

    # -- tensors --------------------------------------------------------------------------------

    def dense(self, gradient: Any) -> Any:
        """Return the gradient, which is dense."""
        return gradient

    def rows_of_gradient(self, gradient: Any) -> Any:
        """Return None: gradients are dense."""
        return None

    def value_of(self, variable: Any) -> Any:
        """Return a variable's present value, which assignments replace and do not change."""
        return variable.value

    def repeat_rows(self, leaf: Any, repeats: int) -> Any:
        """Return a tensor with its rows repeated."""
        return jax.numpy.concatenate([jax.numpy.asarray(leaf)] * repeats, 0)

    def is_at_hand(self, data: Any) -> bool:
        """Return True if a batch's tensors have values: `call_until` skips a trace itself."""
        return True

    def new_sums(self) -> HostSums:
        """Return an empty record of assignments, which only code outside of steps adds to."""
        return HostSums()

    # -- models -----------------------------------------------------------------------------------

    def begin(self, allowed: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """Patch Keras to write the state of a step to the variables without a record of it."""
        _sync_unrecorded(allowed)

    def check_model(self, model: Any) -> None:
        """Reject a model whose variables are on several devices."""
        distribution = keras.distribution.distribution()
        if distribution is not None:
            raise ConfigurationError(
                f"model {model.name!r} uses keras.distribution ({type(distribution).__name__}); "
                "expected a model on one device: a worker of Thinwire trains on one device. Start "
                "one worker for each device (--gpus_per_worker=1), without keras.distribution."
            )

    def surround_steps(self, model: Any, session: StepSession) -> dict[str, Any]:
        """Replace the function that makes a model's compiled step."""
        alone, steps = model.make_train_function, _StepFunctions(model, session.compiled_steps)

        def make_train_function(force: bool = False) -> None:
            if model.train_function is None or force:
                model.train_function = model._make_function(steps.function())

        model.make_train_function = make_train_function
        return {"make_train_function": alone}

    def synchronise(self, model: Any) -> None:
        """Write the state of a `fit` in progress to the model's variables."""
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()

    def run_eagerly(self) -> contextlib.AbstractContextManager[None]:
        """Return a context without effect: outside of a trace, JAX runs eagerly."""
        return contextlib.nullcontext()

    def state_of(self, model: Any) -> tuple[Any, ...]:
        """Return the state of a model, from its variables."""
        return (_state(model),)

    def try_step(self, model: Any, train_step: Callable[..., Any], data: Any) -> None:
        """Trace a train_step without compiling it."""
        jax.eval_shape(lambda state, batch: train_step(state, batch), _state(model), data)

    def before_first_step(self, model: Any, call: Callable[[Any], object]) -> None:
        """Do nothing: the first step tries the train_step with its batch."""

    def build_for_fit(self, model: Any, train_step: Any, arguments: dict[str, Any]) -> None:
        """Create the variables of a model from the first batch of a `fit`, as Keras' fit does."""
        model._symbolic_build(iterator=JAXEpochIterator(**arguments, shuffle=False))

    def evaluation_iterator(self, model: Any, arguments: dict[str, Any], steps: Any) -> Any:
        """Return the iterator over validation data that Keras' `fit` would make."""
        return JAXEpochIterator(
            **arguments,
            steps_per_epoch=steps,
            shuffle=False,
            steps_per_execution=model.steps_per_execution,
        )


@functools.cache
def _sync_unrecorded(allowed: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Patch `jax_state_sync`, by which Keras assigns a trainer's state, once per process."""
    alone = JAXTrainer.jax_state_sync

    @functools.wraps(alone)
    def jax_state_sync(trainer: Any) -> None:
        with allowed():
            alone(trainer)

    JAXTrainer.jax_state_sync = jax_state_sync


def _lists(model: Any) -> VariableLists:
    """Return a model's variables in the order of a trainer's state."""
    optimizer = model.optimizer
    return (
        list(model.trainable_variables),
        list(model.non_trainable_variables),
        [] if optimizer is None else list(optimizer.variables),
        list(model.metrics_variables),
    )


def _state(model: Any) -> State:
    return _values(_lists(model))


def _lengths(lists: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    return tuple(map(len, lists))


def _values(lists: VariableLists) -> State:
    trainable, others, slots, metrics = ([v.value for v in variables] for variables in lists)
    return trainable, others, slots, metrics


def _attach(lists: VariableLists, state: State) -> bool:
    """Write a state to its variables; return True if they were empty before."""
    was_empty = False
    for variables, values in zip(lists, state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            was_empty = was_empty or variable._value is None
            variable._value = value
    return was_empty


def _empty(lists: VariableLists) -> None:
    for variables in lists:
        for variable in variables:
            variable._value = None


class _ModelValues:
    """Gives a model's variables the values of a trainer's state while Python needs them.

    Attributes:
        state: The state; read again from the variables after `attached` was entered.
    """

    def __init__(self, model: Any, state: State) -> None:
        self._model, self.state = model, state

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Let the model's variables have values within the `with` block, and read them after."""
        was_empty = _attach(_lists(self._model), self.state)
        yield
        lists = _lists(self._model)
        self.state = _values(lists)
        if was_empty:
            _empty(lists)


class _StepFunctions:
    """The steps of a model's `fit` and `train_on_batch`: a compiled part, then an exchange."""

    def __init__(self, model: Any, session: CompiledSession) -> None:
        self._model, self._session = model, session
        # lengths of the lists of a state -> variables with these values when a step was traced
        self._variables: dict[tuple[int, ...], VariableLists] = {}

    def function(self) -> Callable[[State, Any], tuple[Any, State]]:
        """Return a function from a state and a batch to logs and a new state."""
        is_compiled = self._model.jit_compile and not self._model.run_eagerly
        # every call traces a function of its own, because compile() may have changed the model
        compute: Any = lambda *given: self._compute(*given)  # noqa: E731
        if is_compiled:
            compute = jax.jit(compute, donate_argnums=0)

        def step(state: State, data: Any) -> tuple[Any, State]:
            model_values = _ModelValues(self._model, state)
            try:
                with self._session.surrounding(data, model_values.attached):
                    state, extras = model_values.state, self._session.extra_variables
                    logs, state, sent = compute(state, [v.value for v in extras], data)
                    values, extra_values = sent
                    for variable, value in zip(extras, extra_values, strict=True):
                        variable._value = value
                    arrays = jax.tree.map(np.asarray, values)
                    answer = self._session.exchange(arrays)
                    return logs, state if answer is None else self._taken(state, answer)
            except BaseException:
                self._recover(state)
                raise

        return step

    def _compute(self, state: State, extra_values: Any, data: Any) -> Any:
        """Call the model's train_step; return logs, the new state and the values to send."""
        lists = self._variables[_lengths(state)] = _lists(self._model)
        session, extras = self._session, self._session.extra_variables
        held_values = [variable._value for variable in extras]
        for variable, value in zip(extras, extra_values, strict=True):
            variable._value = value
        try:
            (logs, new_state), values, extra_values = session.trace(
                data,
                lambda train_step: train_step(state, data),
                lambda returned: _scope(lists, returned[1], extras, extra_values),
                lambda returned: _is_same(returned[1][0], state[0]),
            )
        finally:
            for variable, value in zip(extras, held_values, strict=True):
                variable._value = value
        return logs, new_state, (values, extra_values)

    def _taken(self, state: State, answer: Any) -> State:
        """Return the state with the values of the servers' answer."""
        lists = self._variables[_lengths(state)]
        was_empty = _attach(lists, state)
        self._session.take(answer)
        state = _values(lists)
        if was_empty:
            _empty(lists)
        return state

    def _recover(self, state: State) -> None:
        """Give the model its values before a step that failed, unless the step consumed them."""
        leaves = jax.tree.leaves(state)
        if not any(getattr(leaf, "is_deleted", bool)() for leaf in leaves):
            _attach(_lists(self._model), state)
            self._model._jax_state_synced = True


def _scope(
    lists: VariableLists, state: State, extras: Sequence[Any], extra_values: Any
) -> keras.StatelessScope:
    """Return a scope in which a model's variables have the values of a state."""
    pairs = [
        pair
        for variables, values in zip(lists, state, strict=True)
        for pair in zip(variables, values, strict=True)
    ]
    return keras.StatelessScope([*pairs, *zip(extras, extra_values, strict=True)])


def _is_same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(value is other for value, other in zip(values, others, strict=True))
