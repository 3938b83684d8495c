"""The last line of a failed run names the reason and the fix, for any other exit codes."""

import io
import json
import logging
import os
import signal
import sys
import types

import pytest
from absl import logging as absl_logging

from tests.command_line import given
from tests.thinwire.launcher.scripted_nodes import (
    ALL,
    ENDLESS,
    FakeLauncher,
    Script,
    pretending,
)
from thinwire.flags.run import read_run
from thinwire.launcher import role, run
from thinwire.launcher.failures import COMPLETED, FAILURE, Cause, Failure
from thinwire.runtime.run.directory import update_of_failure

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: oh no'
OWN = Failure(1, TRACEBACK, reason="train.py:3: ValueError: oh no")
REFUSED = Failure(2, "train.py:9: --x=1: expected 2. Give 2.", Cause.THINWIRE)
LOST = Failure(3, "nothing answers at host:1", Cause.LOST)
OTHER_RUN = Failure(2, "--run_dir=r holds another run. Give --overwrite.", Cause.OTHER_RUN)
ELSEWHERE = Failure(1, "the run has ended (script_failed): ValueError: oh no", Cause.ELSEWHERE)
PS_LINES = (
    "2026-01-01 00:00:00,000 ps-0 E cannot write x: No space left. Free space on that disk.",
    "2026-01-01 00:00:00,000 ps-0 W lost a stream",
)


def line_of(failure):
    document = {
        "code": failure.code,
        "text": failure.text,
        "cause": failure.cause.value,
        "reason": failure.reason,
    }
    return FAILURE + json.dumps(document)


class FollowedLauncher(FakeLauncher):
    """A launcher of nodes that write their lines to stderr just before they end."""

    def __init__(self, scripts, lines, **behaviour):
        super().__init__(scripts, **behaviour)
        self.lines = dict(lines)

    def tend(self):
        super().tend()
        for name, process in self.processes.items():
            if process.code is not None:
                for line in self.lines.pop(name, ()):
                    self.nodes[name].output.on_line(line, True)


@pytest.fixture
def ended(monkeypatch, tmp_path):
    """Return a function: scripts, lines -> (exit code, lines of stderr)."""
    monkeypatch.setattr(role, "_TURN_SECONDS", 0)
    monkeypatch.setattr(role, "_ALONE_SECONDS", 0)
    rules = role.EndRules(True, mendable=(), workers_first_seconds=0, kill_after_seconds=0.02)
    monkeypatch.setattr(run, "RULES", rules)
    (tmp_path / "train.py").write_text("")

    def run_it(scripts, lines=(), **behaviour):
        launcher = FollowedLauncher(dict.fromkeys(ALL, ENDLESS) | scripts, lines, **behaviour)
        module = types.SimpleNamespace(prepare=lambda *_: launcher)
        monkeypatch.setitem(sys.modules, "followed_launcher", module)
        monkeypatch.setitem(role.LAUNCHERS, "local", "followed_launcher:prepare")
        screen, handler = io.StringIO(), absl_logging.get_absl_handler().python_handler
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setattr(handler, "stream", screen)
        usual = ("--type_node=Cluster", "--nb_workers=2", "--nb_ps=2", "--model_from=worker")
        root = logging.getLogger()
        root.addHandler(absl_logging.get_absl_handler())
        absl_logging.set_verbosity(absl_logging.INFO)
        try:
            with given(*usual, f"--run_dir={tmp_path / 'run'}", "--method=asgd"):
                code = run.main(read_run(), [str(tmp_path / "train.py")])
        finally:
            root.removeHandler(absl_logging.get_absl_handler())
        return code, screen.getvalue().splitlines()

    return run_it


@pytest.mark.parametrize(
    ("scripts", "lines", "code", "words"),
    [
        (
            {"worker-2": Script(2, 1), "worker-1": Script(4, -15), "ps-0": Script(5, 130)},
            {"worker-2": [line_of(OWN)]},
            1,
            ("worker 2: train.py:3: ValueError: oh no. Correct the script", "worker-2.out"),
        ),
        (
            {"worker-1": Script(2, 2)},
            {"worker-1": [line_of(REFUSED)]},
            2,
            ("worker 1: train.py:9: --x=1: expected 2. Give 2.",),
        ),
        (
            {"worker-1": Script(2, 2)},
            {"worker-1": [line_of(OTHER_RUN)]},
            2,
            ("--run_dir=r holds another run. Give --overwrite.",),
        ),
        # Another worker only reports the end caused by the first one, and its line comes first.
        (
            {"worker-1": Script(2, 1), "worker-2": Script(2, 1)},
            {"worker-1": [line_of(ELSEWHERE)], "worker-2": [line_of(OWN)]},
            1,
            ("worker 2: train.py:3: ValueError: oh no. Correct",),
        ),
        # The worker that failed is another launcher's.
        (
            {"worker-1": Script(2, 1)},
            {"worker-1": [line_of(ELSEWHERE)]},
            1,
            ("(script_failed): ValueError: oh no",),
        ),
        (
            {"ps-0": Script(2, 2), "worker-1": Script(3, 3)},
            {"ps-0": PS_LINES, "worker-1": [line_of(LOST)]},
            2,
            ("ps-0: cannot write x: No space left. Free space on that disk.",),
        ),
        ({"ps-1": Script(2, -9)}, {}, 3, ("ps-1 was killed by SIGKILL; the same command resumes",)),
        ({"ps-1": Script(2, 1)}, {}, 1, ("ps-1 failed with exit code 1; its log is", "ps-1.log")),
        (
            {"worker-1": Script(2, -9), "worker-2": Script(2, -9)},
            {},
            3,
            ("every worker was killed (SIGKILL); the same command resumes the run",),
        ),
        (
            {"worker-1": Script(2, 3), "worker-2": Script(2, 3)},
            {"worker-1": [line_of(LOST)], "worker-2": [line_of(LOST)]},
            3,
            ("nothing answers at host:1. The same command resumes",),
        ),
        (
            {"worker-1": Script(2, 7)},
            {},
            7,
            ("worker 1: the script left with exit code 7 and reported nothing", "Correct"),
        ),
        ({"worker-1": Script(2, 0)}, {}, 1, ("left with exit code 0 before its end",)),
    ],
)
def test_the_last_line_is_the_reason_and_what_to_do(ended, scripts, lines, code, words):
    got, shown = ended(scripts, lines)
    assert got == code, shown
    assert all(word in shown[-1] for word in words), shown
    assert any("exit codes: {" in line for line in shown[:-1])


def test_a_traceback_is_shown_once_above(ended):
    _, shown = ended({"worker-2": Script(2, 1)}, {"worker-2": [line_of(OWN)]})
    assert sum("Traceback" in line for line in shown) == 1
    assert sum("ValueError: oh no" in line for line in shown) == 2


def test_a_reason_of_one_line_is_shown_once(ended):
    _, shown = ended({"worker-2": Script(2, 2)}, {"worker-2": [line_of(REFUSED)]})
    assert sum("expected 2" in line for line in shown) == 1


def test_an_interruption_is_the_last_line_whatever_scripts_make_of_it(ended):
    def interrupt(turn):
        if turn == 2:
            os.kill(os.getpid(), signal.SIGINT)

    code, shown = ended({}, {"worker-1": [line_of(OWN)]}, at_turn=interrupt)
    assert code == 130 and shown[-1].endswith(
        "the run is interrupted; the same command resumes the run"
    )


def test_a_warning_of_all_workers_is_shown_once_and_kept_by_each(ended, tmp_path):
    warning, own = "train.py:3: UserWarning: take care", "train.py:4: UserWarning: of worker 2"
    lines = {"worker-2": [warning, own, COMPLETED], "worker-1": [warning, COMPLETED]}
    code, shown = ended(dict.fromkeys(ALL, Script(3, 0)), lines)
    assert code == 0
    assert [line for line in shown if "UserWarning" in line] == [
        f"[worker 1] {warning}",
        f"[worker 2] {own}",
    ]
    assert (tmp_path / "run" / "logs" / "worker-2.out").read_text() == f"{warning}\n{own}\n"


def test_a_failure_before_an_interruption_is_the_last_line(ended):
    def interrupt(turn):
        if turn == 4:
            os.kill(os.getpid(), signal.SIGINT)

    scripts = dict.fromkeys(ALL, Script(10**9, on_signal="nothing"))
    lines = {"worker-1": [line_of(REFUSED)]}
    _, shown = ended(scripts | {"worker-1": Script(2, 2)}, lines, at_turn=interrupt)
    assert shown[-1].endswith("expected 2. Give 2.")


@pytest.mark.parametrize("failure", [OWN, REFUSED, LOST, OTHER_RUN, ELSEWHERE])
def test_a_failure_is_read_as_it_was_written(failure, capsys):
    failure.report()
    assert Failure.read("before" + capsys.readouterr().err.rstrip("\n")) == ("before", failure)


def test_a_cluster_of_roles_names_the_node(monkeypatch, tmp_path, caplog):
    cluster = pretending(monkeypatch, tmp_path)
    with caplog.at_level(logging.INFO):
        code, _ = cluster(dict.fromkeys(ALL, ENDLESS) | {"ps-1": Script(2, 5)})
    assert code == 5
    assert "ps-1 failed with exit code 5; its log is" in caplog.messages[-1]


def test_what_a_script_makes_of_an_interruption_is_no_failure(ended, tmp_path):
    """Otherwise the same command would start the run again instead of resuming it."""

    def interrupt(turn):
        if turn == 2:
            os.kill(os.getpid(), signal.SIGINT)

    code, _ = ended({"worker-1": Script(10**9, 7)}, at_turn=interrupt)
    assert code == 130
    assert update_of_failure(tmp_path / "run") is None


def test_what_a_script_makes_of_the_end_of_its_ps_is_no_failure(ended, tmp_path):
    ended({"ps-1": Script(2, -9), "worker-1": Script(10**9, 7)})
    assert update_of_failure(tmp_path / "run") is None
    ended({"worker-1": Script(2, 7)})
    assert update_of_failure(tmp_path / "run") == 0
