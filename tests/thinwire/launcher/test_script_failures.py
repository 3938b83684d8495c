"""A launcher's reaction to failing scripts: its output and its notifications."""

import dataclasses
import threading
import types

import pytest

from thinwire.flags import launch
from thinwire.launcher import run
from thinwire.launcher.failures import Cause, Failure

PAGE = "Traceback\nValueError: no"


class Shown:
    """A worker's output, which records the shown lines."""

    def __init__(self):
        self.texts = []

    def show(self, text):
        self.texts.append(text)


@dataclasses.dataclass(frozen=True)
class Settings:
    reconnect_timeout_seconds: float = 60.0


def script_run(*workers):
    """Return a run of a script, without nodes."""
    made = run._ScriptRun.__new__(run._ScriptRun)
    made._cluster = types.SimpleNamespace(interrupted=threading.Event(), at_fault=set())
    made._failures, made._lock = {}, threading.Lock()
    made._workers = {worker: Shown() for worker in workers}
    made._run = Settings()
    return made


@pytest.mark.parametrize(
    ("failures", "shown", "at_fault"),
    [
        ([(1, Failure(1, PAGE))], {1: [PAGE]}, {1}),
        ([(1, Failure(1, PAGE)), (2, Failure(1, PAGE))], {1: [PAGE]}, {1, 2}),
        ([(1, Failure(1, PAGE, Cause.ELSEWHERE)), (2, Failure(1, PAGE))], {2: [PAGE]}, {2}),
        ([(1, Failure(2, PAGE, Cause.OTHER_RUN))], {}, {1}),
        ([(1, Failure(3, PAGE, Cause.LOST))], {1: [PAGE]}, set()),
    ],
)
def test_the_first_failure_of_its_own_is_shown(failures, shown, at_fault):
    made = script_run(1, 2)
    for worker, failure in failures:
        made._on_failure(worker, failure)
    assert {worker: out.texts for worker, out in made._workers.items() if out.texts} == shown
    assert made._cluster.at_fault == at_fault


@pytest.mark.parametrize(
    ("failure", "is_first", "interrupted", "told"),
    [
        (Failure(1, "ValueError: no"), False, False, [(2, "ValueError: no")]),
        (Failure(1, "ValueError: no"), True, False, []),
        (Failure(1, "ValueError: no"), False, True, []),
        (Failure(2, "another script", Cause.OTHER_RUN), False, False, []),
        (None, False, False, []),
    ],
)
def test_a_task_of_a_step_tells_shard_0_that_its_script_has_failed(
    monkeypatch, failure, is_first, interrupted, told
):
    heard = []

    class Control:
        def __init__(self, run, worker):
            self._worker = worker

        def finish(self, failed, message, patience_seconds):
            heard.append((self._worker, message))

    monkeypatch.setattr(run, "Control", Control)
    part = types.SimpleNamespace(is_first=is_first)
    monkeypatch.setattr(launch, "part_here", lambda: part)
    monkeypatch.setattr(run, "FLAGS", types.SimpleNamespace(start_timeout_seconds=1.0))
    made = script_run(2)
    if failure is not None:
        made._on_failure(2, failure)
    if interrupted:
        made._cluster.interrupted.set()
    made._end_others()
    assert heard == told


def test_a_launcher_of_no_step_tells_nobody(monkeypatch):
    monkeypatch.setattr(launch, "part_here", lambda: None)
    made = script_run(1)
    made._on_failure(1, Failure(1, PAGE))
    made._end_others()
