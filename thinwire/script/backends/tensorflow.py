"""Training steps on TensorFlow: in a graph of `tf.function`, or eagerly."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TFEpochIterator

from thinwire.script.backends import tensorflow_traces as traces
from thinwire.script.backends.base import Result, StepSession
from thinwire.script.backends.eager import call_and_restore, replace_train_step

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Created = TypeVar("_Created")

#: Lock for TensorFlow's setting run_functions_eagerly, which all threads of the process share.
_RUNS_EAGERLY = threading.RLock()
#: Prefix of the names of Thinwire's own variables.
_OWN_PREFIX = "thinwire_"


class TensorFlowBackend:
    """Keras on TensorFlow; see `thinwire.script.backends.base.Backend`."""

    name = "tensorflow"
    step_errors: tuple[type[Exception], ...] = (tf.errors.OpError,)
    #: tf.data reports an error of a Python function as UnknownError, and as InternalError if a
    #: nested dataset calls the function.
    data_errors: tuple[type[Exception], ...] = (
        ValueError,
        tf.errors.InvalidArgumentError,
        tf.errors.UnknownError,
        tf.errors.InternalError,
    )
    is_stateless = False
    tries_each_plan = False

    def is_traced(self) -> bool:
        """Return True within the trace of a graph."""
        return not tf.executing_eagerly()

    def unconverted(self, function: _Function) -> _Function:
        """Return a function that AutoGraph does not convert within a `tf.function`."""
        converted: _Function = tf.autograph.experimental.do_not_convert(function)
        return converted

    def call_host(
        self,
        function: Callable[..., Sequence[Any]],
        arguments: Sequence[Any],
        results: Sequence[Result],
    ) -> list[Any]:
        """Call a Python function of arrays by `tf.numpy_function`, whose arrays are views."""
        types = [tf.as_dtype(result.dtype) for result in results]
        returned = tf.numpy_function(function, list(arguments), types)
        if not results:  # TensorFlow then returns the operation itself
            return []
        return [
            tf.ensure_shape(value, result.shape)
            for value, result in zip(returned, results, strict=True)
        ]

    def host_number(self, function: Callable[[], float]) -> Any:
        """Return a scalar float32 tensor with a number of the host, read in each execution."""
        number = tf.numpy_function(lambda: np.float32(function()), [], tf.float32)
        return tf.ensure_shape(number, [])

    def note_on_host(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function of small arrays in each execution of a step, without a result."""

        def call(*arrays: Any) -> None:
            function(*arrays)

        tf.numpy_function(call, list(arguments), [])

    def call_until(
        self, is_done: Callable[[], bool], function: Callable[[Any], object], value: Any
    ) -> None:
        """Call a function with eager tensors, now or in each execution of the graph in progress."""
        traces.call_until(is_done, function, value)

    def outside_of_step(self, function: Callable[[], _Created]) -> _Created:
        """Call a function eagerly, although a step is traced."""
        with tf.init_scope():
            return function()

    def refuse_compiling(self) -> None:
        """Raise CannotCompile if TensorFlow traces the graph in progress for XLA."""
        traces.refuse_compiling()

    def has_values(self, variables: Iterable[Any], build: Callable[[], object]) -> bool:
        """Return False in the first trace of a step that creates the model's variables.

        The variables have no values in that trace, so it exchanges nothing. The optimizer's
        variables are created in it, because TensorFlow forbids a later trace to create variables.
        TensorFlow traces the function again before it executes the function.
        """
        if traces.have_values(variables):
            return True
        build()
        tf.numpy_function(traces.refuse_first_trace, [], [])
        return False

    # -- tensors --------------------------------------------------------------------------------

    def dense(self, gradient: Any) -> Any:
        """Return a gradient, which may be IndexedSlices, as a dense tensor."""
        return tf.convert_to_tensor(gradient)

    def rows_of_gradient(self, gradient: Any) -> Any:
        """Return the row numbers of IndexedSlices, with duplicates; None for a dense gradient."""
        if isinstance(gradient, tf.IndexedSlices):
            return tf.cast(gradient.indices, tf.int64)
        return None

    def value_of(self, variable: Any) -> Any:
        """Return a tensor with a variable's present value."""
        return tf.convert_to_tensor(variable.value)

    def repeat_rows(self, leaf: Any, repeats: int) -> Any:
        """Return a tensor, which may be sparse, with its rows repeated."""
        if isinstance(leaf, tf.SparseTensor):
            return tf.sparse.concat(0, [leaf] * repeats)
        return tf.concat([leaf] * repeats, 0)

    def is_at_hand(self, data: Any) -> bool:
        """Return True if a batch's tensors are eager or belong to the graph in progress."""
        if tf.executing_eagerly():
            return True
        graph = tf.compat.v1.get_default_graph()
        leaves = tf.nest.flatten(data, expand_composites=True)
        return all(leaf is None or getattr(leaf, "graph", None) is graph for leaf in leaves)

    def new_sums(self) -> _GraphSums:
        """Return an empty record of assignments, which a graph can add to."""
        return _GraphSums()

    # -- models -----------------------------------------------------------------------------------

    def begin(self, allowed: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """Trace functions that exchange without XLA."""
        traces.trace_without_xla()

    def check_model(self, model: Any) -> None:
        """Accept every model: `checks` rejects a tf.distribute strategy."""

    def surround_steps(self, model: Any, session: StepSession) -> dict[str, Any]:
        """Replace the model's train_step by the session's."""
        return replace_train_step(model, session)

    def synchronise(self, model: Any) -> None:
        """Do nothing: the model's variables always have their values."""

    @contextlib.contextmanager
    def run_eagerly(self) -> Iterator[None]:
        """Run every `tf.function` eagerly, so that no trace keeps variables of a trial."""
        with _RUNS_EAGERLY:
            before = tf.config.functions_run_eagerly()
            tf.config.run_functions_eagerly(True)
            try:
                yield
            finally:
                tf.config.run_functions_eagerly(before)

    def state_of(self, model: Any) -> tuple[Any, ...]:
        """Return no arguments: a train_step takes the data alone."""
        return ()

    def try_step(self, model: Any, train_step: Callable[..., Any], data: Any) -> None:
        """Call a train_step eagerly once, or trace it once if `data` are tensor specs.

        Each `tf.function` that the train_step calls runs inline: a separate trace of it would keep
        the variables that the trace of the train_step creates. A trace must not be within another
        trace, because TensorFlow cannot compute gradients within `tf.init_scope`.
        """
        leaves = tf.nest.flatten(data)
        if any(isinstance(leaf, tf.TypeSpec) for leaf in leaves):
            with self.run_eagerly():
                tf.function(train_step, autograph=False).get_concrete_function(data)
            return
        call_and_restore(model, lambda: train_step(data))

    def before_first_step(self, model: Any, call: Callable[[Any], object]) -> None:
        """Call a function with the tensor specs of the next batch just before a graph's step."""
        alone = model.train_function

        def first(iterator: Any) -> Any:
            model.train_function = alone
            if hasattr(iterator, "element_spec"):
                data_spec = iterator.element_spec
            else:  # a Python iterator over mini-batches
                batch = next(iterator)
                data_spec = tf.nest.map_structure(_spec, batch)
                iterator = itertools.chain([batch], iterator)
            call(data_spec)
            return alone(iterator)

        model.train_function = first

    def build_for_fit(self, model: Any, train_step: Any, arguments: dict[str, Any]) -> None:
        """Trace the train_step with the shapes of the training data, which builds the model."""
        iterator = TFEpochIterator(
            **arguments,
            shuffle=False,
            distribute_strategy=model.distribute_strategy,
            steps_per_execution=1,
        )
        self.try_step(model, train_step, iterator._distributed_dataset.element_spec)

    def evaluation_iterator(self, model: Any, arguments: dict[str, Any], steps: Any) -> Any:
        """Return the iterator over validation data that Keras' `fit` would make."""
        return TFEpochIterator(
            **arguments,
            steps_per_epoch=steps,
            shuffle=False,
            distribute_strategy=model.distribute_strategy,
            steps_per_execution=model.steps_per_execution,
        )


def _spec(leaf: Any) -> Any:
    return None if leaf is None else tf.type_spec_from_value(leaf)


class _GraphSums:
    """Sums of a script's assignments in TensorFlow variables, which graphs add to."""

    def __init__(self) -> None:
        # maps the id of a variable to the float32 sum of the script's changes of it
        self._sums: dict[int, Any] = {}
        # Create the variable `flag` before any step is traced, because TensorFlow traces a step a
        # second time if the step creates a variable.
        with tf.init_scope():
            self._flag = tf.Variable(False, trainable=False, name=f"{_OWN_PREFIX}has_assigned")

    @property
    def has_any(self) -> Any:
        return self._flag.read_value()

    def add(self, variable: Any, change: Any) -> None:
        if id(variable) not in self._sums:
            with tf.init_scope():
                self._sums[id(variable)] = tf.Variable(
                    tf.zeros(variable.shape), trainable=False, name=f"{_OWN_PREFIX}assigned"
                )
        total = self._sums[id(variable)].assign_add(tf.cast(change, tf.float32))
        # Set the flag only after the sum has changed, so that a reader of the flag sees the new
        # sum.
        with tf.control_dependencies([total]):
            self._flag.assign(True)

    def read(self, variables: Sequence[Any]) -> list[Any] | None:
        if not self._sums:
            return None
        totals = [self._sums.get(id(variable)) for variable in variables]
        return [
            np.zeros(variable.shape, np.float32) if total is None else total.numpy()
            for variable, total in zip(variables, totals, strict=True)
        ]

    def clear(self) -> None:
        for total in self._sums.values():
            total.assign(tf.zeros_like(total))
        self._flag.assign(False)
