"""Tests if a tf.data `map` after batching computes each row from that row alone.

A worker may apply a tf.data map to its part of a batch only if the map computes each row without
the other rows of the batch. A map that subtracts the batch's mean, ranks its rows or divides by the
number of rows gives different values on a part. The test of a map calls the map's function on one
batch, on the workers' parts of the batch, and on the batch with one changed row. A map passes the
test if its function returns the same result for an unchanged row in each call.

During the test of a map, ops that draw random numbers return a constant. So a map with random
augmentation of each row counts as computing each row independently.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.data.util import structure

from thinwire.script.data import pipeline
from thinwire.script.data.place import WorkerPlace, deal
from thinwire.script.data.rows import arrays_of_rows
from thinwire.script.data.windows import rows_in, take_rows_of

#: Largest difference of two results that count as equal, in units of the dtype's epsilon. A matrix
#: product rounds differently when the number of rows changes.
_ROUNDINGS = 100


def mixes_rows(wrapper: Any, batch: Any, place: WorkerPlace) -> bool:
    """Return True if a map gives other rows for the parts of a batch than for the whole batch.

    Args:
        wrapper: Object in which tf.data wraps the function of the map.
        batch: An element of the map's input with at least two rows; None if no element is known.
        place: Number of any worker, and the rules by which the test divides the batch into the
            workers' parts.

    Returns:
        True if the parts give different rows, or if no batch is known. False if the parts give
        equal rows, or if the function fails on the whole batch, because the script then fails
        without Thinwire as well. False also if the function's result for one batch differs from
        call to call, as for augmentation in Python.
    """
    if batch is None:
        return True
    call = _without_randomness(wrapper)
    if call is None:
        return False
    with _kept_variables(wrapper.function):
        try:
            whole = call(batch)
            if not _are_alike(whole, call(batch)):
                return False
        except tf.errors.OpError:
            return False
        given = arrays_of_rows(wrapper.output_structure)
        taken = arrays_of_rows(wrapper._input_structure)
        num_rows = int(rows_in(batch, taken))
        owners = deal(num_rows, place.num_workers, (place.rule.seed, 0, 0, 0))
        for worker in np.unique(owners):
            rows = np.flatnonzero(owners == worker)
            try:
                part = call(take_rows_of(batch, rows, taken))
                if not _are_alike(take_rows_of(whole, rows, given), part):
                    return True
            except (tf.errors.OpError, ValueError):
                return True
        # The parts do not reveal a map that depends on the maximum of a batch, for example, if all
        # parts happen to have the same maximum. A change of the first row reveals such a map.
        try:
            changed = call(tf.nest.map_structure(_with_other_first_row, batch))
        except tf.errors.OpError:
            return False  # the map's function cannot process the batch with the changed row
        other_rows = np.arange(1, num_rows)
        return not _are_alike(*(take_rows_of(each, other_rows, given) for each in (whole, changed)))


def _with_other_first_row(rows: Any) -> Any:
    """Return a dense array of a batch with its first row replaced by an outlier."""
    if not tf.is_tensor(rows) or isinstance(rows, tf.SparseTensor | tf.RaggedTensor):
        return rows
    if not rows.shape.rank or rows.shape[0] < 2:
        return rows
    first, second = rows[:1], rows[1:2]
    if rows.dtype.is_floating:
        first = first * 1000 + 1000
    elif rows.dtype == tf.uint8:
        first = 255 - first
    # an integer may be an identifier, so only integers that occur in the batch are surely valid
    else:
        first = second
    return tf.concat([first, rows[1:]], axis=0)


def _are_alike(first: Any, second: Any) -> bool:
    """Return True if two results of the map's function are equal except for rounding."""
    leaves = [tf.nest.flatten(result, expand_composites=True) for result in (first, second)]
    return len(leaves[0]) == len(leaves[1]) and all(map(_are_close, *leaves))


def _are_close(first: Any, second: Any) -> bool:
    if first is None or second is None:
        return True
    a, b = np.asarray(first), np.asarray(second)
    if a.shape != b.shape or not first.dtype.is_floating:
        return bool(np.array_equal(a, b))
    a, b = a.astype(np.float64), b.astype(np.float64)
    largest = np.abs(a[np.isfinite(a)]).max(initial=0)
    limit = _ROUNDINGS * float(tf.experimental.numpy.finfo(first.dtype.as_numpy_dtype).eps)
    return bool(np.allclose(a, b, rtol=0, atol=limit * largest, equal_nan=True))


@contextlib.contextmanager
def _kept_variables(function: Any) -> Iterator[None]:
    """At the end of the `with` block, restore the values of a traced function's variables."""
    values = [(variable, variable.read_value()) for variable in function.graph.variables]
    try:
        yield
    finally:
        for variable, value in values:
            # the variable of the traced function is read-only
            with contextlib.suppress(AttributeError):
                variable.assign(value)


# -- the map's function without random numbers -----------------------------------------------------

#: Names of random ops whose first input is the shape of their result.
_DRAWS = re.compile(
    r"(Stateless)?(RandomUniform|RandomStandardNormal|RandomNormal|TruncatedNormal"
    r"|RandomUniformFullInt|RandomUniformInt)(V2)?"
)
_SHUFFLES = ("RandomShuffle", "StatelessShuffle")
#: Names of random ops that `_replace_draws` cannot replace by a constant.
_OTHER_DRAWS = re.compile(r"Multinomial|Gamma|Poisson|Binomial|Parameterized|RandomDataset")


def _without_randomness(wrapper: Any) -> Callable[..., Any] | None:
    """Return a map's function with constants as random draws; None if that is impossible."""
    function = wrapper.function
    definition = function.graph.as_graph_def()
    bodies = pipeline.bodies_of(definition)
    ops = {node.op for body in bodies for node in body}
    if any(_OTHER_DRAWS.search(op) for op in ops):
        return None
    run: Callable[..., Any] = function
    if any(_DRAWS.fullmatch(op) or op in _SHUFFLES for op in ops):
        for number, body in enumerate(bodies):
            _replace_draws(body, suffix=":output:0" if number else "")
        _rename_functions(definition)
        run = _imported(definition, function)

    def call(batch: Any) -> Any:
        results = run(*structure.to_tensor_list(wrapper._input_structure, batch))
        return structure.from_compatible_tensor_list(wrapper.output_structure, list(results))

    return call


def _replace_draws(body: Any, suffix: str) -> None:
    """Replace every random op in a graph or in one of its functions by a constant, in place."""
    constants = []
    for node in body:
        attributes = node.attr
        if node.op in _SHUFFLES:
            _replace(node, "Identity", node.input[:1], T=attributes["T"].type)
        elif _DRAWS.fullmatch(node.op):
            kind = attributes["Tout" if "Tout" in attributes else "dtype"].type
            of_shape = attributes["Tshape" if "Tshape" in attributes else "T"].type
            # these draws are replaced by the lowest number that the op may draw
            if "UniformInt" in node.op:
                lowest = node.input[-2 if not node.input[-1].startswith("^") else -3]
            else:
                value = node_def_pb2.NodeDef(name=f"{node.name}_drawn", op="Const")
                value.attr["dtype"].type = kind
                tensor = tf.make_tensor_proto(0.5 if tf.DType(kind).is_floating else 1, dtype=kind)
                value.attr["value"].tensor.CopyFrom(tensor)
                constants.append(value)
                lowest = value.name + suffix
            _replace(node, "Fill", [node.input[0], lowest], T=kind, index_type=of_shape)
    body.extend(constants)


def _replace(node: Any, op: str, inputs: Any, **types: int) -> None:
    """Replace the op of a graph's node, its inputs and the types in its attributes."""
    replacement = node_def_pb2.NodeDef(name=node.name, op=op, input=inputs)
    for name, kind in types.items():
        replacement.attr[name].type = kind
    node.CopyFrom(replacement)


def _rename_functions(definition: graph_pb2.GraphDef) -> None:
    """Rename a graph's functions, because TensorFlow has registered functions of these names."""
    names = {library_function.signature.name for library_function in definition.library.function}
    new_names = {name: f"{name}_{id(definition)}_drawn" for name in names}
    for node in (node for body in pipeline.bodies_of(definition) for node in body):
        node.op = new_names.get(node.op, node.op)
        for value in node.attr.values():
            called = value.list.func if value.HasField("list") else []
            for function_attr in (*([value.func] if value.HasField("func") else []), *called):
                function_attr.name = new_names.get(function_attr.name, function_attr.name)
    for function in definition.library.function:
        function.signature.name = new_names[function.signature.name]
    del definition.library.gradient[:]


def _imported(definition: graph_pb2.GraphDef, function: Any) -> Callable[..., Any]:
    """Return a TensorFlow graph as a Python function with the original inputs and captures."""
    inputs, outputs = function.graph.inputs, function.graph.outputs

    def body(*tensors: Any) -> Any:
        by_name = {symbolic.name: tensor for symbolic, tensor in zip(inputs, tensors, strict=True)}
        names = [symbolic.name for symbolic in outputs]
        return tf.graph_util.import_graph_def(
            definition, input_map=by_name, return_elements=names, name="drawn"
        )

    specs = [tf.TensorSpec(symbolic.shape, symbolic.dtype) for symbolic in inputs]
    wrapped = tf.compat.v1.wrap_function(body, specs)
    return lambda *tensors: wrapped(*tensors, *function.captured_inputs)
