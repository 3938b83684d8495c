"""A script's evaluator is restarted after a kill, and not after a failure."""

import json
import os
import signal
import sys

import pytest

from tests.thinwire.simulator.toy import run_of
from tests.virtual.toy import method
from thinwire.runtime.run.directory import LAUNCH_FILE
from thinwire.supervisor import script_evaluator
from thinwire.supervisor.script_evaluator import ScriptEvaluator

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes of Linux")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def evaluator(tmp_path, monkeypatch):
    """An evaluator with a process that waits."""
    monkeypatch.setattr(script_evaluator.supervisor_flags, "script_words", lambda run: [])
    script = tmp_path / "toy.py"
    script.write_text("")
    run = run_of(method("asgd", 2), 2, run_dir=tmp_path / "run")
    run.run_dir.mkdir()
    found = {"script": {"path": str(script), "arguments": [], "folder": str(tmp_path)}, "flags": []}
    (run.run_dir / LAUNCH_FILE).write_text(json.dumps(found))
    clock = Clock()
    made = ScriptEvaluator(run, clock)
    made.clock, made.line = clock, "exec cat"
    popen = script_evaluator.subprocess.Popen

    def start(command, **options):
        return popen(["/bin/sh", "-c", made.line], **options)

    monkeypatch.setattr(script_evaluator.subprocess, "Popen", start)
    made.start()
    yield made
    made.end()


def end(evaluator, number):
    os.kill(evaluator._process.pid, number)
    evaluator._process.wait()


def test_one_that_was_killed_is_started_again_after_a_pause(evaluator):
    assert evaluator.tend() == "" and evaluator.is_running
    first = evaluator._process
    end(evaluator, signal.SIGKILL)
    assert evaluator.tend() == "" and evaluator.is_running and not evaluator.why_not
    assert evaluator.tend() == "" and evaluator._process is first, "not immediately"
    evaluator.clock.now += 1.0
    assert evaluator.tend() == "" and evaluator._process.poll() is None
    assert evaluator._process is not first and evaluator.is_running


def test_it_is_given_up_after_some_times_with_longer_and_longer_pauses(evaluator):
    pauses = []
    while True:
        end(evaluator, signal.SIGKILL)
        if why := evaluator.tend():
            break
        begun, process = evaluator.clock.now, evaluator._process
        while evaluator._process is process:
            evaluator.clock.now += 0.5
            assert evaluator.tend() == ""
        pauses.append(evaluator.clock.now - begun)
    assert pauses == sorted(set(pauses)) and len(pauses) == 3
    assert "exit code -9 (started again 3 times)" in why
    assert evaluator.tend() == "", "once"
    assert not evaluator.is_running and evaluator.why_not


def test_one_that_fails_by_itself_is_not_started_again(evaluator, monkeypatch):
    end(evaluator, signal.SIGKILL)
    monkeypatch.setattr(type(evaluator._process), "poll", lambda process: 1)
    assert "exit code 1: " in evaluator.tend()
    assert evaluator.tend() == "" and not evaluator.is_running and evaluator.why_not


def test_a_full_disk_does_not_end_the_evaluator(evaluator, monkeypatch):
    evaluator.dismiss()
    evaluator._output.unlink()
    evaluator._output.symlink_to("/dev/full")
    count = "i=0; while [ $i -lt 2000 ]; do echo line $i || exit 9; i=$((i+1)); done; exit 7"
    evaluator.line = count
    evaluator.start()
    assert evaluator._process.wait(60) == 7
    logged = []
    monkeypatch.setattr(
        script_evaluator.logging, "warning", lambda text, *words: logged.append(text % words)
    )
    assert evaluator.tend() == "the evaluator has ended with exit code 7: line 1999"
    evaluator.end()
    assert len(logged) == 1 and "2,000 lines" in logged[0] and "No space left" in logged[0]


def test_one_that_is_not_needed_is_ended_and_started_again(evaluator):
    first = evaluator._process
    evaluator.start()
    assert evaluator._process is first, "it runs already"
    evaluator.dismiss()
    assert first.poll() is not None and not evaluator.is_alive and not evaluator.is_running
    assert evaluator.tend() == "" and not evaluator.why_not
    evaluator.start()
    assert evaluator.is_alive and evaluator._process is not first


def test_one_that_has_ended_by_itself_stays_so(evaluator, monkeypatch):
    first = evaluator._process
    end(evaluator, signal.SIGKILL)
    monkeypatch.setattr(type(first), "poll", lambda process: 0)
    assert evaluator.tend() == "" and not evaluator.is_alive
    evaluator.start()
    assert evaluator._process is first


def test_the_output_of_one_that_was_killed_stays_before_that_of_the_next(evaluator):
    """The output of the killed process may show the cause."""
    end(evaluator, signal.SIGKILL)
    for number in (1, 2):
        evaluator.line = f"echo life {number}; kill -9 $$"
        assert evaluator.tend() == ""
        evaluator.clock.now += 100.0
        assert evaluator.tend() == ""
        evaluator._process.wait()
    evaluator.end()
    assert evaluator._output.read_text() == "life 1\nlife 2\n"
