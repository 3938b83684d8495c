"""Converts evaluations (metrics by name) and shard layouts to messages and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from thinwire.ops.types import ModelSpec, ShardLayout, Slice
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed

#: Largest number of entries of an array metric that become separate numbered metrics.
_MOST_ENTRIES = 100


def encode_metrics(logs: Mapping[str, Any]) -> list[pb.Metric]:
    """Return the result of Keras' `evaluate` as messages, without values that are not numeric.

    Args:
        logs: Value of each metric by name: a number or an array of any shape.
    """
    metrics = []
    for name, value in logs.items():
        try:
            array = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            continue
        metrics.append(pb.Metric(name=name, values=array.ravel().tolist(), shape=array.shape))
    return metrics


def decode_metrics(metrics: Iterable[pb.Metric]) -> dict[str, Any]:
    """Return metrics by name: a float for a number, else a float32 array of the original shape.

    >>> decode_metrics(encode_metrics({"loss": 0.5, "f1": np.array([0.0, 1.0])}))
    {'loss': 0.5, 'f1': array([0., 1.], dtype=float32)}
    """
    return {
        metric.name: np.array(metric.values, np.float32).reshape(metric.shape)
        if metric.shape
        else float(metric.values[0])
        for metric in metrics
    }


def numbers_of(metrics: Iterable[pb.Metric]) -> dict[str, float]:
    """Return metrics as single numbers by name; array entries get numbered names.

    >>> numbers_of(encode_metrics({"loss": 0.5, "f1": np.array([0.0, 1.0])}))
    {'loss': 0.5, 'f1_0': 0.0, 'f1_1': 1.0}
    >>> numbers_of(encode_metrics({"f1": np.array([0.5])}))
    {'f1': 0.5}
    """
    numbers: dict[str, float] = {}
    for metric in metrics:
        if len(metric.values) != 1:
            values = list(metric.values)[:_MOST_ENTRIES]
            numbers |= {f"{metric.name}_{number}": value for number, value in enumerate(values)}
        else:
            numbers[metric.name] = metric.values[0]
    return numbers


def encode_layouts(layouts: Iterable[ShardLayout]) -> list[pb.Layout]:
    """Return the layouts of shards (the variable slices that each shard stores) as messages."""
    return [
        pb.Layout(
            variables=[piece.tensor for piece in layout.slices],
            starts=[piece.start for piece in layout.slices],
            stops=[piece.stop for piece in layout.slices],
        )
        for layout in layouts
    ]


def decode_layouts(layouts: Sequence[pb.Layout], spec: ModelSpec) -> tuple[ShardLayout, ...]:
    """Return the layouts of all shards (the slices each shard stores), checked against the model.

    Args:
        layouts: Messages with the layouts (stored slices of variables) of all shards.
        spec: Model whose variables the shards hold.

    Raises:
        Malformed: The layouts do not cover every entry of the model exactly once.
    """
    result, sizes = [], [tensor.size for tensor in spec.tensors]
    for layout in layouts:
        if not len(layout.variables) == len(layout.starts) == len(layout.stops):
            raise Malformed("the variables, starts and stops of a shard layout differ in length")
        rows = zip(layout.variables, layout.starts, layout.stops, strict=True)
        result.append(ShardLayout(tuple(Slice(*row) for row in rows)))
    pieces = sorted(
        (piece.tensor, piece.start, piece.stop) for layout in result for piece in layout.slices
    )
    # The slices of a variable, sorted by start, must follow each other without a gap or an overlap.
    ends = [0] * len(sizes)
    for tensor, start, stop in pieces:
        if tensor >= len(sizes) or start != ends[tensor] or stop < start:
            raise Malformed("the shard layouts belong to another model")
        ends[tensor] = stop
    if ends != sizes:
        raise Malformed("the shard layouts belong to another model")
    return tuple(result)
