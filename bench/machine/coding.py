"""Measure the cost of DGS's coding relative to a training step of a larger model.

The model is ResNet-18 for CIFAR (11,173,962 parameters) with batch size 64, R = 1 % (the share of
entries that are sent), one thread and one process. The coding consists of the worker's selection
and encoding and the shard's decoding and applying.

    python -m bench.machine.coding
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

from bench.machine.apart import measure_apart
from bench.table import Row, render

_STEPS, _WARM_STEPS = 8, 3
_BATCH, _RATE = 64, 0.05


def rows() -> list[Row]:
    """Measure the coding and the step in a separate process; return the table's row."""
    coding, step = measure_apart("bench.machine.coding", "--in_process")
    name = "compress, encode, decode, apply of dgs / step of resnet18-cifar"
    return [Row(name, 1e3 * coding, "ms", 1e3 * step, coding / step, 0.1, "lower")]


def _begun() -> tuple[Any, Any, Any, Any]:
    """Return a train step, a worker core that has the model, a shard model, and its decoder."""
    import tensorflow as tf

    from thinwire.models.flat_model import SharedModel
    from thinwire.ops.downlink.types import Operation
    from thinwire.ops.kernels import load_kernels
    from thinwire.ops.methods.builder import Choices, compose
    from thinwire.ops.optimizers.schedule import Budget, Schedule
    from thinwire.ops.sharding.split import place_tensors
    from thinwire.ops.types import Block, CodedValues
    from thinwire.ps.core.model import ShardModel
    from thinwire.ps.wire.push_decoder import PushDecoder
    from thinwire.runtime.run.settings import ModelChoice
    from thinwire.worker.core.core import WorkerCore
    from thinwire.worker.core.messages import ShardReply
    from thinwire.worker.train_step import TrainStep

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    shared = SharedModel(ModelChoice("resnet18-cifar", None, 32, 3, 10), 1)
    layouts, bodies = place_tensors(shared.spec, 1), load_kernels("numpy")
    method, weights = compose(Choices.of(method="dgs", nb_workers=1)), shared.flat()
    offsets = layouts[0].offsets
    core = WorkerCore(shared.spec, layouts, method, bodies, [1, 1])
    whole = tuple(
        Block(slot, stop - start, None, CodedValues("float32", weights[start:stop]))
        for slot, (start, stop) in enumerate(itertools.pairwise(offsets))
    )
    core.finish([ShardReply(Operation.FULL, whole, 0, 0, _RATE, 0, False, "")])
    shard = ShardModel(method, core.base.copy(), bodies, Budget(1000), Schedule(_RATE), offsets)
    return TrainStep(shared), core, shard, PushDecoder(layouts[0], method.kind, bodies)


def _measure() -> tuple[float, float]:
    """Return the median seconds of (coding, step)."""
    import numpy as np

    from thinwire.ops.weighting.base import Arrival
    from thinwire.ops.wire.blocks import IndexChooser
    from thinwire.worker.client.messages import push_messages

    step, core, shard, decoder = _begun()
    chooser, gradient = IndexChooser(), np.zeros(core.spec.num_parameters, np.float32)
    random = np.random.default_rng(1)
    images = random.standard_normal((_BATCH, 32, 32, 3), np.float32)
    labels = random.integers(0, 10, _BATCH, np.int32)
    seconds = []
    for _ in range(_WARM_STEPS + _STEPS):
        step.set_weights(core.weights)
        started = time.perf_counter()
        loss = step.gradients(images, labels, gradient)
        computed = time.perf_counter()
        ((message, pieces),) = push_messages(core.begin(gradient, _BATCH, loss), 0, 1, 1, chooser)
        push = decoder.decode(1, message.push, memoryview(b"".join(pieces)))
        shard.apply([Arrival(1, push.update, shard.version)], shard.version)
        seconds.append((time.perf_counter() - computed, computed - started))
        np.copyto(core.base, shard.theta)
        core.restart_from_base()
    coding, computing = np.median(seconds[_WARM_STEPS:], axis=0)
    return float(coding), float(computing)


if __name__ == "__main__":
    in_process = "--in_process" in sys.argv[1:]
    sys.stdout.write(json.dumps(_measure()) + "\n" if in_process else render(rows()))
