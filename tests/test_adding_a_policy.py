"""The examples of docs/guide/adding_a_policy.md work; their code is read from the page."""

import inspect
import re
import subprocess
import sys

import numpy as np
import pytest

from tests import documents
from tests.ops import test_conformance as conformance
from tests.own_policies import loaded
from tests.virtual.run import MiniRun
from tests.virtual.toy import method
from thinwire.ops.methods import settings
from thinwire.ops.methods.method import INTERFACES, METHODS

PAGE = documents.ROOT / "docs" / "guide/adding_a_policy.md"
CODE = [
    block.text for block in documents.blocks() if block.page == PAGE and block.language == "python"
]
FILES = {
    match[1]: (match[2], text)
    for text in CODE
    if (match := re.search(r'^POLICIES = {"(\w+)": {"(\w+)":', text, re.MULTILINE))
}
every_example = pytest.mark.parametrize("interface", FILES)


def code_with(words):
    (found,) = [text for text in CODE if words in text]
    return found


@pytest.fixture
def example(request, tmp_path, interface):
    """Interface and name of the example, whose file is loaded as by --policy."""
    name, text = FILES[interface]
    (tmp_path / "mine.py").write_text(text)
    with loaded(tmp_path / "mine.py"):
        yield interface, name


def test_every_interface_has_an_example_of_thirty_lines():
    assert set(FILES) == set(INTERFACES)
    assert all(len(text.splitlines()) <= 36 for _, text in FILES.values())
    for _, text in FILES.values():
        (body,) = re.findall(r"^@dataclasses.*?(?=^POLICIES)", text, re.MULTILINE | re.DOTALL)
        assert len(body.strip().splitlines()) <= 30


@every_example
def test_it_keeps_its_state_like_all(example, tmp_path):
    conformance.test_what_init_makes_is_plain(*example, tmp_path)
    conformance.test_a_restored_policy_goes_on_bit_for_bit(*example, tmp_path)


@every_example
def test_it_is_plain_and_refuses_bad_values_like_all(example):
    conformance.test_a_policy_is_a_frozen_dataclass_of_hyper_parameters(*example)
    conformance.test_bad_hyper_parameters_are_refused(*example)


@every_example
@pytest.mark.parametrize(("name", "nb_ps"), [("asgd", 1), ("bsp", 2), ("adacomp", 1)])
def test_it_trains_with_other_policies(example, name, nb_ps):
    interface, value = example
    chosen = method(name, 3, overrides={interface: value})
    run = MiniRun(chosen, iter_max=24, nb_ps=nb_ps, rate=0.05).run()
    assert not run.deadlocked()
    assert np.isfinite(run.theta).all()


@every_example
def test_the_table_of_the_page_names_its_methods(interface):
    rows = documents.rows(PAGE.read_text(), "interface", "base class", "you write", "also possible")
    (words,) = [words for name, _, words, _ in rows if name.strip("`") == interface]
    for name, arguments in re.findall(r"`(\w+)\((.*?)\)`", words):
        policies = settings.REGISTRIES[interface].values()
        written = [
            getattr(policy, name, None)
            for policy in (getattr(each, "base", each) for each in policies)
        ]
        signatures = {tuple(inspect.signature(each).parameters) for each in written if each}
        assert ("self", *arguments.split(", ")) in signatures, name


def test_the_numeric_test_of_the_page_passes(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILES["weighting"][1])
    with loaded(tmp_path / "mine.py"):
        monkeypatch.setitem(sys.modules, "mine", sys.modules["thinwire_own_policies"])
        names = {}
        exec(code_with("def test_power"), names)
        names["test_power_is_the_formula"]()


def test_the_row_of_the_page_is_the_method_s():
    names = {"_DENSE_ASP": METHODS["asgd"]}
    exec("row = {" + code_with('"adacomp":') + "}", names)
    assert names["row"] == {"adacomp": METHODS["adacomp"]}


def test_the_commands_of_the_page_start(tmp_path):
    """Each command is tried with --dry_run or --helpfull, in a process of its own."""
    (tmp_path / "mine.py").write_text(FILES["weighting"][1])
    (tmp_path / "train.py").write_text("")
    commands = [c for c in documents.commands() if any("--policy=mine.py" in w for w in c.words)]
    assert len(commands) == 3
    for command in commands:
        end = ["--dry_run"] if command.words[0] == "run" else ["--helpfull"]
        words = [command.words[0], *end, *command.words[1:]]
        done = subprocess.run(
            [sys.executable, "-m", "thinwire", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "--power_exponent" in done.stdout or "power" in done.stdout


def test_a_row_s_value_goes_with_its_policy(tmp_path):
    (tmp_path / "mine.py").write_text(FILES["weighting"][1])
    with loaded(tmp_path / "mine.py"):
        assert method("dampened").weighting.power_exponent == 0.7
        assert "power_exponent" not in method("dampened", overrides={"weighting": "none"}).choices


@pytest.mark.parametrize("choices", [{}, {"local_steps": 2}], ids=["gradients", "changes"])
def test_the_server_optimizer_is_momentum_sgd(tmp_path, choices):
    """SGD with Keras's momentum, for gradients and for changes of weights."""
    (tmp_path / "mine.py").write_text(FILES["server_optimizer"][1])
    thetas = []
    with loaded(tmp_path / "mine.py"):
        for name in ("fedavgm", "momentum"):
            overrides = {"server_optimizer": name, "pacer": "fixed" if choices else "every"}
            chosen = method("bsp", 3, overrides=overrides, **choices)
            thetas.append(MiniRun(chosen, iter_max=12, rate=0.05).run().theta)
    np.testing.assert_allclose(*thetas, rtol=1e-5, atol=1e-6)
