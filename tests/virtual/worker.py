"""A worker's core of a small model, and replies from a test."""

import numpy as np

from tests.virtual.toy import KERNELS, method
from thinwire.ops.downlink.types import Operation
from thinwire.ops.sharding.split import place_tensors
from thinwire.ops.types import Block, CodedValues, ModelSpec, TensorSpec
from thinwire.worker.core.core import WorkerCore
from thinwire.worker.core.messages import ShardReply

SPEC = ModelSpec((TensorSpec("w", (3, 4)), TensorSpec("b", (4,)), TensorSpec("s", (1,))))
SIZE = SPEC.num_parameters


def float32_block(slot, size, indices, values):
    return Block(slot, size, indices, CodedValues("float32", np.asarray(values, np.float32)))


def core_of(name="asgd", nb_ps=1, **choices):
    chosen = method(name, nb_workers=1, **choices)
    return WorkerCore(SPEC, place_tensors(SPEC, nb_ps), chosen, KERNELS, [1, 1])


def reply(layout, operation=Operation.FULL, values=None, blocks=None, **fields):
    """A reply of one shard; `values` [shard size] fill it whole."""
    if blocks is None:
        offsets = layout.offsets
        blocks = [
            float32_block(slot, piece.size, None, values[offsets[slot] : offsets[slot + 1]])
            for slot, piece in enumerate(layout.slices)
        ]
    given = {"version": 0, "generation": 0, "learning_rate": 0.5, "samples": 0, "stop": False}
    return ShardReply(operation, blocks, **{**given, **fields})


def start(core, model):
    """Hand the core the model, as its first pull does."""
    return core.finish([reply(layout, values=part(layout, model)) for layout in core.layouts])


def part(layout, model):
    starts = [SPEC.offsets[piece.tensor] + piece.start for piece in layout.slices]
    return np.concatenate(
        [model[s : s + piece.size] for s, piece in zip(starts, layout.slices, strict=True)]
    )


def numbers(seed=0):
    return np.random.default_rng(seed).standard_normal(SIZE, np.float32)


STATISTICS = np.float32([1, 2, 3])


def normed_core(**choices):
    chosen = method("asgd", nb_workers=1, **choices)
    return WorkerCore(SPEC, place_tensors(SPEC, 1), chosen, KERNELS, [1, 1], STATISTICS)
