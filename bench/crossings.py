"""What crosses between host and device in an exchange, counted; it needs no GPU.

    python -m bench.crossings

Gradients and residuals live on a device of their own: a second logical processor of TensorFlow, or
a GPU where there is one. Counted are copies of a tensor to the host, arrays that become tensors,
and transfers to the host within graphs (`_Send` nodes of their partitions). It exits with
1 where more crosses than what is sent.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from thinwire.ops.codecs.base import EncodeContext
from thinwire.ops.codecs.registry import CodecChoices, build_codec
from thinwire.ops.types import ModelSpec, TensorSpec

SHAPES = ((1024, 512), (512,), (512, 100), (100,))
RATE = 0.01
_WARM = 3  # steps before what is counted: the graphs are made
_DOWN, _UP = 16, 32  # bytes an entry: position, value and what it is coded as; where it is cleared
_REST = 200  # numbers, flags
CODECS = {
    "topk": {"error_feedback": True},
    "gd": {},
    "dgs": {},
    "dgc": {"warmup_epochs": 0},
    "random_k": {"error_feedback": True},
    "powersgd": {},
}


@dataclasses.dataclass
class Counts:
    """Bytes of one exchange, and transfers within graphs."""

    down: int = 0  # to the host
    up: int = 0  # to the device
    inside: int = 0  # to the host, in the graphs that were made


@contextlib.contextmanager
def graphs_made(where: str, counts: Counts) -> Iterator[None]:
    """Count the floats that leave a device in graphs that run first meanwhile; flags may."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    context.context().enable_run_metadata()
    yield
    trace = context.context().export_run_metadata()
    context.context().disable_run_metadata()
    for graph in (part for each in trace.function_graphs for part in each.partition_graphs):
        for node in graph.node:
            leaves = node.op == "_Send" and node.attr["send_device"].s.decode().endswith(where[1:])
            is_data = node.attr["T"].type == tf.float32.as_datatype_enum
            counts.inside += leaves and is_data and "/ctrl/" not in node.input[0]


@contextlib.contextmanager
def copies(counts: Counts) -> Iterator[None]:
    """Count the bytes that are copied meanwhile."""
    import tensorflow as tf
    from tensorflow.python.framework import constant_op

    tensor = next(each for each in type(tf.constant(0)).__mro__ if "_numpy" in vars(each))
    fetch, place = tensor._numpy, constant_op.convert_to_eager_tensor

    def fetched(self: Any) -> Any:
        array = fetch(self)
        counts.down += np.asarray(array).nbytes
        return array

    def placed(value: Any, *given: Any, **named: Any) -> Any:
        if isinstance(value, np.ndarray):
            counts.up += value.nbytes
        return place(value, *given, **named)

    tensor._numpy, constant_op.convert_to_eager_tensor = fetched, placed
    try:
        yield
    finally:
        tensor._numpy, constant_op.convert_to_eager_tensor = fetch, place


def device() -> str:
    """Return the name of a device that is not the host's, before TensorFlow has begun."""
    import tensorflow as tf

    tf.config.set_soft_device_placement(False)
    if tf.config.list_physical_devices("GPU"):
        return "/GPU:0"
    (processor,) = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(processor, two)
    return "/CPU:1"


def exchange(name: str, where: str) -> tuple[Counts, int, int]:
    """Encode gradients on a device; return the counts, the bytes sent and the gradient's."""
    import tensorflow as tf

    from thinwire.ops.kernels import load_kernels
    from thinwire.ops.kernels.device import DeviceArray

    bodies, rng = load_kernels("tf"), np.random.default_rng(0)
    spec = ModelSpec(tuple(TensorSpec(str(n), shape) for n, shape in enumerate(SHAPES)))
    choices = CodecChoices(compression_rate=RATE, **CODECS[name])
    codec = build_codec(name, choices, nb_workers=4)
    counts = Counts()
    with tf.device(where), graphs_made(where, counts):
        state = codec.init(spec, bodies)
        for step in range(1, _WARM + 2):
            drawn = [rng.standard_normal(tensor.size, np.float32) for tensor in spec.tensors]
            gradient = [DeviceArray(each) for each in drawn]
            context = EncodeContext(step, 0.1, np.random.default_rng(step), bodies, epoch=1.0)
            with copies(counts) if step > _WARM else contextlib.nullcontext():
                packet, state = codec.encode(gradient, state, context)
    for array in device_arrays(state, DeviceArray):
        if not array.value.device.endswith(where[1:]):
            raise RuntimeError(f"a residual of {name} lies on {array.value.device}, not {where}")
    entries = sum(block.values.data.size for block in packet.blocks)
    return counts, entries, sum(tensor.size for tensor in spec.tensors)


def device_arrays(state: Any, kind: type) -> Iterator[Any]:
    """Yield the arrays of a state that live on a device."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list | tuple):
        for each in state:
            yield from device_arrays(each, kind)
    elif isinstance(state, kind):
        yield state


def hop(where: str) -> int:
    """Return the transfers counted in a graph that has one to the host."""
    import tensorflow as tf

    @tf.function
    def both(x: Any) -> Any:
        with tf.device("/CPU:0"):
            there = x + 1.0
        with tf.device(where):
            return there * 2.0

    counts = Counts()
    with tf.device(where), graphs_made(where, counts):
        both(tf.zeros(8))
    return counts.inside


def main() -> int:
    argparse.ArgumentParser(prog="python -m bench.crossings", description=__doc__).parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    where, failed = device(), False
    control = hop(where)
    sys.stdout.write(f"{where}; a graph with a transfer to the host counts {control}\n")
    for name in CODECS:
        counts, entries, size = exchange(name, where)
        failed |= counts.inside > 0
        failed |= counts.down > _DOWN * entries + _REST or counts.up > _UP * entries + _REST
        sys.stdout.write(
            f"{name:9} {entries:6} entries sent; to the host {counts.down:7} B, to the device "
            f"{counts.up:7} B, gradient {4 * size} B, transfers in graphs {counts.inside}\n"
        )
    return 1 if failed or control != 1 else 0


if __name__ == "__main__":
    sys.exit(main())
