"""DGT cuts gradients on a device as on the host, and copies only the sent values.

The device is the processor, with soft placement off; contributions are summed by TensorFlow in
both cases, since numpy's sums differ in their last bits.
"""

import dataclasses

import numpy as np
import pytest

from tests.ops.routers import parts_of
from thinwire.ops.kernels import load_kernels
from thinwire.ops.kernels.device import DeviceArray
from thinwire.ops.methods.builder import Choices, compose
from thinwire.ops.routing.base import LostEntries, UnreliableBlocks
from thinwire.ops.types import ModelSpec, TensorSpec
from thinwire.worker.core.core import UpdatePacker, WorkerCore

pytestmark = pytest.mark.usefixtures("hard_placement")

SPEC = ModelSpec((TensorSpec("kernel", (50, 20)), TensorSpec("bias", (20,)), TensorSpec("x", (7,))))
BODIES, STEPS = load_kernels("tf"), 6
COMPOSITIONS = {
    "plain": {},
    "one ranking": {"dgt_scope": "model", "dgt_clear_zero": True},
    "lost": {"dgt_error_feedback": True},
    "levels of 16 bits": {"dgt_low_bits": 16},
    "levels of 8": {"dgt_low_bits": 8, "dgt_error_feedback": True},
    "levels of 4": {"dgt_low_bits": 4, "dgt_error_feedback": True},
    "levels of 4 in odd blocks": {"dgt_low_bits": 4, "dgt_block_size": 60},
    "dropped": {"dgt_send_drop": True},
    "at random": {"dgt_random": "1"},
    "bfloat16": {"value_dtype": "bfloat16"},
}


def packer_of(name, nb_ps, groups=()):
    chosen = {"dgt_block_size": 64, "dgt_k": 0.3, "dgt_reception": "drop"} | COMPOSITIONS[name]
    method = compose(Choices.of(method="dgt", nb_workers=2, **chosen))
    return UpdatePacker(SPEC, method.place(SPEC, nb_ps), method, BODIES, [0, 1], groups)


def gradient(step):
    values = np.random.default_rng(step).standard_normal(SPEC.num_parameters, np.float32)
    values[100:180] = 0
    return values


def plain(value):
    """Convert data classes and arrays to comparable values; all arrays must be numpy's."""
    assert not isinstance(value, DeviceArray)
    if isinstance(value, UnreliableBlocks):  # values outside its blocks are not sent
        return [value.slot, int(value.encoding), *map(plain, parts_of(value))]
    if dataclasses.is_dataclass(value):
        fields = {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return type(value).__name__, fields
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def driven(packer, wrap, steps=STEPS):
    """Return the packets of steps with lost, rejected, and taken-back datagrams."""
    sent = []
    for step in range(1, steps + 1):
        packet = packer.encode(wrap(gradient(step)), step, 0.1, 0.0)
        parts = packer.route(packet, step, 1.0 / step)
        sent.append(plain(parts))
        if step == 4:
            packer.undelivered()
            continue
        for shard, part in enumerate(parts):
            lost = []
            for each in part.unreliable if step != 2 else ():
                starts = each.blocks[: 1 + step % 2] * each.block_entries
                ranges = np.stack([starts, starts + 3], axis=1)
                lost.append(LostEntries(each.slot, ranges))
            packer.record_loss(shard, lost)
    return sent


@pytest.mark.parametrize("nb_ps", [1, 2])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_device_cuts_as_the_host_does(name, nb_ps):
    expected = driven(packer_of(name, nb_ps), np.asarray)
    assert any(part[1]["unreliable"] for parts in expected for part in parts) or name == "dropped"
    assert driven(packer_of(name, nb_ps), DeviceArray) == expected


@pytest.mark.parametrize("name", ["lost", "levels of 8"])
def test_what_is_owed_travels_with_pushes_of_nothing_and_of_other_optimizers(name):
    made = []
    for wrap in (np.asarray, DeviceArray):
        for groups in ((), ((0,), (1, 2))):
            packer, sent = packer_of(name, 1, groups), []
            driven(packer, wrap, steps=3)
            empty = packer.route(packer.empty(), 4, 1.0)
            sent.append(plain(empty))
            packer.record_loss(0, [])
            for group in range(max(1, len(groups))):
                packet = packer.encode(wrap(gradient(5)), 5, 0.1, 0.0, group=group)
                sent.append(plain(packer.route(packet, 5, 1.0)))
                packer.record_loss(0, [])
            made.append(sent)
    assert made[0][0][0][1]["reliable"] or name != "lost"  # the residual
    assert made[:2] == made[2:]


def test_a_packet_of_a_codec_s_device_can_be_added_on_the_host():
    chosen = {"overrides": {"router": "dgt"}, "compression_rate": 1.0}
    method = compose(Choices.of(method="gd", nb_workers=2, dgt_block_size=64, **chosen))
    core = WorkerCore(SPEC, method.place(SPEC, 1), method, BODIES, [0, 1])
    core.learning_rate = 1.0
    core.begin(gradient(1), 8, 1.0)
    weights = np.zeros(SPEC.num_parameters, np.float32)
    core._add_sent(weights, 0)  # changes are sent: gd's rate is the workers' rate
    np.testing.assert_array_equal(weights, -gradient(1))


@pytest.mark.parametrize("name", ["lost", "levels of 8"])
def test_residuals_survive_the_process(name):
    packer, other = packer_of(name, 1), packer_of(name, 1)
    driven(packer, DeviceArray, steps=3)
    other.restore(packer.save(), fits=True)
    assert driven(other, DeviceArray) == driven(packer, DeviceArray)


def test_only_what_is_sent_leaves_the_device(copied):
    packer = packer_of("levels of 4", 1)
    packet = packer.encode(DeviceArray(gradient(1)), 1, 0.1, 0.0)
    copied.clear()
    (part,) = packer.route(packet, 1, 1.0)
    num_levels = sum(each.blocks.size * each.block_entries for each in part.unreliable)
    sent = sum(block.values.data.nbytes for block in part.reliable) + num_levels / 2
    assert 0 < sum(copied) <= sent + 16 * part.num_blocks < SPEC.num_parameters * 4
