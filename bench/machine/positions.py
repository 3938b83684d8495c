"""Compare the index bytes of real AdaComp pushes with the entropy of random positions.

Positions in real pushes cluster, so that they can take less than log2 C(n, k) bits, which is the
limit for uniformly random positions. The model is AdaComp's CNN with c = 1 % (the share of entries
sent), batch size 10 and one worker in one process. The program codes the pushes after 1,000 updates
as a worker does.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

from bench.machine.apart import measure_apart
from bench.machine.kernels import entropy_bytes
from bench.table import Row

_UPDATES, _MEASURED, _RATE, _BATCH = 1000, 100, 0.02, 10


def rows() -> list[Row]:
    """Measure in a separate process, and return the table's row."""
    ours, limit = measure_apart("bench.machine.positions")
    name = f"index bytes at 1 %, real pushes after {_UPDATES} updates"
    return [Row(name, ours, "B/entry", limit, ours / limit, 0.75, "lower")]


def _begun() -> tuple[Any, Any]:
    """Return a train step, and a worker core that has the model."""
    from thinwire.models.flat_model import SharedModel
    from thinwire.ops.downlink.types import Operation
    from thinwire.ops.kernels import load_kernels
    from thinwire.ops.methods.builder import Choices, compose
    from thinwire.ops.sharding.split import place_tensors
    from thinwire.ops.types import Block, CodedValues
    from thinwire.runtime.run.settings import ModelChoice
    from thinwire.worker.core.core import WorkerCore
    from thinwire.worker.core.messages import ShardReply
    from thinwire.worker.train_step import TrainStep

    shared = SharedModel(ModelChoice("cnn", None, 28, 1, 10), 1)
    step, layouts = TrainStep(shared), place_tensors(shared.spec, 1)
    method = compose(Choices.of(method="adacomp", nb_workers=1, compression_rate=0.01))
    core = WorkerCore(shared.spec, layouts, method, load_kernels("numpy"), [1, 1])
    whole = tuple(
        Block(slot, stop - start, None, CodedValues("float32", shared.flat()[start:stop]))
        for slot, (start, stop) in enumerate(itertools.pairwise(layouts[0].offsets))
    )
    core.finish([ShardReply(Operation.FULL, whole, 0, 0, _RATE, 0, False, "")])
    return step, core


def _measure() -> tuple[float, float]:
    """Return (index bytes per entry as coded, index bytes per entry by the entropy)."""
    import numpy as np

    from bench.peers import work
    from thinwire.ops.codecs.packets import decoded
    from thinwire.ops.wire.blocks import IndexChooser

    images, labels = work.load()
    step, core = _begun()
    offsets, chooser = core.layouts[0].offsets, IndexChooser()
    gradient = np.zeros(core.spec.num_parameters, np.float32)
    order = np.random.default_rng(1)
    spent = entropy = entries = 0.0
    for number in range(_UPDATES + _MEASURED):
        step.set_weights(core.weights)
        batch = order.integers(0, len(images), _BATCH)
        loss = step.gradients(images[batch, :, :, None], labels[batch].astype(np.int32), gradient)
        outgoing = core.begin(gradient, _BATCH, loss)
        for block in outgoing.shards[0]:
            coded = chooser.encode(block)
            start = offsets[block.slot]
            target = core.base[start : start + block.size]
            where, values = decoded(block)
            target[where] -= np.float32(_RATE) * values
            if number >= _UPDATES:
                spent += len(coded.index_bytes)
                entropy += entropy_bytes(block.size, coded.count)
                entries += coded.count
        core.restart_from_base()
    return spent / entries, entropy / entries


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure()) + "\n")
