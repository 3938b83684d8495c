"""Functions of a script that TensorFlow cannot run with an exchange as they are.

XLA cannot compile an exchange. A step notices `tf.function(jit_compile=True)` while it is traced,
before it changes anything. The function then is traced again without XLA.

A model that is built by its first step has variables without values in that trace. TensorFlow gives
them values afterwards, and traces the function again. The first trace leaves the exchange out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
from absl import logging
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.ops import control_flow_util

from thinwire.ops.types import ConfigurationError


class CannotCompile(ConfigurationError):
    """XLA was to compile an exchange."""


def refuse_compiling() -> None:
    """Refuse to be traced for XLA. Raises CannotCompile."""
    if tf.executing_eagerly():
        return
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise CannotCompile(
            "XLA cannot compile a step that exchanges with the parameter server; expected a "
            "tf.function without jit_compile=True. Leave jit_compile out around the step."
        )


@functools.cache
def trace_without_xla() -> None:
    """Let functions that cannot be compiled be traced without XLA, once for the process."""
    Function.__call__ = _without_xla(Function.__call__)
    Function.get_concrete_function = _without_xla(Function.get_concrete_function)


def _without_xla(alone: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(alone)
    def traced(function: Any, *args: Any, **keywords: Any) -> Any:
        try:
            return alone(function, *args, **keywords)
        except CannotCompile:
            # The trace is half done: the function is as it was before its first call.
            function._created_variables = None
            function._variable_creation_config = function._no_variable_creation_config = None
            if not function._jit_compile:  # another function around it is compiled
                raise
        function._jit_compile = False
        logging.warning(
            "jit_compile of %r is switched off: XLA cannot compile an exchange",
            getattr(function.python_function, "__name__", "a tf.function"),
        )
        return alone(function, *args, **keywords)

    return traced


def call_with_values(function: Callable[[Any], int], values: Any) -> Any:
    """Call a function now, or from the graph that is traced here each time that it is executed.

    Args:
        function: Is called with the structure of values, where tensors of the graph have the values
            that they have in that execution.
        values: Any structure of tensors and other objects.

    Returns:
        What the function returns, an int32 scalar.
    """
    if tf.executing_eagerly():
        return tf.constant(function(values))
    leaves = tf.nest.flatten(values, expand_composites=True)
    tensors = [tf.stop_gradient(leaf) for leaf in leaves if tf.is_tensor(leaf)]

    def call(*present: Any) -> int:
        remaining = iter(present)
        full = [next(remaining) if tf.is_tensor(leaf) else leaf for leaf in leaves]
        return function(tf.nest.pack_sequence_as(values, full, expand_composites=True))

    return tf.ensure_shape(tf.py_function(call, tensors, tf.int32), [])


def have_values(variables: Iterable[Any]) -> bool:
    """Return whether variables of Keras have values; those of a first trace have none."""
    with tf.init_scope():
        return all(bool(each._value.is_initialized()) for each in variables)


def refuse_first_trace() -> None:
    """Refuse to execute a trace that was made before there were values.

    Raises:
        ConfigurationError: TensorFlow executes it where it cannot find the initial values.
    """
    raise ConfigurationError(
        "the model creates its variables within its first step, and their initial values depend on "
        "that step; expected a model that is built before. Call it on one mini-batch before the "
        "loop: model(x[:1])."
    )
