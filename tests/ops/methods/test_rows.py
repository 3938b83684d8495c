"""Rows of METHODS: their hyperparameters, and the flags that override the row."""

import pytest

from tests.virtual.toy import method
from thinwire.ops.methods import settings
from thinwire.ops.methods.method import INTERFACES, METHODS
from thinwire.ops.methods.settings import of_methods, owner_of, row_with

ROW = {
    "pacer": "fixed",
    "sync": "bsp",
    "server_optimizer": "momentum",
    "local_steps": 5,
    "local_optimizer": "adam",
    "global_lr": 0.5,
    "momentum": 0.75,
}


@pytest.fixture(autouse=True)
def local(monkeypatch):
    monkeypatch.setitem(METHODS, "local", METHODS["asgd"] | ROW)


def found(**choices):
    overrides = {name: choices.pop(name) for name in INTERFACES if name in choices}
    made = method("local", overrides=overrides, **choices)
    return made.pacer, made.local.optimizer, made.server.global_lr, made.server.momentum


def test_a_row_s_hyper_parameters_are_the_defaults():
    pacer, *others = found()
    assert pacer.local_steps == 5
    assert others == ["adam", 0.5, 0.75]
    made = method("local")
    rows = dict(made.fingerprint())
    assert (rows["pacer.local_steps"], rows["server.momentum"]) == ("5", "0.75")
    assert made.choices == {key: str(value) for key, value in METHODS["local"].items()}


def test_what_is_given_wins():
    pacer, *others = found(local_steps=7, local_optimizer="sgd", global_lr=1.0, momentum=0.0)
    assert pacer.local_steps == 7
    assert others == ["sgd", 1.0, 0.0]
    made = method("local", local_steps=7, momentum=0.0)
    assert (made.choices["local_steps"], made.choices["momentum"]) == ("7", "0.0")


def test_they_go_with_the_policy_that_they_belong_to():
    _, _, rate, momentum = found(server_optimizer="sgd")
    assert (rate, momentum) == (1.0, 0.0)
    pacer, optimizer, rate, momentum = found(pacer="esync")
    assert not hasattr(pacer, "local_steps")
    assert (optimizer, rate, momentum) == ("sgd", 0.5, 0.75)
    assert "local_steps" not in method("local", overrides={"pacer": "esync"}).choices


def test_without_a_row_s_word_a_policy_has_its_own_default():
    made = method("bsp", overrides={"pacer": "fixed"})
    assert (made.pacer.local_steps, made.server.global_lr, made.local.optimizer) == (1, 1.0, "sgd")


def test_what_one_belongs_to_may_be_a_hyper_parameter(monkeypatch):
    monkeypatch.setitem(settings._OWNED, "decay", "local_optimizer")
    monkeypatch.setitem(METHODS, "local", METHODS["local"] | {"decay": 0.1})
    assert row_with("local", {})["decay"] == 0.1
    assert "decay" not in row_with("local", {"local_optimizer": "sgd"})
    assert "decay" not in row_with("local", {"pacer": "every"})
    assert row_with("local", {"pacer": "every", "decay": 0.2})["decay"] == 0.2


def test_help_has_what_the_rows_have():
    assert "5 with local, " in of_methods("local_steps")
    assert of_methods("nothing") == ""


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"local"}))
def test_rows_are_in_order_and_of_known_names(name):
    row = list(METHODS[name])
    assert set(row[: len(INTERFACES)]) == set(INTERFACES)
    for key in row[len(INTERFACES) :]:
        assert row.index(owner_of(key)) < row.index(key)
