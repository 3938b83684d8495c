"""The example policy of docs/guide/adding_a_policy.md works; its code is read from the page."""

import __future__

import inspect
import re

import numpy as np
import pytest

from tests import documents
from tests.ops import test_conformance as conformance
from tests.virtual.run import MiniRun
from tests.virtual.toy import method
from thinwire.ops.codecs.registry import CODECS, build_codec
from thinwire.ops.downlink.registry import DOWN_CODECS
from thinwire.ops.kernels import load_kernels
from thinwire.ops.methods.method import METHODS
from thinwire.ops.optimizers import outer
from thinwire.ops.optimizers.script import ScriptUpdate, ScriptUpdates
from thinwire.ops.optimizers.server import OptimizerUpdate
from thinwire.ops.pacing import PACERS
from thinwire.ops.routing.registry import ROUTERS
from thinwire.ops.types import ConfigurationError, Update
from thinwire.ops.weighting import WEIGHTINGS, Arrival, ReleaseContext, by_staleness

NAME = ("weighting", "power")
SERVER = ("server_optimizer", "fedavgm")
PAGE = documents.ROOT / "docs" / "guide/adding_a_policy.md"
CODE = [
    block.text for block in documents.blocks() if block.page == PAGE and block.language == "python"
]


#: Interface as the page calls it -> the classes of its policies.
POLICIES = {
    "Pacer": PACERS.values(),
    "Codec": [type(build_codec(name, dict())) for name in CODECS],
    "Down codec": DOWN_CODECS.values(),
    "Router": ROUTERS.values(),
    "Weighting": WEIGHTINGS.values(),
    "ServerUpdate": [
        OptimizerUpdate,
        ScriptUpdate,
        ScriptUpdates,
        *outer.OUTER_OPTIMIZERS.values(),
    ],
}


def test_the_verbs_of_the_page_are_those_of_all_policies():
    table = {
        interface: verbs
        for interface, _, verbs in documents.rows(PAGE.read_text(), "interface", "file", "verb")
    }
    for interface, policies in POLICIES.items():
        told = re.findall(r"`(\w+)\((.*?)\)", table[interface])
        assert told, interface
        for name, words in told:
            for policy in policies:
                arguments = list(inspect.signature(getattr(policy, name)).parameters)
                assert ["self", *words.split(", ")] == arguments, f"{policy.__name__}.{name}"


def code_with(words):
    (found,) = [text for text in CODE if words in text]
    return found


def made(name, module, **more):
    """Return the page's class of a name, made in a copy of the module that the page names."""
    names = vars(module) | more
    flags = __future__.annotations.compiler_flag
    exec(compile(code_with(f"class {name}"), PAGE.name, "exec", flags), names)
    return names[name]


@pytest.fixture
def power(monkeypatch):
    """The weighting of the page, entered in the registry."""
    policy = made("Power", by_staleness, ConfigurationError=ConfigurationError)
    monkeypatch.setitem(WEIGHTINGS, "power", policy)
    return policy


@pytest.fixture
def fedavgm(monkeypatch):
    """The server optimizer of the page, entered in the registry."""
    policy = made("FedAvgM", outer)
    monkeypatch.setitem(outer.OUTER_OPTIMIZERS, "fedavgm", policy)
    return policy


def test_they_are_about_thirty_lines():
    assert len(code_with("class Power").splitlines()) <= 30
    assert len(code_with("class FedAvgM").splitlines()) <= 30


@pytest.mark.parametrize(
    "owed",
    [
        conformance.test_what_init_makes_is_plain,
        conformance.test_a_restored_policy_goes_on_bit_for_bit,
    ],
)
def test_it_keeps_its_state_like_all(power, owed, tmp_path):
    owed(*NAME, tmp_path)


def test_it_is_plain_and_refuses_bad_values_like_all(power):
    conformance.test_a_policy_is_a_frozen_dataclass_of_hyper_parameters(*NAME)
    conformance.test_bad_hyper_parameters_are_refused(*NAME)


def test_its_numeric_test_passes(power):
    names = {
        **{"np": np, "Power": power, "KERNELS": load_kernels("numpy"), "Update": Update},
        **{"Arrival": Arrival, "ReleaseContext": ReleaseContext},
    }
    exec(code_with("def test_power"), names)
    names["test_power_is_the_formula"]()


@pytest.mark.parametrize("codec", ["dense", "topk", "gd"])
def test_it_trains_with_other_policies(power, codec):
    chosen = method("asgd", 3, overrides={"weighting": "power", "codec": codec})
    run = MiniRun(chosen, iter_max=24, rate=0.05).run()
    assert not run.deadlocked()
    assert np.isfinite(run.theta).all()


def test_the_row_of_the_page_is_the_method_s():
    names = {"_DENSE_ASP": METHODS["asgd"]}
    exec("row = {" + code_with('"adacomp":') + "}", names)
    assert names["row"] == {"adacomp": METHODS["adacomp"]}


def test_the_server_optimizer_keeps_its_state_like_all(fedavgm, tmp_path):
    conformance.test_a_restored_policy_goes_on_bit_for_bit(*SERVER, tmp_path)
    conformance.test_a_policy_is_a_frozen_dataclass_of_hyper_parameters(*SERVER)
    conformance.test_bad_hyper_parameters_are_refused(*SERVER)


@pytest.mark.parametrize("choices", [{}, {"local_steps": 2}], ids=["gradients", "changes"])
def test_the_server_optimizer_is_momentum_sgd(fedavgm, choices):
    """SGD with Keras's momentum, for gradients and for changes of weights."""
    thetas = []
    for name in ("fedavgm", "momentum"):
        overrides = {"server_optimizer": name, "pacer": "fixed" if choices else "every"}
        chosen = method("bsp", 3, overrides=overrides, **choices)
        thetas.append(MiniRun(chosen, iter_max=12, rate=0.05).run().theta)
    np.testing.assert_allclose(*thetas, rtol=1e-5, atol=1e-6)
