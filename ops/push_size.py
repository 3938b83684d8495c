"""How large a method's pushes are, measured before anybody trains."""

from __future__ import annotations

import numpy as np

from ops import kernels, wire
from ops.collectives import THROUGH_PS
from ops.methods import Method
from ops.types import EncodeContext, ModelSpec, TensorSpec

#: Largest sample of a model that is coded, in entries.
_MOST_ENTRIES = 4_000_000


def push_fraction(method: Method, spec: ModelSpec) -> float:
    """Return the coded bytes of a push of random values over those of the model in float32.

    The codec and the wire's coding do what they would do for a gradient, past any warm-up. Of a
    large model some tensors are taken. Whole weights are what is pushed where workers sum among
    themselves.
    """
    if method.collective != THROUGH_PS:
        return 1.0
    sample = _sample(spec)
    rng = np.random.default_rng(0)
    tensors = [rng.standard_normal(tensor.size, np.float32) for tensor in sample.tensors]
    bodies = kernels.load("numpy")
    context = EncodeContext(1, 0.01, rng, bodies, epoch=1e6)
    packet, _ = method.codec.encode(tensors, method.codec.init(sample, bodies), context)
    chooser = wire.IndexChooser()
    coded = [chooser.encode(block) for block in packet.blocks]
    num_bytes = sum(len(block.index_bytes) + len(block.value_bytes) for block in coded)
    return num_bytes / (4 * sample.num_parameters)


def _sample(spec: ModelSpec) -> ModelSpec:
    """Return some of the tensors: the first ones that are not too much together, at least one."""
    chosen: list[TensorSpec] = []
    num_entries = 0
    for tensor in spec.tensors:
        if not chosen or num_entries + tensor.size <= _MOST_ENTRIES:
            chosen.append(tensor)
            num_entries += tensor.size
    return ModelSpec(tuple(chosen))
