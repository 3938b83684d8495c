"""Whether a `map` of batches treats each row by itself.

A worker that takes a part of each batch may run such a map on its part alone. A map that subtracts
the batch's mean, ranks its rows or divides by their number gives other values there. So the
function is called on one batch, on the workers' parts of it, and on the batch with one row changed:
the result for a row has to be the same each time.

Ops that draw random numbers give a constant meanwhile. Augmentation that draws for each row counts
as treating each row by itself, whatever it draws.
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

from thinwire.script.data.place import WorkerPlace, deal
from thinwire.script.data.rows import arrays_of_rows
from thinwire.script.data.windows import rows_in, take_rows_of

#: A product of matrices rounds otherwise for another number of rows: so many times as much.
_ROUNDINGS = 100


def mixes_rows(wrapper: Any, batch: Any, place: WorkerPlace) -> bool:
    """Return whether a map's function gives other rows on parts of a batch than on the whole.

    Args:
        wrapper: The function, as tf.data wraps it.
        batch: An element of the map's input, of two rows at least; None: there is none to be had.
        place: Any worker's; batches are cut by it.

    Returns:
        True also where there is no batch to try. False where the function fails on a whole batch,
        as it does for the script alone, or gives another result at each call, as augmentation in
        Python does.
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
        attempt = _Attempt(wrapper, call, batch, whole)
        return attempt.mixes(place) or attempt.reacts()


class _Attempt:
    """A map's function, a batch, and its result for the batch."""

    def __init__(self, wrapper: Any, call: Callable[..., Any], batch: Any, whole: Any) -> None:
        self._taken = arrays_of_rows(wrapper._input_structure)
        self._given = arrays_of_rows(wrapper.output_structure)
        self._call, self._batch, self._whole = call, batch, whole
        self._num_rows = int(rows_in(batch, self._taken))

    def mixes(self, place: WorkerPlace) -> bool:
        """Return whether the workers' parts of the batch give other rows than the whole batch."""
        owners = deal(self._num_rows, place.num_workers, (place.rule.seed, 0, 0, 0))
        for worker in np.unique(owners):
            rows = np.flatnonzero(owners == worker)
            try:
                part = self._call(take_rows_of(self._batch, rows, self._taken))
                if not _are_alike(take_rows_of(self._whole, rows, self._given), part):
                    return True
            except (tf.errors.OpError, ValueError):
                return True
        return False

    def reacts(self) -> bool:
        """Return whether the other rows' results change with the first row.

        A batch whose parts have the same maximum, or the same number of positives, shows it here.
        """
        others = np.arange(1, self._num_rows)
        try:
            changed = self._call(tf.nest.map_structure(_with_other_first_row, self._batch))
        except tf.errors.OpError:
            return False  # what was made up for the row is not for this function
        results = [take_rows_of(each, others, self._given) for each in (self._whole, changed)]
        return not _are_alike(*results)


def _with_other_first_row(rows: Any) -> Any:
    """Return a dense component of a batch with a first row that stands out."""
    if not tf.is_tensor(rows) or isinstance(rows, tf.SparseTensor | tf.RaggedTensor):
        return rows
    if not rows.shape.rank or rows.shape[0] < 2:
        return rows
    first, second = rows[:1], rows[1:2]
    if rows.dtype.is_floating:
        first = first * 1000 + 1000
    elif rows.dtype == tf.uint8:
        first = 255 - first
    else:  # a number may name something: only those that occur are known to
        first = second
    return tf.concat([first, rows[1:]], axis=0)


def _are_alike(first: Any, second: Any) -> bool:
    """Return whether two results agree but for rounding."""
    pairs = [tf.nest.flatten(each, expand_composites=True) for each in (first, second)]
    if len(pairs[0]) != len(pairs[1]):
        return False
    for one, other in zip(*pairs, strict=True):
        if one is None or other is None:
            continue
        a, b = np.asarray(one), np.asarray(other)
        if a.shape != b.shape:
            return False
        if not one.dtype.is_floating:
            if not np.array_equal(a, b):
                return False
            continue
        a, b = a.astype(np.float64), b.astype(np.float64)
        finite = np.abs(a[np.isfinite(a)])
        limit = _ROUNDINGS * float(tf.experimental.numpy.finfo(one.dtype.as_numpy_dtype).eps)
        if not np.allclose(a, b, rtol=0, atol=limit * finite.max(initial=0), equal_nan=True):
            return False
    return True


@contextlib.contextmanager
def _kept_variables(function: Any) -> Iterator[None]:
    """Let a function's variables have the values afterwards that they have now."""
    values = [(variable, variable.read_value()) for variable in function.graph.variables]
    try:
        yield
    finally:
        for variable, value in values:
            with contextlib.suppress(AttributeError):  # one that is read only
                variable.assign(value)


# -- the same function without random numbers ------------------------------------------------------

#: Ops whose first input is the shape of what they draw.
_DRAWS = re.compile(
    r"(Stateless)?(RandomUniform|RandomStandardNormal|RandomNormal|TruncatedNormal"
    r"|RandomUniformFullInt|RandomUniformInt)(V2)?"
)
_SHUFFLES = ("RandomShuffle", "StatelessShuffle")
#: Others that draw: what they draw cannot be replaced without knowing more of each.
_OTHER_DRAWS = re.compile(r"Multinomial|Gamma|Poisson|Binomial|Parameterized|RandomDataset")


def _without_randomness(wrapper: Any) -> Callable[..., Any] | None:
    """Return a traced function that draws a constant; None: it draws in a way not known here."""
    function = wrapper.function
    definition = function.graph.as_graph_def()
    bodies = [definition.node, *(each.node_def for each in definition.library.function)]
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
    """Let every op of a graph or a function that draws give a constant, in place."""
    constants = []
    for node in body:
        if node.op in _SHUFFLES:
            kind = node.attr["T"].type
            replaced = node_def_pb2.NodeDef(name=node.name, op="Identity", input=node.input[:1])
            replaced.attr["T"].type = kind
            node.CopyFrom(replaced)
        elif _DRAWS.fullmatch(node.op):
            kind = (node.attr["Tout"] if "Tout" in node.attr else node.attr["dtype"]).type
            of_shape = (node.attr["Tshape"] if "Tshape" in node.attr else node.attr["T"]).type
            value = node_def_pb2.NodeDef(name=f"{node.name}_drawn", op="Const")
            value.attr["dtype"].type = kind
            if "UniformInt" in node.op:  # the lowest number that it may draw
                lowest = node.input[-2 if not node.input[-1].startswith("^") else -3]
            else:
                tensor = tf.make_tensor_proto(0.5 if tf.DType(kind).is_floating else 1, dtype=kind)
                value.attr["value"].tensor.CopyFrom(tensor)
                constants.append(value)
                lowest = value.name + suffix
            replaced = node_def_pb2.NodeDef(
                name=node.name, op="Fill", input=[node.input[0], lowest]
            )
            replaced.attr["T"].type, replaced.attr["index_type"].type = kind, of_shape
            node.CopyFrom(replaced)
    body.extend(constants)


def _rename_functions(definition: graph_pb2.GraphDef) -> None:
    """Give a graph's functions other names: TensorFlow knows those of the script already."""
    names = {each.signature.name for each in definition.library.function}
    other = {name: f"{name}_{id(definition)}_drawn" for name in names}
    bodies = [definition.node, *(each.node_def for each in definition.library.function)]
    for node in (node for body in bodies for node in body):
        node.op = other.get(node.op, node.op)
        for value in node.attr.values():
            called = value.list.func if value.HasField("list") else []
            for one in (*([value.func] if value.HasField("func") else []), *called):
                one.name = other.get(one.name, one.name)
    for function in definition.library.function:
        function.signature.name = other[function.signature.name]
    del definition.library.gradient[:]


def _imported(definition: graph_pb2.GraphDef, function: Any) -> Callable[..., Any]:
    """Return a graph as a function of the inputs of another, whose captures it takes over."""
    inputs, outputs = function.graph.inputs, function.graph.outputs

    def body(*tensors: Any) -> Any:
        by_name = {each.name: tensor for each, tensor in zip(inputs, tensors, strict=True)}
        names = [each.name for each in outputs]
        return tf.graph_util.import_graph_def(
            definition, input_map=by_name, return_elements=names, name="drawn"
        )

    specs = [tf.TensorSpec(each.shape, each.dtype) for each in inputs]
    wrapped = tf.compat.v1.wrap_function(body, specs)
    return lambda *tensors: wrapped(*tensors, *function.captured_inputs)
