"""Describes how tf.data transformations (map, batch, ...) change order and number of elements.

TensorFlow keeps each transformation of a dataset as an object of a private class, with its input
and arguments (as of tensorflow 2.21, which this package requires). This module identifies tf.data
transformations by the names of TensorFlow's private classes. A tf.data transformation that this
module does not list is rejected, because its elements may differ between workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.data.ops import dataset_ops, ragged_batch_op, snapshot_op, unbatch_op
from tensorflow.python.data.util import structure
from tensorflow.python.framework import op_def_registry

Pipeline = Any  # type of a tf.data.Dataset: TensorFlow has no type annotations

#: TensorFlow module that contains the default reader function of `Dataset.load`.
_LOAD_MODULE = "tensorflow.python.data.ops.load_op"
_DETERMINISTIC: Mapping[str, bool | None] = {"default": None, "true": True, "false": False}
#: Cycle length of an `interleave` for which the script gives none. TensorFlow's default would be
#: the number of CPU cores, which may differ between workers.
_CYCLE_LENGTH = 8


def name_of(dataset: Pipeline) -> str:
    """Return the class name of a dataset's last transformation."""
    return type(dataset).__name__


def inputs_of(dataset: Pipeline) -> list[Pipeline]:
    """Return the datasets that are the inputs of a dataset's last transformation."""
    return list(dataset._inputs())


def shapes_of(dataset: Pipeline) -> list[tf.TensorShape]:
    """Return the shapes of a dataset's element components, without components that are None."""
    specs = tf.nest.flatten(dataset.element_spec)
    return [spec.shape for spec in specs if not isinstance(spec, tf.NoneTensorSpec)]


def _again(wrapper: Any) -> Callable[..., Any]:
    """Return a tf.data transformation's traced function, for use in a rebuilt transformation.

    The function that `_again` returns calls the trace that the script's dataset already has. A
    second trace of the script's Python function would read Python variables that may have changed
    since the script built its dataset.
    """
    takes_tuple = type(wrapper._input_structure) is tuple

    def call(*element: Any) -> Any:
        whole = element if takes_tuple else element[0]
        tensors = structure.to_tensor_list(wrapper._input_structure, whole)
        results = wrapper.function(*tensors)
        return structure.from_compatible_tensor_list(wrapper.output_structure, list(results))

    converted: Callable[..., Any] = tf.autograph.experimental.do_not_convert(call)
    return converted


def _mapped(node: Pipeline, source: Pipeline, in_order: bool) -> Pipeline:
    return source.map(_again(node._map_func), **_parallelism(node, in_order))


def _interleaved(node: Pipeline, source: Pipeline, in_order: bool) -> Pipeline:
    cycle = int(node._cycle_length)
    return source.interleave(
        _again(node._map_func),
        cycle_length=_CYCLE_LENGTH if in_order and cycle < 0 else cycle,
        block_length=node._block_length,
        **_parallelism(node, in_order),
    )


def _parallelism(node: Pipeline, in_order: bool) -> dict[str, Any]:
    """Return the arguments for rebuilding a tf.data transformation that are for a parallel one."""
    if not hasattr(node, "_num_parallel_calls"):
        return {}
    order = True if in_order else _order(node)
    return {"num_parallel_calls": node._num_parallel_calls, "deterministic": order}


def _order(node: Pipeline) -> bool | None:
    """Return the argument `deterministic` of a parallel tf.data transformation."""
    deterministic = getattr(node, "_deterministic", None)
    if deterministic is None:
        return _attribute(node, "deterministic")
    return _DETERMINISTIC[deterministic]


def _attribute(node: Pipeline, name: str) -> bool | None:
    """Return an attribute that only the graph node of a transformation has; else the default."""
    graph = _graph_of(node)
    if graph is None:
        return False
    last = [entry for entry in graph.node if name in entry.attr][-1]
    return _DETERMINISTIC[last.attr[name].s.decode()]


def _graph_of(node: Pipeline) -> Any:
    """Return the graph of a pipeline; None if a part of the pipeline cannot be serialized."""
    try:
        return graph_pb2.GraphDef.FromString(node._as_serialized_graph().numpy())
    except tf.errors.OpError:
        return None


#: Maps the class name of a transformation to a function of (transformation, new input, True for a
#: fixed order) that returns the transformation on the new input. These transformations turn parts
#: of their input into parts of their output, in any order.
_REBUILD: dict[str, Callable[[Pipeline, Pipeline, bool], Pipeline]] = {
    "_MapDataset": _mapped,
    "_ParallelMapDataset": _mapped,
    "_FilterDataset": lambda node, source, _: source.filter(_again(node._predicate)),
    "_FlatMapDataset": lambda node, source, _: source.flat_map(_again(node._map_func)),
    "_InterleaveDataset": _interleaved,
    "_ParallelInterleaveDataset": _interleaved,
    "ParallelInterleaveDataset": lambda node, source, _: source.apply(
        tf.data.experimental.parallel_interleave(
            _again(node._map_func), node._cycle_length, node._block_length
        )
    ),
    "_PrefetchDataset": lambda node, source, _: source.prefetch(int(node._buffer_size)),
    "_OptionsDataset": lambda node, source, _: source.with_options(node.options()),
    "_RepeatDataset": lambda node, source, _: source.repeat(node._count),
    "_IgnoreErrorsDataset": lambda node, source, _: source.ignore_errors(),
    # Drop the assertion of the number of elements, because a worker's part has fewer elements.
    "_AssertCardinalityDataset": lambda node, source, _: source,
    "_RestructuredDataset": lambda node, source, _: dataset_ops._RestructuredDataset(
        source, node.element_spec
    ),
    "_UnbatchDataset": lambda node, source, _: unbatch_op._UnbatchDataset(source),
    "_DenseToRaggedDataset": lambda node, source, _: ragged_batch_op._DenseToRaggedDataset(
        source, tf.int64
    ),
}
#: Maps the class name of a transformation that needs its whole input, not a part, to a function of
#: (transformation, new input) that returns the transformation on the new input.
_REBUILD_WHOLE: dict[str, Callable[[Pipeline, Pipeline], Pipeline]] = {
    "_TakeDataset": lambda node, source: source.take(node._count),
    "_SkipDataset": lambda node, source: source.skip(node._count),
    "_WindowDataset": lambda node, source: source.window(
        node._size, node._shift, node._stride, node._drop_remainder
    ),
}
#: Class names of transformations that need a different seed or file on each worker, or that have
#: several inputs (zip).
SHUFFLE, CACHE, ZIP = "_ShuffleDataset", "CacheDataset", "_ZipDataset"
_CHOICE = "_DirectedInterleaveDataset"
BATCHES = ("_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset")
_MAPS = ("_MapDataset", "_ParallelMapDataset")
REPEAT, SNAPSHOT = "_RepeatDataset", "_SnapshotDataset"
#: Class names of transformations that replay the elements of their first pass in later passes.
KEEPING = (CACHE, SNAPSHOT)
#: Class names of transformations that make one output element of each input element, in order.
_ONE_TO_ONE = (
    *_MAPS,
    "_PrefetchDataset",
    "_OptionsDataset",
    "_RestructuredDataset",
    "_DenseToRaggedDataset",
    CACHE,
)
#: Class names of transformations that make any number of elements of each element.
_FLATTENING = (
    "_FlatMapDataset",
    "_InterleaveDataset",
    "_ParallelInterleaveDataset",
    "ParallelInterleaveDataset",
)


def is_one_to_one(node: Pipeline) -> bool:
    """Return True if a tf.data transformation's k-th output depends only on its k-th input."""
    return name_of(node) in _ONE_TO_ONE


def changes_elements(node: Pipeline) -> bool:
    """Return True if a tf.data transformation's outputs are not single elements of its input."""
    return name_of(node) in ("_UnbatchDataset", *_FLATTENING)


def has_functions(node: Pipeline) -> bool:
    """Return True if a tf.data transformation has a function traced for a fixed element shape."""
    return name_of(node) in (*_MAPS, "_FilterDataset", SNAPSHOT)


def may_drop(node: Pipeline) -> bool:
    """Return True if a tf.data transformation may drop elements by their content (`filter`)."""
    return name_of(node) in ("_FilterDataset", "_IgnoreErrorsDataset")


def keep_elements(nodes: Sequence[Pipeline]) -> bool:
    """Return True if a transformation in a list replays elements, as a cache does."""
    return any(name_of(node) in KEEPING for node in nodes)


def is_map(node: Pipeline) -> bool:
    """Return True if a tf.data transformation is a `map`."""
    return name_of(node) in _MAPS


def repeats(node: Pipeline) -> int:
    """Return how often a `repeat` transformation repeats its input; -1 means without end."""
    count = int(node._count)
    return count if count >= 0 else -1


def has_batches(node: Pipeline) -> bool:
    """Return True if a pipeline contains a tf.data transformation that makes batches."""
    return name_of(node) in BATCHES or any(has_batches(source) for source in inputs_of(node))


def are_equally_long(node: Pipeline) -> bool:
    """Return True if all inputs of a tf.data transformation have one known number of elements."""
    lengths = {int(source.cardinality()) for source in inputs_of(node)}
    return len(lengths) == 1 and tf.data.UNKNOWN_CARDINALITY not in lengths


def first_element(node: Pipeline) -> Any:
    """Return one output element of a tf.data transformation; None if it has no output.

    `first_element` reads the element without the pipeline's shuffles and caches, so that the
    script's later passes over the data do not change. Reading through a shuffle would change its
    next order, and a cache would store the element.

    Raises:
        tf.errors.OpError: Reading the elements of the pipeline fails.
    """
    passed_by = _passed_by(node)
    return None if passed_by is None else next(iter(passed_by.take(1)), None)


def _passed_by(node: Pipeline) -> Pipeline | None:
    """Return a tf.data transformation without shuffles and caches before it; else None."""
    sources = inputs_of(node)
    if name_of(node) in (SHUFFLE, CACHE):
        return _passed_by(sources[0])
    parts = [_passed_by(dataset) for dataset in sources]
    if all(part is source for part, source in zip(parts, sources, strict=True)):
        return node
    if any(part is None for part in parts):
        return None
    if name_of(node) == ZIP:
        return tf.data.Dataset.zip(tf.nest.pack_sequence_as(node._datasets, parts))
    if name_of(node) == _CHOICE:
        return tf.data.Dataset.choose_from_datasets(parts[1:], parts[0])
    if len(sources) == 1 and is_rebuilt_whole(node):
        return rebuild(node, parts[0], 1, in_order=True)
    return None


def commutes(node: Pipeline) -> bool:
    """Return True if a tf.data node turns a part of its input into that part of its output."""
    return name_of(node) in _REBUILD or name_of(node) in (SHUFFLE, *KEEPING, *BATCHES)


def is_rebuilt_whole(node: Pipeline) -> bool:
    """Return True if `rebuild` can rebuild a tf.data transformation on a new input."""
    return commutes(node) or name_of(node) in _REBUILD_WHOLE


def seed_of(node: Pipeline) -> int | None:
    """Return the seed of a shuffle; None if a tf.data transformation has no seed."""
    return int(node._seed2) if _is_seeded(node) else None


def reshuffles(node: Pipeline) -> bool:
    """Return True if a shuffle draws a new order in each iteration."""
    return bool(node._reshuffle_each_iteration)


def rebuild(
    node: Pipeline,
    source: Pipeline,
    worker: int,
    batch_size: int | None = None,
    seed: int | None = None,
    in_order: bool = False,
) -> Pipeline:
    """Return a tf.data transformation, rebuilt on a new input.

    Args:
        node: tf.data transformation to rebuild, for which `is_rebuilt_whole` is True. If the new
            input is a part of its former input, `commutes` is True for the transformation.
        source: Dataset that becomes the input of the rebuilt tf.data transformation.
        worker: Number of the worker, which is added to the names of cache files.
        batch_size: New batch size in rows, if the transformation makes batches; None: keep the
            batch size.
        seed: Seed of the shuffle's order, if the transformation is a shuffle; None: the shuffle
            gets no seed.
        in_order: True to fix an order that is the same on every worker.
    """
    name = name_of(node)
    if name in _REBUILD_WHOLE:
        return _REBUILD_WHOLE[name](node, source)
    if name == SHUFFLE:
        reshuffle = node._reshuffle_each_iteration
        return source.shuffle(node._buffer_size, seed, reshuffle_each_iteration=reshuffle)
    if name == CACHE:
        file = node._filename.numpy().decode()
        return source.cache(f"{file}-worker-{worker}" if file else "")
    if name == SNAPSHOT:
        return snapshot_op._SnapshotDataset(
            source,
            f"{node._path}-worker-{worker}",
            _again(node._shard_func),
            node._compression,
            _again(node._reader_func),
        )
    if name in BATCHES:
        return _batched(node, source, batch_size or size_of_batch(node), in_order)
    return _REBUILD[name](node, source, in_order)


def size_of_batch(node: Pipeline) -> int:
    """Return the number of rows in a full batch of a batching transformation."""
    return int(node._batch_size.numpy())


def drops_remainder(node: Pipeline) -> bool:
    """Return True if a batching transformation drops a last batch that is not full."""
    return bool(node._drop_remainder.numpy())


def _batched(node: Pipeline, source: Pipeline, batch_size: int, in_order: bool) -> Pipeline:
    drop = drops_remainder(node)
    if name_of(node) == "_PaddedBatchDataset":
        return source.padded_batch(batch_size, node._padded_shapes, node._padding_values, drop)
    return source.batch(batch_size, drop_remainder=drop, **_parallelism(node, in_order))


def _is_seeded(node: Pipeline) -> bool:
    return hasattr(node, "_seed2") and bool(int(node._seed) or int(node._seed2))


# -- checks that every worker gets the same elements in the same order -----------------------------

#: Class names of transformations whose output order depends only on the order of their inputs.
#: Transformations that `rebuild` can rebuild keep the order as well, if `_CHECKS` has no check.
_KEEP_ORDER = (
    "_TensorSliceDataset",
    "_TensorDataset",
    "_SparseTensorSliceDataset",
    "_RangeDataset",
    "TextLineDatasetV2",
    "FixedLengthRecordDatasetV2",
    "CsvDatasetV2",
    "_RebatchDataset",
    "_LegacyRebatchDataset",
    "_ConcatenateDataset",
    "_ShardDataset",
    "_UniqueDataset",
    ZIP,
    _CHOICE,
)
#: Class names of transformations whose order is fixed if their functions are pure.
_NEED_PURE_FUNCTIONS = (
    *_FLATTENING,
    "_FilterDataset",
    "_TakeWhileDataset",
    "_ScanDataset",
    "_GroupByWindowDataset",
)
#: Ops that TensorFlow marks as stateful, but whose result depends only on their inputs.
_PURE_OPS = (
    "Assert",
    "Case",
    "If",
    "While",
    "PrintV2",
    "PartitionedCall",
    "StatefulPartitionedCall",
    "ReadVariableOp",
    "_Retval",
    "LookupTableFindV2",
    "LookupTableSizeV2",
    "DummyMemoryCache",
    "TFRecordDataset",
    "TFRecordDatasetV2",
    "TensorDataset",
    "TensorSliceDataset",
    "SparseTensorSliceDataset",
    "RangeDataset",
    "TextLineDataset",
    "FixedLengthRecordDatasetV2",
    "CSVDatasetV2",
)


def has_open_order(node: Pipeline, whole: Pipeline) -> bool:
    """Return True if a tf.data transformation's order may vary but `rebuild` can fix it.

    The order of a shuffle may vary, because it depends on the number of earlier iterations.

    Args:
        node: tf.data transformation whose order of elements is checked.
        whole: The dataset that contains the transformation and sets its tf.data options.
    """
    unordered = whole.options().deterministic is False
    name = name_of(node)
    return name == SHUFFLE or (name in _WITH_OPEN_ORDER and bool(_CHECKS[name](node, unordered)))


def why_unsure(node: Pipeline, whole: Pipeline) -> str:
    """Return why the elements of a dataset may differ between workers; "" if they are equal.

    The check of a tf.data transformation assumes that the script has the same arrays and files on
    every worker.

    Args:
        node: tf.data transformation whose output must be equal on all workers.
        whole: The dataset that contains the transformation and sets its tf.data options.
    """
    unordered = whole.options().deterministic is False
    return next(filter(None, _reasons(node, unordered)), "")


def _reasons(node: Pipeline, unordered: bool) -> Iterator[str]:
    """Yield why elements of a tf.data transformation or its inputs may vary, from the source on."""
    if name_of(node) == "DatasetV1Adapter":
        yield from _reasons(node._dataset, unordered)
        return
    for source in inputs_of(node):
        yield from _reasons(source, unordered)
    yield _reason(node, unordered)


def _reason(node: Pipeline, unordered: bool) -> str:
    name = name_of(node)
    needs_pure = name in _NEED_PURE_FUNCTIONS
    for function in node._functions() if needs_pure else ():
        if reason := _impure(function.function.graph.as_graph_def()):
            return f"{plain_name(node)} calls a function with {reason}"
    if name in _CHECKS:
        return _CHECKS[name](node, unordered)
    is_known = needs_pure or name in _KEEP_ORDER or is_rebuilt_whole(node)
    return "" if is_known else f"{plain_name(node)} may give any order"


def bodies_of(graph: Any) -> list[Any]:
    """Return the lists of nodes of a graph: of the graph itself, then of each of its functions."""
    return [graph.node, *(function.node_def for function in graph.library.function)]


def _impure(graph: Any) -> str:
    """Return the name of an op in a graph whose result may vary between calls, or ""."""
    functions = {function.signature.name for function in graph.library.function}
    for node in (node for body in bodies_of(graph) for node in body):
        definition = op_def_registry.get(node.op)
        if node.op == "GeneratorDataset":
            return "a Python generator"
        if node.op.startswith("Shuffle") or node.op == "DummySeedGenerator":
            return "a shuffle in it"
        stateful = definition is None or definition.is_stateful
        if stateful and not (node.op in _PURE_OPS or node.op in functions):
            return f"{node.op} in it"
        if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
            return "deterministic=False in it"
    return ""


def plain_name(node: Pipeline) -> str:
    """Return the name of a tf.data transformation for messages, for example ``ParallelMap``."""
    return name_of(node).removeprefix("_").removesuffix("V2").removesuffix("Dataset")


def _seeds(node: Pipeline, unordered: bool) -> str:
    name = "a shuffle" if name_of(node) == SHUFFLE else plain_name(node)
    return "" if _is_seeded(node) else f"{name} has no seed"


def _parallel(node: Pipeline, unordered: bool) -> str:
    chosen = _order(node)
    is_open = unordered if chosen is None else not chosen
    return f"{plain_name(node)} is not deterministic" if is_open else ""


def _cycle(node: Pipeline, unordered: bool) -> str:
    if int(node._cycle_length) < 0:
        return "interleave has no cycle_length, so that its order depends on the machine"
    if hasattr(node, "_num_parallel_calls") and _parallel(node, unordered):
        return "interleave is not deterministic"
    return ""


def _records(node: Pipeline, unordered: bool) -> str:
    reads = node._num_parallel_reads
    if reads is None or (int(reads) >= 0 and node.options().deterministic is not False):
        return ""
    return "TFRecordDataset reads in parallel, in an order that depends on the machine"


def _loaded(node: Pipeline, unordered: bool) -> str:
    """Return why `Dataset.load` may read its file shards in varying order, or ""."""
    reader = node._reader_func
    is_default = getattr(reader._func, "__module__", "") == _LOAD_MODULE
    if is_default and len(tf.io.gfile.glob(f"{node._path}/*/*/")) > 1:
        return (
            "load reads several shards, as many at the same time as this machine has processors; "
            "give it a reader_func such as "
            "lambda shards: shards.interleave(lambda x: x, cycle_length=8)"
        )
    reason = _impure(reader.function.graph.as_graph_def())
    if not reason and unordered and not is_default:
        reason = "the option deterministic=False"
    return f"load calls a reader_func with {reason}" if reason else ""


def _graph(node: Pipeline, unordered: bool) -> str:
    """Return why the elements of a dataset, made from its serialized graph, may vary, or ""."""
    graph = _graph_of(node)
    return "a dataset of unknown origin may give any order" if graph is None else _impure(graph)


_CHECKS: Mapping[str, Callable[[Pipeline, bool], str]] = {
    SHUFFLE: _seeds,
    "_RandomDataset": _seeds,
    "_ParallelMapDataset": _parallel,
    "_ParallelBatchDataset": _parallel,
    "_InterleaveDataset": _cycle,
    "_ParallelInterleaveDataset": _cycle,
    "ParallelInterleaveDataset": _parallel,
    "TFRecordDatasetV2": _records,
    "_VariantDataset": _graph,
    "_LoadDataset": _loaded,
    # each worker writes only its part to a file
    SNAPSHOT: lambda node, unordered: "snapshot keeps files that workers must not share",
}
#: Class names of transformations whose order may vary but can be fixed by `rebuild`.
_WITH_OPEN_ORDER = (
    "_ParallelMapDataset",
    "_ParallelBatchDataset",
    "_InterleaveDataset",
    "_ParallelInterleaveDataset",
)
