"""Checks that every policy must pass; a new registry row is tested without further code.

A policy is built as a user gets it, by `compose` with its interface's flag, and driven through its
interface (`tests.ops.drivers`).
"""

import dataclasses
import importlib
import json
import math
import pathlib
import subprocess
import sys
import typing

import numpy as np
import pytest

from tests.ops.drivers import DRIVERS, policy_of
from thinwire.ops.codecs.base import Codec
from thinwire.ops.codecs.registry import CODECS
from thinwire.ops.downlink.registry import DOWN_CODECS
from thinwire.ops.methods.method import INTERFACES
from thinwire.ops.optimizers.outer import OUTER_OPTIMIZERS, SERVER_OPTIMIZERS
from thinwire.ops.pacing.registry import PACERS
from thinwire.ops.routing.registry import ROUTERS
from thinwire.ops.sync.groups import AutoGroups
from thinwire.ops.sync.rule import SYNC_RULES
from thinwire.ops.types import ConfigurationError
from thinwire.ops.weighting.registry import WEIGHTINGS
from thinwire.runtime.persistence.checkpoint import Checkpoints

ROOT = pathlib.Path(__file__).resolve().parents[2]
TURNS = 8

REGISTRIES = {
    "pacer": PACERS,
    "codec": CODECS,
    "down_codec": DOWN_CODECS,
    "router": ROUTERS,
    "sync": SYNC_RULES,
    "weighting": WEIGHTINGS,
    "server_optimizer": SERVER_OPTIMIZERS,
}
assert tuple(REGISTRIES) == INTERFACES
WRAPPED = ["dense+feedback", "topk+feedback", "random_k+feedback", "dgs+carried", "dgc+all"]
WRAPPED += ["powersgd+rank1", "chunked_topk+decay", "dense+sign", "topk+means"]
EVERY = [(interface, name) for interface, registry in REGISTRIES.items() for name in registry]
EVERY += [("codec", name) for name in WRAPPED]
EVERY += [("sync", "bsp+drawn")]
EVERY += [("router", "dgt+small"), ("router", "dgt+lossy")]
EVERY += [("server_optimizer", f"{name}+changes") for name in OUTER_OPTIMIZERS]
EVERY += [("server_optimizer", "sgd+changes"), ("server_optimizer", "momentum+changes")]
every_policy = pytest.mark.parametrize(("interface", "name"), EVERY)


def drive(driver, state, numbers):
    outputs = []
    for number in numbers:
        output, state = driver.turn(state, number)
        outputs.append(bits(output))
    return outputs, state


def bits(value):
    """A comparable form of plain data, or of objects that hold plain data; exact to the bit."""
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
    Checkpoints.in_folder(folder).save(1, state)  # rejects values that are not plain data
    return Checkpoints.in_folder(folder).load_latest()[1]


@every_policy
def test_a_restored_policy_goes_on_bit_for_bit(interface, name, tmp_path):
    driver = DRIVERS[interface](interface, name)
    outputs, end = drive(driver, driver.begin(), range(1, TURNS + 1))
    first, middle = drive(driver, driver.begin(), range(1, TURNS // 2 + 1))
    saved = driver.save(middle)
    restored = through_a_checkpoint(saved, tmp_path)
    assert bits(restored) == bits(saved)

    other = DRIVERS[interface](interface, name)
    second, last = drive(other, other.load(restored), range(TURNS // 2 + 1, TURNS + 1))
    assert first + second == outputs
    assert bits(other.save(last)) == bits(driver.save(end))


@every_policy
def test_what_init_makes_is_plain(interface, name, tmp_path):
    policy = policy_of(interface, name)
    if interface in ("down_codec", "weighting"):
        state = policy.init(24)
    elif interface == "server_optimizer" and not policy.traits.keeps_sparse:
        return  # Keras's slots are plain once the ShardModel has saved them
    else:
        driver = DRIVERS[interface](interface, name)
        state = driver.save(driver.begin())
    assert bits(through_a_checkpoint(state, tmp_path)) == bits(state)


@every_policy
def test_a_policy_is_a_frozen_dataclass_of_hyper_parameters(interface, name):
    policy = policy_of(interface, name)
    assert dataclasses.is_dataclass(policy) and policy.__dataclass_params__.frozen
    assert policy == policy_of(interface, name) and hash(policy) == hash(policy_of(interface, name))
    json.dumps(dataclasses.asdict(policy))  # flags and the fingerprint can spell every value
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.anything = 1


#: Values that no hyper-parameter of that type takes.
BAD_VALUES = {
    float: (math.nan, -1.0),
    int: (-1,),
    int | None: (-1,),
    float | None: (math.nan, -1.0),
    str | None: (),  # the name of a file
    str: ("no such value",),
    bool: (),
    Codec: (),  # the policy inside a wrapper
    AutoGroups | None: (),  # the inner policy rejects bad values itself
    tuple[tuple[int, ...], ...] | None: (),  # read_draws refuses a bad line
    tuple[tuple[int, ...], ...]: (((1,), (1,)), ((1,), ()), ((0, 1),)),
}


@every_policy
def test_bad_hyper_parameters_are_refused(interface, name):
    for policy in layers(policy_of(interface, name)):
        types = typing.get_type_hints(type(policy))
        for field in dataclasses.fields(policy):
            if not field.init or field.name == "pass_steps":  # the run sets it, not a flag
                continue
            for bad in BAD_VALUES[types[field.name]]:
                with pytest.raises(ConfigurationError) as caught:
                    dataclasses.replace(policy, **{field.name: bad})
                    pytest.fail(f"--{interface}={name} takes {field.name}={bad!r}")
                assert "expected" in str(caught.value) or field.name in str(caught.value)


def layers(policy):
    """The policy, the policy inside its wrapper, and so on."""
    yield policy
    if hasattr(policy, "inner"):
        yield from layers(policy.inner)


@pytest.mark.parametrize(
    ("interface", "name"), [row for row in EVERY if row[0] in ("codec", "router")]
)
def test_undelivered_takes_nothing_back_where_nothing_was_kept(interface, name):
    driver = DRIVERS[interface](interface, name)
    sent, state = driver.turn(driver.begin(), 1)
    kept_nothing = bits(state) == {}
    after = driver.undelivered(sent, state)
    # With a residual the values differ now, but the state is the same.
    assert bits(after) == {} if kept_nothing else after.keys() == state.keys()


def test_policy_modules_import_neither_tensorflow_nor_numpy():
    modules = sorted({type(policy_of(interface, name)).__module__ for interface, name in EVERY})
    code = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "    heavy = {'tensorflow', 'keras', 'numpy'} & set(sys.modules)\n"
        "    assert not heavy, f'{module} imports {heavy}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@every_policy
def test_help_texts_exist(interface, name):
    policy = policy_of(interface, name)
    text = type(policy).__doc__
    assert text and not text.startswith(f"{type(policy).__name__}("), "the class says nothing"
    module = importlib.import_module(type(policy).__module__)
    assert module.__doc__
    pages = [
        (ROOT / "docs" / page).read_text() for page in ("guide/methods.md", "guide/architecture.md")
    ]
    plain = name.partition("+")[0]
    assert any(f"`{plain}`" in page for page in pages), "the documentation does not know it"
