"""Codecs with state on a device send the same values as numpy and copy only these values.

On TensorFlow, JAX and torch, where they are installed.

The device is the processor, with soft placement off.
"""

import importlib.util

import numpy as np
import pytest

from tests.ops.test_conformance import bits
from tests.virtual.toy import method
from thinwire.ops.codecs.base import EncodeContext, NonFiniteUpdate
from thinwire.ops.codecs.registry import build_codec
from thinwire.ops.kernels import load_kernels
from thinwire.ops.types import ModelSpec, TensorSpec
from thinwire.ops.wire.low_rank import expanded
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.worker.core.core import UpdatePacker

SPEC = ModelSpec(
    (
        TensorSpec("kernel", (100, 60)),
        TensorSpec("one", (1,)),
        TensorSpec("bias", (30,)),
        TensorSpec("empty", (0, 3)),
        TensorSpec("zero", (7,)),
    )
)
RATE, STEPS = 0.05, 6
KEPT = 300 + 1 + 1 + 1
NUMPY = load_kernels("numpy")

#: Compositions that copy no gradient to the host.
STAYING = {
    "topk": {},
    "topk carried": {"selection": "carried"},
    "topk rounded": {"value_dtype": "bfloat16"},
    "topk feedback": {"error_feedback": True, "value_dtype": "float16", "dense_below": 20},
    "gd": {"value_dtype": "int8"},
    "gd carried": {"selection": "carried"},
    "dgs": {},
    "dgs carried": {"selection": "carried", "dense_below": 20},
    "dgc": {"warmup_epochs": 0},
    "dgc warming": {"warmup_epochs": 2, "selection": "carried"},
    "dgc nesterov": {"warmup_epochs": 0, "dgc_nesterov": True, "dgc_masking": False},
    "random_k": {"error_feedback": True},
}
#: Compositions that send all values.
COPYING = {"dense": {"error_feedback": True, "value_dtype": "int8"}}
BOTH = STAYING | COPYING
#: Compositions that send factors; their sums have another order than numpy's sums.
FACTORED = {"powersgd": {}, "powersgd rounded": {"value_dtype": "bfloat16", "powersgd_rank": 3}}


def build(name):
    choices = dict(compression_rate=RATE, **(BOTH | FACTORED)[name])
    return build_codec(name.split()[0], choices, nb_workers=4)


def gradients(number):
    rng = np.random.default_rng([3, number])
    drawn = [rng.standard_normal(tensor.size, np.float32) for tensor in SPEC.tensors]
    return [*drawn[:-1], np.zeros(7, np.float32)]


def context(number, bodies):
    rng = np.random.default_rng([7, number])
    return EncodeContext(number, 0.1 / number, rng, bodies, epoch=number / 2)


def drive(codec, bodies, wrap, steps=STEPS):
    """Return the packets of each step (one push fails) and the final state."""
    state, sent = codec.init(SPEC, bodies), []
    for number in range(1, steps + 1):
        tensors = [wrap(tensor) for tensor in gradients(number)]
        packet, state = codec.encode(tensors, state, context(number, bodies))
        sent.append(bits(packet))
        if number == 3:
            state = codec.undelivered(packet, state)
    return sent, state


def memories(state):
    """Residuals and velocities of a state, by name."""
    found = {}
    while "inner" in state:
        found |= {key: value for key, value in state.items() if key in ("residual", "velocity")}
        state = state["inner"]
    return found


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("place", ["device", "host"])
def test_a_device_sends_what_numpy_sends(device, name, place):
    check_equal(device, name, placer(device) if place == "device" else np.asarray)


@pytest.mark.parametrize("name", FACTORED)
def test_factors_of_the_host_are_numpys(device, name):
    if device.name == "tf":
        pytest.skip("TensorFlow multiplies matrices on the device, and sums in another order")
    check_equal(device, name, placer(device))


def placer(bodies):
    """Return a function that copies an array to the device of some kernels."""
    return lambda array: bodies.joined([array])


def kind_of(bodies):
    return type(bodies.zeros([1])[0])


def check_equal(device, name, wrap):
    codec = build(name)
    expected, plain = drive(codec, NUMPY, np.asarray)
    sent, kept = drive(codec, device, wrap)
    assert sent == expected
    plain, kept = memories(plain), memories(kept)
    assert plain.keys() == kept.keys()
    for key, arrays in plain.items():
        assert all(isinstance(array, kind_of(device)) for array in kept[key])
        for array, other in zip(arrays, kept[key], strict=True):
            np.testing.assert_array_equal(array, np.asarray(other))


@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_clipping_differs_in_the_last_bits_alone(device, scope):
    """The norm is summed in another order, and in double precision."""
    choices = {"dgc_clip_norm": 1.0, "dgc_clip_scope": scope, "warmup_epochs": 0}
    codec = build_codec("dgc", dict(compression_rate=RATE, **choices))
    (plain, kept) = (codec.init(SPEC, bodies) for bodies in (NUMPY, device))
    for number in range(1, STEPS + 1):
        given = gradients(number)
        expected, plain = codec.encode(given, plain, context(number, NUMPY))
        given = list(map(placer(device), given))
        packet, kept = codec.encode(given, kept, context(number, device))
        for block, other in zip(expected.blocks, packet.blocks, strict=True):
            np.testing.assert_array_equal(block.indices, other.indices)
            np.testing.assert_allclose(block.values.data, other.values.data, rtol=1e-5)


@pytest.mark.parametrize("name", STAYING)
def test_only_what_is_sent_is_copied_to_the_host(device, name, copied):
    codec = build(name)
    state = codec.init(SPEC, device)
    for number in range(1, STEPS + 1):
        tensors = list(map(placer(device), gradients(number)))
        copied.clear()
        packet, state = codec.encode(tensors, state, context(number, device))
        entries = sum(block.values.data.size for block in packet.blocks)
        # Position, value, coded value of each, space for those above a threshold.
        assert 0 < sum(copied) <= 1.7 * 12 * max(entries, KEPT) + 100
        assert max(copied) < 4 * SPEC.tensors[0].size


@pytest.mark.parametrize("name", FACTORED)
def test_of_factored_matrices_only_the_factors_are_copied(device, name, copied):
    if device.name != "tf":
        pytest.skip("PowerSGD's products are computed on the host")
    codec = build(name)
    plain, kept = (codec.init(SPEC, bodies) for bodies in (NUMPY, device))
    for number in range(1, STEPS + 1):
        expected, plain = codec.encode(gradients(number), plain, context(number, NUMPY))
        tensors = list(map(placer(device), gradients(number)))
        copied.clear()
        packet, kept = codec.encode(tensors, kept, context(number, device))
        rank = packet.blocks[0].rank
        factors = 4 * rank * (100 + 60)
        rest = 6 * (1 + 30 + 7)  # float32, and coded once more
        assert factors <= sum(copied) <= 1.5 * factors + rest + 100
        for block, other in zip(expected.blocks, packet.blocks, strict=True):
            sent, wanted = (NUMPY.dequantise(expanded(each).values) for each in (other, block))
            np.testing.assert_allclose(sent, wanted, atol=0.05)
    for array, other in zip(plain["residual"], kept["residual"], strict=True):
        assert isinstance(other, kind_of(device))
        np.testing.assert_allclose(array, np.asarray(other), atol=0.05)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", BOTH)
def test_what_is_not_finite_changes_nothing(device, name, bad):
    codec = build(name)
    _, state = drive(codec, device, placer(device), steps=2)
    before = bits(device.as_saved(state))
    spoilt = gradients(3)
    spoilt[2][4] = bad
    with pytest.raises(NonFiniteUpdate, match="tensor 2"):
        codec.encode(list(map(placer(device), spoilt)), state, context(3, device))
    assert bits(device.as_saved(state)) == before


def packing(bodies, name):
    made = method("asgd", nb_workers=4, compression_rate=RATE, overrides={"codec": name})
    return UpdatePacker(SPEC, made.place(SPEC, 2), made, bodies, [5, 1])


def pack(packer, numbers):
    flat = [np.concatenate(gradients(number)) for number in numbers]
    wrap = placer(packer._kernels)
    return [
        bits(packer.encode(wrap(values), number, 0.1, 0.0))
        for number, values in zip(numbers, flat, strict=True)
    ]


@pytest.mark.parametrize("name", ["gd", "dgs", "dgc"])
@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0), (1, 1)])
def test_a_checkpoint_is_the_same_wherever_it_comes_from(device, name, before, after, tmp_path):
    bodies = (NUMPY, device)
    whole = packing(NUMPY, name)
    expected = pack(whole, range(1, 7))
    first, second = packing(bodies[before], name), packing(bodies[after], name)
    assert pack(first, range(1, 4)) == expected[:3]
    Checkpoints.in_folder(tmp_path).save(3, first.save())
    second.restore(Checkpoints.in_folder(tmp_path).load_latest()[1], fits=True)
    assert pack(second, range(4, 7)) == expected[3:]
    kinds = {type(array) for array in memories(second._codec_states[0])["residual"]}
    assert kinds == {kind_of(device) if after else np.ndarray}


def test_xla_compiles_selection_where_a_gpu_is(monkeypatch):
    tf = pytest.importorskip("tensorflow")
    from thinwire.ops.kernels import tensorflow_select as bodies

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["one"])
    found = importlib.util.find_spec("thinwire.ops.kernels.device")
    there = importlib.util.module_from_spec(found)
    found.loader.exec_module(there)
    body = bodies._top_k
    compiled = there.fused(*body.input_signature)(body.python_function)
    x = gradients(1)[0]
    given = x, *bodies.plan(x.size, 300)
    assert "HloModule" in compiled.experimental_get_compiler_ir(*given)(stage="hlo")
    for one, other in zip(NUMPY.top_k(x, 300), compiled(*given), strict=False):
        np.testing.assert_array_equal(one, other)


def test_arithmetic_is_numpys(device):
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal(9, np.float32) for _ in range(2))
    where = np.array([1, 4])
    ours, theirs = placer(device)(x), x.copy()
    alias = ours.value
    for array, other in ((ours, placer(device)(y)), (theirs, y)):
        array += other
        array[where] *= np.float32(3)
        array[:] -= other
        array *= np.float32(0.3)
        array[where] = 0
    np.testing.assert_array_equal(np.asarray(ours), theirs)
    np.testing.assert_array_equal(alias, x)
    np.testing.assert_array_equal(np.asarray(np.float32(2) * ours[2:5]), 2 * theirs[2:5])
    assert ours.size == 9 and ours[where].size == 2
    with pytest.raises(IndexError, match=r"expected positions or \[:\]"):
        ours[2:5] = 0


@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-25, 0.0])
def test_norms_keep_their_range(device, scale):
    x = np.random.default_rng(1).standard_normal(1000).astype(np.float32) * np.float32(scale)
    wanted = float(np.linalg.norm(x.astype(np.float64)))
    for bodies in (NUMPY, device):
        assert bodies.norm(placer(bodies)(x)) == pytest.approx(wanted, rel=1e-5)
