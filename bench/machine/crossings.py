"""Count the bytes that an exchange copies between host and device; needs no GPU.

    python -m bench.machine.crossings
    python -m bench.machine.crossings --backend jax

With `--backend jax` or `--backend torch`, `bench/machine/crossings_elsewhere.py` counts what the
kernels of that framework copy. What follows is of TensorFlow.

Model, gradients and residuals are on a separate device: a GPU if the machine has one, else a second
logical CPU of TensorFlow. The program counts copies of tensors to the host, arrays that become
tensors, and transfers to the host within graphs (`_Send` nodes of the graphs' partitions). It runs
the codecs alone, then rounds of whole workers with their local steps, from the model's variables to
the weights in the reply. The exit code is 1 if more bytes are copied than an exchange sends and
receives.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from thinwire.ops.codecs.base import EncodeContext
from thinwire.ops.codecs.registry import build_codec
from thinwire.ops.downlink.types import Operation
from thinwire.ops.types import Block, CodedValues, ModelSpec, TensorSpec
from thinwire.worker.core.messages import ShardReply

SHAPES = ((1024, 512), (512,), (512, 100), (100,))
SPEC = ModelSpec(tuple(TensorSpec(str(n), shape) for n, shape in enumerate(SHAPES)))
RATE = 0.01
WARM = 3  # uncounted steps, in which TensorFlow traces the graphs
# Bytes per pushed entry. To the host: position, value and coded form. To the device: the positions
# at which the residual is cleared.
DOWN, _UP = 16, 32
_WHOLE = 4.1  # bytes per entry of a dense push: a float32, and the scores of the blocks
_REST = 200  # bytes of numbers and flags in each step
_REPLY = 12  # bytes per entry of a reply: position and value
LOCAL_STEPS = 4
CODECS = {
    "topk": {"error_feedback": True},
    "gd": {},
    "dgs": {},
    "dgc": {"warmup_epochs": 0},
    "random_k": {"error_feedback": True},
    "powersgd": {},
}


@dataclasses.dataclass(frozen=True)
class WorkerCase:
    """A worker's configuration and the limits of its copies.

    Attributes:
        method: Name of the training method.
        choices: Options of the method.
        reply: Number of entries in the reply, divided by the number of pushed entries.
        most_down: Maximum number of bytes that are copied to the host per pushed entry.
    """

    method: str
    choices: dict[str, Any]
    reply: float = 1.0
    most_down: float = DOWN


_TOP_K = {"compression_rate": RATE, "overrides": {"codec": "topk", "down_codec": "delta"}}
_LOCAL = {"local_steps": LOCAL_STEPS}
WORKERS = {
    "adacomp": WorkerCase("adacomp", {"compression_rate": RATE}, reply=2.0),
    "esync, top k": WorkerCase("esync", _TOP_K, reply=2.0),
    "sparseloco": WorkerCase("sparseloco", _LOCAL | {"chunk_k": 41, "error_ahead": 0.3}),
    "fedprox": WorkerCase("fedprox", _LOCAL | {"prox_mu": 0.1}),
    "diloco": WorkerCase("diloco", _LOCAL),
    "dgt": WorkerCase("dgt", {"dgt_k": 0.3}, most_down=_WHOLE),
    "dgt, 8 bits": WorkerCase(
        "dgt", {"dgt_k": 0.3, "dgt_low_bits": 8}, most_down=0.3 * _WHOLE + 0.7
    ),
    "dgt, 4 bits": WorkerCase(
        "dgt", {"dgt_k": 0.3, "dgt_low_bits": 4}, most_down=0.3 * _WHOLE + 0.35
    ),
    "dgt, dropped": WorkerCase(
        "dgt", {"dgt_k": 0.3, "dgt_send_drop": True}, most_down=0.3 * _WHOLE
    ),
}


@dataclasses.dataclass
class Counts:
    """Bytes that one exchange copies, and the number of transfers within graphs."""

    down: int = 0  # bytes copied to the host
    up: int = 0  # bytes copied to the device
    sent: int = 0  # entries of the push
    inside: int = 0  # transfers to the host in the graphs that ran for the first time


@contextlib.contextmanager
def graphs_made(where: str, counts: Counts) -> Iterator[None]:
    """Count transfers of floats to the host in graphs that first run inside the block.

    Transfers of flags are allowed and are not counted.
    """
    import tensorflow as tf
    from tensorflow.python.eager import context

    context.context().enable_run_metadata()
    yield
    trace = context.context().export_run_metadata()
    context.context().disable_run_metadata()
    for graph in (part for function in trace.function_graphs for part in function.partition_graphs):
        for node in graph.node:
            leaves = node.op == "_Send" and node.attr["send_device"].s.decode().endswith(where[1:])
            is_data = node.attr["T"].type == tf.float32.as_datatype_enum
            counts.inside += leaves and is_data and "/ctrl/" not in node.input[0]


@contextlib.contextmanager
def copies(counts: Counts) -> Iterator[None]:
    """Count the bytes that are copied between host and device inside the block."""
    import tensorflow as tf
    from tensorflow.python.framework import constant_op

    tensor = next(base for base in type(tf.constant(0)).__mro__ if "_numpy" in vars(base))
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
    """Return the name of a device other than the host's. Call it before TensorFlow starts."""
    import tensorflow as tf

    tf.config.set_soft_device_placement(False)
    if tf.config.list_physical_devices("GPU"):
        return "/GPU:0"
    (processor,) = tf.config.list_physical_devices("CPU")
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(processor, two)
    return "/CPU:1"


def exchange(name: str, where: str) -> Counts:
    """Encode gradients on the device `where`; return the counts of the last step."""
    import tensorflow as tf

    from thinwire.ops.kernels import load_kernels
    from thinwire.ops.kernels.device import DeviceArray

    bodies, rng = load_kernels("tf"), np.random.default_rng(0)
    choices = dict(compression_rate=RATE, **CODECS[name])
    codec = build_codec(name, choices, nb_workers=4)
    counts = Counts()
    with tf.device(where), graphs_made(where, counts):
        state = codec.init(SPEC, bodies)
        for step in range(1, WARM + 2):
            drawn = [rng.standard_normal(tensor.size, np.float32) for tensor in SPEC.tensors]
            gradient = [DeviceArray(array) for array in drawn]
            context = EncodeContext(step, 0.1, np.random.default_rng(step), bodies, epoch=1.0)
            with copies(counts) if step > WARM else contextlib.nullcontext():
                packet, state = codec.encode(gradient, state, context)
    for array in device_arrays(state, DeviceArray):
        if not array.value.device.endswith(where[1:]):
            raise RuntimeError(f"a residual of {name} is on {array.value.device}, not {where}")
    counts.sent = sum(block.values.data.size for block in packet.blocks)
    return counts


class DeviceWorker:
    """A worker without a network: model and core are on a device, replies are made up."""

    def __init__(self, name: str) -> None:
        import keras
        import tensorflow as tf

        from thinwire.models.flat_model import SharedModel
        from thinwire.ops.kernels import load_kernels
        from thinwire.ops.methods.builder import Choices, compose
        from thinwire.worker.core.core import WorkerCore
        from thinwire.worker.train_step import TrainStep

        layers = [keras.Input((1024,)), keras.layers.Dense(512), keras.layers.Dense(100)]
        shared = SharedModel.of(keras.Sequential(layers))
        self._images, self._labels = tf.random.normal([4, 1024]), tf.zeros([4], tf.int32)
        self._step, self._none = TrainStep(shared), np.zeros(0, np.float32)
        self.variables = [variable.value for variable in shared.variables]
        case = WORKERS[name]
        self._reply_size = case.reply
        method = compose(Choices.of(method=case.method, nb_workers=2, **case.choices))
        layouts = method.place(shared.spec, 1)
        self.core = WorkerCore(
            shared.spec, layouts, method, load_kernels("tf"), [0, 1], keeps_on_device=True
        )
        self._rng, self._version = np.random.default_rng(0), 0
        offsets = layouts[0].offsets
        nothing = CodedValues("float32", np.zeros(0, np.float32))
        self.finish([Block(0, offsets[-1], None, nothing, slots=len(offsets) - 1)])

    def round(self) -> int:
        """Take the local steps and exchange; return the number of pushed entries."""
        request, steps = None, 0
        while request is None:
            steps += 1
            gradient, loss = self._step.gradients_on_device(self._images, self._labels, self._none)
            request = self.core.begin(gradient, 4, loss)
            # With these methods the shards decide when a round ends; the loop plays the shards.
            if request is None and steps == LOCAL_STEPS:
                request = self.core.end_round()
            if request is None:
                self._step.set_weights(self.core.weights)
        blocks = request.shards[0]
        self.finish(blocks)
        return sum(block.values.data.size for block in blocks)

    def finish(self, pushed: Sequence[Block]) -> None:
        """Apply a made-up reply to the pushed blocks.

        The reply to a sparse block has different entries of the same slices.
        """
        self._version += 1
        reply = made_up_reply(pushed, self._reply_size, self._version, self._rng)
        self._step.set_weights(self.core.finish([reply]))


def made_up_reply(
    pushed: Sequence[Block], reply_size: float, version: int, rng: np.random.Generator
) -> ShardReply:
    """Return a reply with random values, which has different entries of sparse blocks.

    Args:
        pushed: Blocks of the push.
        reply_size: Number of entries of the reply, divided by the number of pushed entries.
        version: Version of the shard's model after the push.
        rng: Random generator of values and positions.
    """
    blocks = []
    for block in pushed:
        at, count = None, block.size
        if block.indices is not None:
            count = round(reply_size * len(block.indices))
            at = np.sort(rng.choice(block.size, count, replace=False))
        values = CodedValues("float32", rng.standard_normal(count, np.float32) / 100)
        blocks.append(Block(block.slot, block.size, at, values, slots=block.slots))
    return ShardReply(Operation.SET, blocks, version, 0, 0.01, 0, False)


def worker_round(name: str, where: str) -> Counts:
    """Run rounds of a worker whose model is on the device `where`; return the last counts."""
    import tensorflow as tf

    counts = Counts()
    with tf.device(where), graphs_made(where, counts):
        worker = DeviceWorker(name)
        for step in range(WARM + 1):
            with copies(counts) if step == WARM else contextlib.nullcontext():
                counts.sent = worker.round()
    for value in (worker.core.weights.value, *worker.variables):
        if not value.device.endswith(where[1:]):
            raise RuntimeError(f"weights of {name} are on {value.device}, not {where}")
    return counts


def device_arrays(state: Any, kind: type) -> Iterator[Any]:
    """Yield the arrays in a nested state that are on a device."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list | tuple):
        for element in state:
            yield from device_arrays(element, kind)
    elif isinstance(state, kind):
        yield state


def hop(where: str) -> int:
    """Return the number of counted transfers in a graph that has one transfer to the host."""
    import tensorflow as tf

    @tf.function
    def both(x: Any) -> Any:
        with tf.device("/CPU:0"):
            moved = x + 1.0
        with tf.device(where):
            return moved * 2.0

    counts = Counts()
    with tf.device(where), graphs_made(where, counts):
        both(tf.zeros(8))
    return counts.inside


def exceeds(counts: Counts, reply: float, down: float, steps: int) -> bool:
    """Return True if an exchange copies more bytes than it sends and receives.

    Args:
        counts: Counts of the exchange.
        reply: Number of entries in the reply, divided by the number of pushed entries.
        down: Maximum number of bytes copied to the host per pushed entry.
        steps: Number of local steps in the exchange.
    """
    most_up = (_UP + reply * _REPLY) * counts.sent + steps * _REST
    return counts.inside > 0 or (
        counts.down > down * counts.sent + steps * _REST or counts.up > most_up
    )


def line(name: str, counts: Counts, has_graphs: bool = True) -> str:
    inside = f", transfers in graphs {counts.inside}" if has_graphs else ""
    return (
        f"{name:12} {counts.sent:6} entries sent; to the host {counts.down:7} B, to the device "
        f"{counts.up:7} B, gradient {4 * SPEC.num_parameters} B{inside}\n"
    )


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m bench.machine.crossings", description=__doc__)
    options.add_argument("--backend", default="tensorflow", choices=("tensorflow", "jax", "torch"))
    backend = options.parse_args().backend
    if backend != "tensorflow":
        from bench.machine import crossings_elsewhere

        return crossings_elsewhere.count_on(backend)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    where, failed = device(), False
    control = hop(where)
    sys.stdout.write(f"{where}; a graph with a transfer to the host counts {control}\n")
    for name in CODECS:
        counts = exchange(name, where)
        failed |= exceeds(counts, 0.0, DOWN, 1)
        sys.stdout.write(line(name, counts))
    for name, case in WORKERS.items():
        counts = worker_round(name, where)
        failed |= exceeds(counts, case.reply, case.most_down, LOCAL_STEPS)
        sys.stdout.write(line(name, counts))
    return 1 if failed or control != 1 else 0


if __name__ == "__main__":
    sys.exit(main())
