"""Drivers for each policy interface: build a policy's state and advance it by one step."""

import random

import numpy as np

from tests.virtual.toy import method
from thinwire.ops.codecs.base import EncodeContext
from thinwire.ops.downlink.types import ModelRequest
from thinwire.ops.kernels import load_kernels
from thinwire.ops.methods.method import INTERFACES
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.routing.base import LostEntries, RouteContext
from thinwire.ops.sharding.split import place_tensors, split_packet
from thinwire.ops.sync.base import ArrivalToken
from thinwire.ops.sync.rounds import Rounds
from thinwire.ops.types import (
    Block,
    CodedValues,
    Kind,
    ModelSpec,
    Packet,
    TensorSpec,
    Update,
)
from thinwire.ops.weighting.base import Arrival
from thinwire.ps.core.model import ShardModel
from thinwire.ps.core.serialization import from_plain, to_plain

BODIES = load_kernels("numpy")
SPEC = ModelSpec(
    (
        TensorSpec("kernel", (9, 5)),
        TensorSpec("empty", (0, 3)),
        TensorSpec("one", (1,)),
        TensorSpec("zero", (6,)),
    )
)
WORKERS = 3
#: Suffix after "+" in a policy's name -> choices that put wrappers around the policy.
VARIANTS = {
    "changes": {"pacer": "fixed", "global_lr_schedule": "0.04:0.5"},
    "feedback": {"error_feedback": True, "value_dtype": "int8"},
    "decay": {
        **{"chunk": 8, "chunk_k": 2, "value_dtype": "int2"},
        **{"error_feedback": True, "error_decay": 0.9},
    },
    "sign": {"error_feedback": True, "value_dtype": "sign"},
    "means": {"error_feedback": True, "value_dtype": "means2"},
    "rank1": {"powersgd_rank": 1, "value_dtype": "bfloat16"},
    "carried": {"selection": "carried", "dense_below": 3},
    "small": {"dgt_block_size": 16, "dgt_k": 0.3, "dgt_adaptive_k": True},
    "lossy": {
        **{"dgt_block_size": 16, "dgt_k": 0.2, "dgt_low_bits": 8, "dgt_random": "1"},
        **{"dgt_error_feedback": True, "dgt_reception": "drop", "dgt_scope": "model"},
    },
    "drawn": {"fraction": 0.6, "seed": 4},
    "all": {
        **{"selection": "carried", "warmup_epochs": 2},
        **{"dgc_nesterov": True, "dgc_clip_norm": 0.5, "dgc_clip_scope": "tensor"},
    },
}


def composed(interface, name):
    """A method with this value of the interface, hyper-parameters away from trivial ones."""
    name, _, variant = name.partition("+")
    choices = dict(VARIANTS.get(variant, {}))
    overrides = {key: choices.pop(key) for key in INTERFACES if key in choices}
    pacer = overrides.get("pacer", name)
    own = {"gsp": {"groups": ((1, 3), (2,))}, "fixed": {"local_steps": 3}}
    own["per_entry"] = {"staleness_window": 4}
    return method(
        "asgd",
        nb_workers=WORKERS,
        compression_rate=0.3,
        overrides=overrides | {interface: name},
        **own.get(name, {}) | own.get(pacer, {}),
        **choices,
    )


def policy_of(interface, name):
    return getattr(
        composed(interface, name), {"server_optimizer": "server"}.get(interface, interface)
    )


class Driver:
    """Driver for most policies: `init` makes the state, and the state is saved unchanged."""

    def __init__(self, interface, name):
        self.policy = policy_of(interface, name)

    def begin(self):
        return {}

    def turn(self, state, number):
        raise NotImplementedError

    def save(self, state):
        return state

    def load(self, saved):
        return saved

    def undelivered(self, sent, state):
        return self.policy.undelivered(sent, state)


class CodecDriver(Driver):
    """Gradients of a tensor, of a tensor with one entry, of one that is all zero."""

    def begin(self):
        return self.policy.init(SPEC, BODIES)

    def turn(self, state, number):
        rng = np.random.default_rng(number)
        gradients = [
            rng.standard_normal(tensor.size, np.float32) * (tensor.path != "zero")
            for tensor in SPEC.tensors
        ]
        context = EncodeContext(number, 0.1, np.random.default_rng([7, number]), BODIES)
        return self.policy.encode(gradients, state, context)


class PacerDriver(Driver):
    """Numbers only."""

    def turn(self, state, number):
        return self.policy.push_now(number), state


class RouterDriver(Driver):
    """A dense or a sparse packet over two shards, with losses if some values use datagrams."""

    layouts = place_tensors(SPEC, 2)

    def begin(self):
        return self.policy.init(self.layouts)

    def turn(self, state, number):
        rng = np.random.default_rng(number)
        context = RouteContext(number, 2.0 / number, 5, 1, BODIES)
        state = self.policy.begin(state, context)
        routed = []
        for shard, blocks in enumerate(
            split_packet(Packet(self.blocks(rng), Kind.GRADIENT), self.layouts)
        ):
            part, state = self.policy.cut(shard, blocks, state, context)
            state = self.policy.undelivered(shard, lost_of(part) if number % 2 else (), state)
            routed.append(part)
        return routed, state

    def blocks(self, rng):
        blocks = []
        for slot, tensor in enumerate(SPEC.tensors):
            values = rng.standard_normal(tensor.size, np.float32)
            at = np.flatnonzero(rng.random(tensor.size) < 0.5) if rng.random() < 0.5 else None
            chosen = values if at is None else values[at]
            blocks.append(Block(slot, tensor.size, at, CodedValues("float32", chosen)))
        return tuple(blocks)

    def undelivered(self, sent, state):
        del sent
        return self.policy.undelivered(0, None, state)


def lost_of(routed):
    """The worst block of each slot did not arrive."""
    lost = []
    for part in routed.unreliable:
        start = int(part.blocks[-1]) * part.block_entries
        stop = start + part.block_entries
        if part.indices is None:
            lost.append(LostEntries(part.slot, np.array([[start, stop]])))
        else:
            there = (part.indices >= start) & (part.indices < stop)
            lost.append(LostEntries(part.slot, None, part.indices[there]))
    return lost


class Sync(Driver):
    """Workers join, push, leave and return at random; the state is the rule in force."""

    def begin(self):
        rule = Rounds(self.policy)
        for worker in range(1, WORKERS + 1):
            rule.join(worker)
        rule.advance(0.0)
        return rule

    def turn(self, state, number):
        rng = random.Random(number)
        worker = rng.randint(1, WORKERS)
        if not state.is_live(worker):
            state.join(worker)
        elif worker in state.waiting() or rng.random() < 0.2:
            state.leave(worker)
        else:
            state.submit(ArrivalToken(worker, number), float(number))
        turn = state.advance(float(number))
        return (list(turn.released), list(turn.proceeding)), state

    def save(self, state):
        return {name: to_plain(state.state_dict(name == "soft")) for name in ("lasting", "soft")}

    def load(self, saved):
        rule = Rounds(self.policy)
        for name, state in saved.items():
            rule.load_state_dict(from_plain(state), name == "soft")
        return rule


class OnShard(Driver):
    """Down codecs, weightings, server optimizers: pushes of stale workers, replies to them.

    The state is a whole ShardModel: it knows how Keras's slots are saved.
    """

    size = 24

    def __init__(self, interface, name):
        self.method = composed(interface, name)

    def begin(self):
        theta = np.random.default_rng(1).standard_normal(self.size, np.float32)
        return ShardModel(self.method, theta, BODIES, Budget(100), Schedule(0.1, ((0.04, 0.5),)))

    def turn(self, state, number):
        rng = np.random.default_rng([3, number])
        arrivals = [
            Arrival(worker, self.update(rng), max(0, state.version - int(rng.integers(0, 6))))
            for worker in range(1, int(rng.integers(2, 4)))
        ]
        kept = state.apply(arrivals, max(0, state.version - 6))
        state.samples += 8 * len(kept)
        worker = 1 + number % WORKERS  # the reply was `WORKERS` turns ago, at that version
        asked = (
            ModelRequest(9, 0, None),
            ModelRequest(8, number, state.version),
            ModelRequest(worker, number, max(0, number - WORKERS)),
        )
        gathered = [state.gather(question) for question in asked]
        state.downlink.record_reply(worker, gathered[-1])
        return (kept, gathered, state.learning_rate), state

    def update(self, rng):
        if rng.random() < 0.2:
            return Update(None, rng.standard_normal(self.size, np.float32))
        indices = np.flatnonzero(rng.random(self.size) < 0.2)
        return Update(indices, rng.standard_normal(len(indices), np.float32))

    def save(self, state):
        return state.state_dict(soft=False)

    def load(self, saved):
        shard = self.begin()
        shard.load_state_dict(saved, soft=False)
        return shard


DRIVERS = {
    "pacer": PacerDriver,
    "codec": CodecDriver,
    "down_codec": OnShard,
    "router": RouterDriver,
    "sync": Sync,
    "weighting": OnShard,
    "server_optimizer": OnShard,
}
