"""Codecs with residuals, run on a small model; their packets as one flat array."""

import numpy as np

from thinwire.ops.codecs.base import EncodeContext
from thinwire.ops.codecs.packets import decoded
from thinwire.ops.codecs.registry import CODECS, build_codec
from thinwire.ops.kernels import load_kernels
from thinwire.ops.types import ModelSpec, TensorSpec

BODIES = load_kernels("numpy")
SPEC = ModelSpec((TensorSpec("w", (40, 10)), TensorSpec("one", (1,)), TensorSpec("b", (30,))))
KEPT = (40, 1, 3)  # entries of each tensor at a rate of 0.1
OTHERS = ("gd", "dgc", "dgs")


def context(number=1, rate=0.1, **fields):
    """The encoding context of one step, with a separate random generator."""
    return EncodeContext(number, rate, np.random.default_rng([7, number]), BODIES, **fields)


def gradients(number, spec=SPEC):
    """The gradients of one step."""
    rng = np.random.default_rng([3, number])
    return [rng.standard_normal(tensor.size, np.float32) for tensor in spec.tensors]


def build(name, **choices):
    """A codec that sends a tenth, without a warm-up, unless the choices differ."""
    warms_up = CODECS[name].base.sends_fraction
    choices = {"compression_rate": 0.1, "warmup_epochs": 0 if warms_up else None} | choices
    return build_codec(name, dict(**choices), nb_workers=4)


def dense(packet, spec=SPEC):
    """A packet's values [all entries], 0 where nothing is sent."""
    flat = [np.zeros(tensor.size, np.float32) for tensor in spec.tensors]
    for block in packet.blocks:
        where, values = decoded(block)
        flat[block.slot][where] = values
    return np.concatenate(flat)


def drive(codec, steps, **fields):
    """Return the packet of each step and the final state."""
    state, sent = codec.init(SPEC, BODIES), []
    for number in range(1, steps + 1):
        packet, state = codec.encode(gradients(number), state, context(number, **fields))
        sent.append(dense(packet))
    return np.array(sent), state


def top(values, kept=KEPT):
    """The mask of the largest of each tensor; ties to the lowest index, zeros never."""
    mask, start = np.zeros(len(values), bool), 0
    for tensor, count in zip(SPEC.tensors, kept, strict=True):
        part = np.abs(values[start : start + tensor.size])
        order = np.argsort(-part, kind="stable")[:count]
        mask[start + order[part[order] > 0]] = True
        start += tensor.size
    return mask


def flat(number):
    """A step's gradients as one float64 array."""
    return np.concatenate(gradients(number)).astype(float)
