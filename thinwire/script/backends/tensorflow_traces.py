"""Adapts a script's TensorFlow functions so that they can contain an exchange with the PS.

XLA cannot compile an exchange with the parameter server. While a function of
`tf.function(jit_compile=True)` is traced, an optimizer's step detects XLA before it changes any
variable. A `tf.function` with an exchange that XLA was to compile is traced a second time, without
XLA.

If the first training step builds a model, the model's variables have no values in the trace of that
step. After the first trace of a step, TensorFlow gives the model's variables values and traces the
function again. If the first training step builds a model, the first trace therefore contains no
exchange with the PS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.ops import control_flow_util

from thinwire.ops.types import ConfigurationError


class CannotCompile(ConfigurationError):
    """Raised while a step with an exchange is traced for XLA, which cannot compile the exchange."""


def refuse_compiling() -> None:
    """Raise CannotCompile if TensorFlow traces the graph in progress for XLA."""
    if tf.executing_eagerly():
        return
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise CannotCompile(
            "XLA cannot compile a step that exchanges with the parameter server; expected a "
            "tf.function without jit_compile=True. Leave jit_compile out around the step."
        )


@functools.cache
def trace_without_xla() -> None:
    """Patch `tf.function` to trace functions with an exchange without XLA, once per process."""
    Function.__call__ = _without_xla(Function.__call__)
    Function.get_concrete_function = _without_xla(Function.get_concrete_function)


def _without_xla(alone: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(alone)
    def traced(function: Any, *args: Any, **keywords: Any) -> Any:
        try:
            return alone(function, *args, **keywords)
        except CannotCompile:
            # The exception has stopped TensorFlow's trace midway. Reset the function to its state
            # before its first call, so that the next call initializes the function again.
            function._created_variables = None
            function._variable_creation_config = function._no_variable_creation_config = None
            # for a function without XLA, the enclosing function with XLA is reset instead
            if not function._jit_compile:
                raise
        function._jit_compile = False
        logging.warning(
            "jit_compile of %r is switched off: XLA cannot compile an exchange with the PS",
            getattr(function.python_function, "__name__", "a tf.function"),
        )
        return alone(function, *args, **keywords)

    return traced


def call_until(is_done: Callable[[], bool], function: Callable[[Any], object], value: Any) -> None:
    """Call a function with eager values unless `is_done` returns True.

    The function is called now, or in each execution of the graph in progress.

    Args:
        is_done: Function that returns True if `function` need not be called any more.
        function: Function of the structure `value`, with eager tensors in place of graph tensors.
        value: Nested structure of tensors and other objects, with which the function is called.
    """
    if tf.executing_eagerly():
        if not is_done():
            function(value)
        return
    leaves = tf.nest.flatten(value, expand_composites=True)

    def call(*present: Any) -> int:
        remaining = iter(present)
        full = [next(remaining) if tf.is_tensor(leaf) else leaf for leaf in leaves]
        function(tf.nest.pack_sequence_as(value, full, expand_composites=True))
        return 0

    def call_in_graph() -> Any:
        tensors = [tf.stop_gradient(leaf) for leaf in leaves if tf.is_tensor(leaf)]
        return tf.ensure_shape(tf.py_function(call, tensors, tf.int32), [])

    done = tf.numpy_function(lambda: np.bool_(is_done()), [], tf.bool)
    tf.cond(tf.ensure_shape(done, []), lambda: tf.constant(0), call_in_graph)


def have_values(variables: Iterable[Any]) -> bool:
    """Return True if all given Keras variables have values; new variables in a trace have none."""
    with tf.init_scope():
        return all(bool(variable._value.is_initialized()) for variable in variables)


def refuse_first_trace() -> None:
    """Reject the execution of a trace that was made before the model's variables had values.

    Raises:
        ConfigurationError: Each call of the function raises this error. TensorFlow executes a first
            trace only if the variables' initial values depend on the traced step.
    """
    raise ConfigurationError(
        "the model creates its variables within its first training step, and their initial values "
        "depend on that step; expected a model that is built before that step. Call the model on "
        "one mini-batch before the loop: model(x[:1])."
    )
