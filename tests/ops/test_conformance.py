"""What every policy of every seam owes the rest; a new row of a registry is tested as it stands.

A policy is built as a user gets it, by `compose` with its seam's flag. Codecs are driven directly,
the policies of the PS through the `ShardModel` that holds them.
"""

import dataclasses
import importlib
import json
import math
import pathlib
import random
import subprocess
import sys
import typing

import numpy as np
import pytest

from ops import codecs, down_codecs, kernels, methods, pacing, routing, sync, weighting
from ops.checkpoint import Checkpoints
from ops.schedule import Budget, Schedule
from ops.server_update import OPTIMIZERS
from ops.types import ConfigurationError, EncodeContext, ModelSpec, TensorSpec, Update
from ops.weighting import Arrival
from ps.shard_model import ShardModel
from tests.harness import method

ROOT = pathlib.Path(__file__).resolve().parents[2]
BODIES = kernels.load("numpy")
SPEC = ModelSpec((TensorSpec("kernel", (9, 5)), TensorSpec("one", (1,)), TensorSpec("zero", (6,))))
WORKERS = 3
TURNS = 8

REGISTRIES = {
    "pacer": pacing.REGISTRY,
    "codec": codecs.REGISTRY,
    "down_codec": down_codecs.REGISTRY,
    "router": routing.REGISTRY,
    "sync": sync.REGISTRY,
    "weighting": weighting.REGISTRY,
    "server_optimizer": OPTIMIZERS,
}
assert tuple(REGISTRIES) == methods.SEAMS
EVERY = [(seam, name) for seam, registry in REGISTRIES.items() for name in registry]
every_policy = pytest.mark.parametrize(("seam", "name"), EVERY)


def composed(seam, name):
    """A method with this value of the seam, hyper-parameters away from trivial ones."""
    groups = ((1, 3), (2,)) if (seam, name) == ("sync", "gsp") else None
    return method(
        "asgd", nb_workers=WORKERS, compression_rate=0.3, local_steps=3, window=4, groups=groups,
        overrides={seam: name},
    )  # fmt: skip


def policy_of(seam, name):
    return getattr(composed(seam, name), {"server_optimizer": "server"}.get(seam, seam))


# -- one driver a seam, or several: makes a state, and takes it one turn further ------------------


class Driver:
    """What most policies need: their state is what `init` made, and is saved as it is."""

    def __init__(self, seam, name):
        self.policy = policy_of(seam, name)

    def begin(self):
        return {}

    def turn(self, state, number):
        raise NotImplementedError

    def save(self, state):
        return state

    def load(self, saved):
        return saved


class Codec(Driver):
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


class Pacer(Driver):
    """Numbers only."""

    def turn(self, state, number):
        return self.policy.push_now(number), state


class Router(Driver):
    """A router that has one class of service has no verb."""

    def turn(self, state, number):
        return None, state


class Sync(Driver):
    """Workers join, push, leave and return at random."""

    def begin(self):
        state = self.policy.init()
        for worker in range(1, WORKERS + 1):
            state = self.policy.join(worker, state)
        return self.policy.advance(state)[2]

    def turn(self, state, number):
        rng = random.Random(number)
        worker = rng.randint(1, WORKERS)
        if worker in state["live"]:
            waits = worker in state["pushed"] or worker in state["held"]
            verb = self.policy.leave if waits or rng.random() < 0.2 else self.policy.push
        else:
            verb = self.policy.join
        released, free, state = self.policy.advance(verb(worker, state))
        return (released, free), state


class OnShard(Driver):
    """Down codecs, weightings, server optimizers: pushes of stale workers, replies to them.

    The state is a whole ShardModel: it knows how Keras's slots are saved.
    """

    size = 24

    def __init__(self, seam, name):
        self.method = composed(seam, name)

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
        gathered = [state.gather(base) for base in (None, state.version, max(0, number - 2))]
        return (kept, gathered, state.learning_rate), state

    def update(self, rng):
        if rng.random() < 0.2:
            return Update(None, rng.standard_normal(self.size, np.float32))
        indices = np.flatnonzero(rng.random(self.size) < 0.2)
        return Update(indices, rng.standard_normal(len(indices), np.float32))

    def save(self, state):
        return state.save()

    def load(self, saved):
        shard = self.begin()
        shard.restore(saved)
        return shard


DRIVERS = {
    "pacer": Pacer,
    "codec": Codec,
    "down_codec": OnShard,
    "router": Router,
    "sync": Sync,
    "weighting": OnShard,
    "server_optimizer": OnShard,
}


def drive(driver, state, numbers):
    outputs = []
    for number in numbers:
        output, state = driver.turn(state, number)
        outputs.append(bits(output))
    return outputs, state


def bits(value):
    """A picture of plain data, or of what holds it, in which one bit makes a difference."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if dataclasses.is_dataclass(value):
        return [bits(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [bits(item) for item in value]
    return type(value), repr(value)


def through_a_checkpoint(state, folder):
    Checkpoints(folder).save(1, state)  # refuses what is not plain data
    return Checkpoints(folder).load_latest()[1]


@every_policy
def test_a_restored_policy_goes_on_bit_for_bit(seam, name, tmp_path):
    driver = DRIVERS[seam](seam, name)
    outputs, end = drive(driver, driver.begin(), range(1, TURNS + 1))
    first, middle = drive(driver, driver.begin(), range(1, TURNS // 2 + 1))
    saved = driver.save(middle)
    restored = through_a_checkpoint(saved, tmp_path)
    assert bits(restored) == bits(saved)

    other = DRIVERS[seam](seam, name)
    second, last = drive(other, other.load(restored), range(TURNS // 2 + 1, TURNS + 1))
    assert first + second == outputs
    assert bits(other.save(last)) == bits(driver.save(end))


@every_policy
def test_what_init_makes_is_plain(seam, name, tmp_path):
    policy = policy_of(seam, name)
    if seam in ("down_codec", "weighting"):
        state = policy.init(24)
    elif seam == "server_optimizer" and not policy.keeps_sparse:
        return  # Keras's slots are plain once the ShardModel has saved them: see above
    else:
        driver = DRIVERS[seam](seam, name)
        state = driver.save(driver.begin())
    assert bits(through_a_checkpoint(state, tmp_path)) == bits(state)


@every_policy
def test_a_policy_is_a_frozen_dataclass_of_hyper_parameters(seam, name):
    policy = policy_of(seam, name)
    assert dataclasses.is_dataclass(policy) and policy.__dataclass_params__.frozen
    assert policy == policy_of(seam, name) and hash(policy) == hash(policy_of(seam, name))
    json.dumps(dataclasses.asdict(policy))  # flags and the fingerprint can spell every value
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.anything = 1


#: Values that no hyper-parameter of that type takes.
BAD_VALUES = {
    float: (math.nan, -1.0),
    int: (-1,),
    int | None: (-1,),
    float | None: (math.nan, -1.0),
    str: ("no such value",),
    bool: (),
    tuple[tuple[int, ...], ...]: (((1,), (1,)), ((1,), ()), ((0, 1),)),
}


@every_policy
def test_bad_hyper_parameters_are_refused(seam, name):
    policy = policy_of(seam, name)
    types = typing.get_type_hints(type(policy))
    for field in dataclasses.fields(policy):
        for bad in BAD_VALUES[types[field.name]]:
            with pytest.raises(ConfigurationError) as caught:
                dataclasses.replace(policy, **{field.name: bad})
                pytest.fail(f"--{seam}={name} takes {field.name}={bad!r}")
            assert "expected" in str(caught.value) or field.name in str(caught.value)


@pytest.mark.parametrize(("seam", "name"), [row for row in EVERY if row[0] in ("codec", "router")])
def test_undelivered_takes_nothing_back_where_nothing_was_kept(seam, name):
    driver = DRIVERS[seam](seam, name)
    sent, state = driver.turn(driver.begin(), 1)
    if sent is None:
        assert not hasattr(driver.policy, "undelivered"), "teach its driver to route something"
        return
    kept_nothing = bits(state) == {}
    after = driver.policy.undelivered(sent, state)
    # With a residual the values are other ones now, but it is the same state.
    assert bits(after) == {} if kept_nothing else after.keys() == state.keys()


def test_policy_modules_import_neither_tensorflow_nor_numpy():
    modules = sorted({type(policy_of(seam, name)).__module__ for seam, name in EVERY})
    code = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "    heavy = {'tensorflow', 'keras', 'numpy'} & set(sys.modules)\n"
        "    assert not heavy, f'{module} imports {heavy}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *modules], cwd=ROOT, capture_output=True, text=True,
        timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@every_policy
def test_help_texts_exist(seam, name):
    policy = policy_of(seam, name)
    text = type(policy).__doc__
    assert text and not text.startswith(f"{type(policy).__name__}("), "the class says nothing"
    module = importlib.import_module(type(policy).__module__)
    assert module.__doc__
    pages = [(ROOT / "docs" / page).read_text() for page in ("METHOD.md", "ARCHITECTURE.md")]
    assert any(f"`{name}`" in page for page in pages), "the documentation does not know it"
