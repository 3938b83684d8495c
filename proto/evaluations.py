"""Evaluations and layouts as messages: metrics by name, and what each shard holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from thinwire.ops.types import ModelSpec, ShardLayout, Slice
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed

#: Entries of an array that become metrics of their own.
_MOST_ENTRIES = 100


def encode_metrics(logs: Mapping[str, Any]) -> list[pb.Metric]:
    """Return what Keras' evaluate returns as messages; what is no number or array is left out."""
    found = []
    for name, value in logs.items():
        try:
            array = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            continue
        found.append(pb.Metric(name=name, values=array.ravel().tolist(), shape=array.shape))
    return found


def decode_metrics(metrics: Iterable[pb.Metric]) -> dict[str, Any]:
    """Return metrics by name: a float, or an array as Keras has it, float32.

    >>> decode_metrics(encode_metrics({"loss": 0.5, "f1": np.array([0.0, 1.0])}))
    {'loss': 0.5, 'f1': array([0., 1.], dtype=float32)}
    """
    return {
        each.name: np.array(each.values, np.float32).reshape(each.shape)
        if each.shape
        else float(each.values[0])
        for each in metrics
    }


def numbers_of(metrics: Iterable[pb.Metric]) -> dict[str, float]:
    """Return metrics by name where each is one number; entries of longer arrays are numbered.

    >>> numbers_of(encode_metrics({"loss": 0.5, "f1": np.array([0.0, 1.0])}))
    {'loss': 0.5, 'f1_0': 0.0, 'f1_1': 1.0}
    >>> numbers_of(encode_metrics({"f1": np.array([0.5])}))
    {'f1': 0.5}
    """
    found: dict[str, float] = {}
    for each in metrics:
        if len(each.values) != 1:
            values = list(each.values)[:_MOST_ENTRIES]
            found |= {f"{each.name}_{number}": value for number, value in enumerate(values)}
        else:
            found[each.name] = each.values[0]
    return found


def encode_layouts(layouts: Iterable[ShardLayout]) -> list[pb.Layout]:
    """Return what each shard holds as messages."""
    return [
        pb.Layout(
            variables=[piece.tensor for piece in layout.slices],
            starts=[piece.start for piece in layout.slices],
            stops=[piece.stop for piece in layout.slices],
        )
        for layout in layouts
    ]


def decode_layouts(layouts: Sequence[pb.Layout], spec: ModelSpec) -> tuple[ShardLayout, ...]:
    """Return what each shard holds.

    Args:
        layouts: Of all shards.
        spec: The model that they are of.

    Raises:
        Malformed: They are of another model.
    """
    found, sizes = [], [tensor.size for tensor in spec.tensors]
    for layout in layouts:
        if not len(layout.variables) == len(layout.starts) == len(layout.stops):
            raise Malformed("a layout of unequal lists")
        rows = zip(layout.variables, layout.starts, layout.stops, strict=True)
        found.append(ShardLayout(tuple(Slice(*row) for row in rows)))
    pieces = sorted(
        (piece.tensor, piece.start, piece.stop) for layout in found for piece in layout.slices
    )
    ends = [0] * len(sizes)
    for tensor, start, stop in pieces:
        if tensor >= len(sizes) or start != ends[tensor] or stop < start:
            raise Malformed("a layout of another model")
        ends[tensor] = stop
    if ends != sizes:
        raise Malformed("a layout of another model")
    return tuple(found)
