"""--policy: what a file may hold, what is refused, its digest, and where the flag is found."""

import pytest

from tests.own_policies import loaded
from tests.virtual.run import MiniRun
from tests.virtual.toy import method
from thinwire.cli import help_text
from thinwire.flags import policy_file
from thinwire.flags.environment import VARIABLE
from thinwire.ops.methods.method import METHODS
from thinwire.ops.policy import PolicyFailed
from thinwire.ops.sync.base import ArrivalToken
from thinwire.ops.sync.rounds import Rounds
from thinwire.ops.types import ConfigurationError
from thinwire.ops.weighting.registry import WEIGHTINGS
from thinwire.ps.core.serialization import from_plain, to_plain
from thinwire.runtime.run import own_policies

HALF = """
import dataclasses
from thinwire.ops.methods.method import METHODS as BUILT_IN
from thinwire.ops.options import integer, number
from thinwire.ops.policy import setting
from thinwire.ops.sync.base import SyncRule
from thinwire.ops.weighting.by_staleness import StatelessWeighting

@dataclasses.dataclass(frozen=True)
class Half(StatelessWeighting):
    half_life: float = setting(number("half_life", 2.0, "Half life.", "updates", low=0.5))
    def weigh(self, arrivals, context, state):
        return arrivals, state

POLICIES = {"weighting": {"half": Half}}
"""

RULE = """
import dataclasses
from thinwire.ops.sync.base import Ready, SyncRule
from thinwire.ops.sync.groups import Groups

@dataclasses.dataclass(frozen=True)
class Patient(SyncRule):
    groups: Groups
    seed: int = 0
    def ready(self, rounds, now):
        rounds.state["calls"] = rounds.state.get("calls", 0) + 1
        return Ready([rounds.oldest(rounds.live())] if rounds.is_complete(0) else ())
    def may_proceed(self, rounds, worker):
        return True

POLICIES = {"sync": {"patient": Patient}}
"""


def file_of(folder, text, name="mine.py"):
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_s_policy_and_method_are_like_built_in_ones(tmp_path):
    text = HALF + 'METHODS = {"halved": BUILT_IN["asgd"] | {"weighting": "half", "half_life": 3.0}}'
    with loaded(file_of(tmp_path, text)) as own:
        assert own.names == ("weighting=half", "method=halved") and own.methods == ("halved",)
        made = method("halved")
        assert made.weighting.half_life == 3.0
        assert ("weighting.half_life", "3.0") in made.fingerprint()
        assert method("halved", half_life=4.0).weighting.half_life == 4.0
        options = {option.name: option for topic in help_text.TOPICS for option in topic.options}
        assert "half" in options["weighting"].values and "halved" in options["method"].values
        assert "3.0 with halved" in options["half_life"].unset
        with pytest.raises(ConfigurationError, match="--half_life=4.0 is for --weighting=half"):
            method("asgd", half_life=4.0)
        with pytest.raises(ConfigurationError, match="--half_life=0.1"):
            method("halved", half_life=0.1)
    assert "half" not in WEIGHTINGS and "halved" not in METHODS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "defines no policy"),
        ("raise RuntimeError('no')", "failed on import: RuntimeError: no"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("POLICIES = 3", "POLICIES = "),
        ('POLICIES = {"colour": {}, "x": {}}', "'colour'.*pacer, codec"),
        (HALF.replace('"half"', '"my half"'), "'my half'.*letters"),
        (HALF.replace('"half_life"', '"staleness_window"'), "--staleness_window exists already"),
        (HALF.replace("frozen=True", "frozen=False"), "frozen dataclass"),
        (HALF.replace("(StatelessWeighting)", ""), "frozen dataclass"),
        (HALF.replace("def weigh", "def weight"), "Half lacks weigh"),
        (HALF.replace("Half(StatelessWeighting)", "Half(SyncRule)"), "Half lacks init"),
        (HALF + "Half.need_copies = True", "has need_copies.*needs_copies"),
        (RULE.replace("groups: Groups", "group: Groups"), "lacks the field groups"),
        (RULE.replace("def may_proceed", "def may_procede"), "has may_procede.*may_proceed"),
        ('METHODS = {"bsp": {}}', "--method=bsp exists already"),
        ('METHODS = {"mine": {"sync": "bsp"}}', "lacks pacer, codec"),
        (HALF + 'METHODS = {"m": BUILT_IN["asgd"] | {"sync": "half"}}', "'half'.*bsp"),
        (HALF + 'METHODS = {"m": BUILT_IN["asgd"] | {"speed": 3}}', "'speed'"),
        (HALF + 'METHODS = {"m": BUILT_IN["asgd"] | {"half_life": 0.1}}', "--half_life=0.1"),
    ],
)
def test_what_cannot_be_added_is_refused_and_nothing_is_added(tmp_path, text, words):
    before = dict(WEIGHTINGS), dict(METHODS)
    path = file_of(tmp_path, text)
    with (
        pytest.raises(ConfigurationError, match=f"--policy={path}.*{words}") as caught,
        loaded(path),
    ):
        pass
    assert (dict(WEIGHTINGS), dict(METHODS)) == before
    assert "expected" in str(caught.value) or "Run the file" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("rounds.live()", "rounds.alive()"), "mine.py:12, Patient.ready: AttributeError.*live"),
        (
            ("Ready([rounds.oldest(rounds.live())]", "Ready(rounds.oldest(rounds.live())"),
            "tuple of",
        ),
        (("return Ready(", "return list("), "Patient.ready returned .*expected Ready"),
        (("if rounds.is_complete(0)", "if False"), "although all 2 workers wait"),
        (("return True", "return 1 / 0"), "mine.py:14, Patient.may_proceed: ZeroDivisionError"),
    ],
)
def test_a_failing_policy_ends_the_run_with_its_line(tmp_path, change, words):
    with loaded(file_of(tmp_path, RULE.replace(*change))):
        run = MiniRun(method("bsp", 2, overrides={"sync": "patient"}), iter_max=6)
        with pytest.raises(PolicyFailed, match=words):
            run.run()


def test_a_weighting_must_return_arrivals_and_state(tmp_path):
    with loaded(file_of(tmp_path, HALF.replace("return arrivals, state", "return arrivals"))):
        run = MiniRun(method("asgd", 2, overrides={"weighting": "half"}), iter_max=6)
        with pytest.raises(PolicyFailed, match="Half.weigh returned .*expected a pair"):
            run.run()


def test_a_flag_of_every_node_is_refused_for_a_policy(tmp_path):
    path = file_of(tmp_path, HALF.replace('"half_life"', '"learning_rate"'))
    with pytest.raises(ConfigurationError, match="--learning_rate exists already"):
        policy_file.load_named([f"--policy={path}"], {}, help_text.TOPICS)


def test_a_rule_has_a_state_of_its_own_and_the_run_s_seed(tmp_path):
    with loaded(file_of(tmp_path, RULE)):
        chosen = method("bsp", 2, overrides={"sync": "patient"}, seed=7)
        assert chosen.sync.seed == 7
        rounds = Rounds(chosen.sync)
        for worker in (1, 2):
            rounds.join(worker)
        rounds.advance(0.0)
        rounds.submit(ArrivalToken(1, 1), 1.0)
        rounds.advance(1.0)
        calls = rounds.state["calls"]
        assert calls >= 2
        for soft in (False, True):
            again = Rounds(chosen.sync)
            saved = {
                key: value
                for each in (False, soft)
                for key, value in rounds.state_dict(each).items()
            }
            again.load_state_dict(from_plain(to_plain(saved)), soft)
            assert again.state == {"calls": calls}
        rounds.state["calls"] = 0
        assert again.state == {"calls": calls}


def test_no_file_replaces_a_built_in_policy(tmp_path):
    with (
        pytest.raises(ConfigurationError, match="--weighting=inverse exists already"),
        loaded(file_of(tmp_path, HALF.replace('"half"', '"inverse"'))),
    ):
        pass


def test_a_missing_file_and_a_second_file_are_refused(tmp_path):
    path = file_of(tmp_path, HALF)
    with pytest.raises(ConfigurationError, match="no Python file"):
        own_policies.load(str(tmp_path / "none.py"))
    with loaded(path) as own:
        assert own_policies.load(str(path)) is own is own_policies.loaded()
        with pytest.raises(ConfigurationError, match="already loaded"):
            own_policies.load(str(file_of(tmp_path, HALF, "other.py")))


def test_the_digest_is_of_the_file_and_of_what_it_imports_beside_it(tmp_path):
    def digest(folder, helper, name="mine.py"):
        folder.mkdir()
        (folder / "own_helper_of_mine.py").write_text(helper)
        (folder / "unused.py").write_text(str(folder))
        with loaded(file_of(folder, "import own_helper_of_mine\n" + HALF, name)) as own:
            assert own.beside == {"own_helper_of_mine.py": folder / "own_helper_of_mine.py"}
            return own.digest

    first = digest(tmp_path / "a", "X = 1\n")
    assert first == digest(tmp_path / "b", "X = 1\n", "renamed.py")
    assert first != digest(tmp_path / "c", "X = 2\n")


KINDS = {"policy": "text", "nb_workers": "integer", "journal": "switch", "quiet": "switch"}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--policy=a.py"], "a.py"),
        (["--policy", "a.py", "--policy=b.py"], "b.py"),
        (["--nb_workers", "2", "-policy=a.py", "train.py", "--policy=script's"], "a.py"),
        (["--quiet", "--policy=a.py"], "a.py"),
        (["--own_number", "3", "--policy=a.py"], "a.py"),
        (["--noquiet", "train.py", "--policy=script's"], None),
        (["--", "--policy=script's"], None),
        (["-m", "package", "--policy=script's"], None),
        ([], None),
    ],
)
def test_the_flag_is_found_before_the_script(words, found):
    assert policy_file.value_of("policy", words, KINDS) == found


def test_the_flag_may_be_in_a_flag_file_or_in_the_environment(tmp_path):
    path = file_of(tmp_path, HALF)
    (tmp_path / "flags").write_text(f"--policy={path}\n")
    topics = help_text.TOPICS
    with loaded(path) as own:
        words = [f"--flagfile={tmp_path / 'flags'}"]
        assert policy_file.load_named(words, {}, topics) is own
        assert policy_file.load_named([], {VARIABLE: f"--policy={path}"}, topics) is own
    assert policy_file.load_named(["--flagfile=missing"], {VARIABLE: "'"}, topics) is None
