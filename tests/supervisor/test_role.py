"""A Supervisor's reports about its evaluator, and its records of evaluations by other nodes."""

import signal
import threading
import types

import pytest

from tests.command_line import given
from tests.supervisor.samples import make_status
from thinwire.flags.run import read_run
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import Unreachable
from thinwire.runtime.run.settings import EXIT_INTERRUPTED
from thinwire.supervisor import role
from thinwire.supervisor.role import _Watcher
from thinwire.supervisor.script_evaluations import ScriptEvaluations


class Records:
    """The recorded lines."""

    evaluations = ()

    def __init__(self):
        self.made = []

    def record(self, status, metrics, versions, final=False):
        self.made.append((metrics, versions, final))


@pytest.fixture
def watcher(tmp_path):
    """A Supervisor with a stream to shard 0 that stores received messages."""
    with given("--type_node=Supervisor", f"--run_dir={tmp_path}"):
        made = _Watcher(read_run(), None, Records())
    shard = types.SimpleNamespace(status=make_status(7), halt_cause="", validates=True, sent=[])
    shard.evaluated = types.SimpleNamespace(empty=lambda: True)
    shard.session = types.SimpleNamespace(send_control=shard.sent.append)
    made.streams.shards = [shard]
    made.scripts = ScriptEvaluations(made.run, made.recorder, made.streams, made.interrupted)
    return made


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_ctrl_c_ends_the_search_for_a_ps_as_an_interruption(watcher, monkeypatch, is_interrupted):
    """An abandoned search fails like a search that finds no shard: the cause of its end counts."""

    def connect():
        if is_interrupted:
            watcher._interrupt(signal.SIGINT, None)
        raise Unreachable("nothing answers")

    watcher.streams.shards, watcher.scripts = [], None
    monkeypatch.setattr(watcher, "_connect", connect)
    if is_interrupted:
        assert watcher.watch() == EXIT_INTERRUPTED
    else:
        with pytest.raises(Unreachable):
            watcher.watch()


@pytest.mark.parametrize(("versions", "is_final"), [([6], False), ([7], True), ([7, 9], True)])
def test_what_a_script_has_evaluated_is_final_if_the_run_ended_with_it(watcher, versions, is_final):
    watcher.scripts._of_script = ({"loss": 0.5}, versions)
    watcher.scripts._record_final_of_script()
    assert watcher.recorder.made == ([({"loss": 0.5}, versions, True)] if is_final else [])


def test_shard_0_learns_whenever_the_evaluator_s_process_begins_or_ends(watcher):
    """Scripts wait for one that is on its way, for as long as it takes."""
    evaluator = types.SimpleNamespace(is_alive=True, why_not="", start=lambda: None, tend=str)
    watcher.scripts.evaluator = evaluator
    watcher.scripts.offer("")
    for is_alive in (True, False, False, True):
        evaluator.is_alive = is_alive
        watcher.scripts.tend()
    expected = [pb.Evaluator(available=True, starting=each) for each in (True, False, True)]
    assert [message.evaluator for message in watcher.shards[0].sent] == expected


def test_a_supervisor_with_a_model_evaluates_each_version_once(watcher, monkeypatch):
    clock, evaluated = [100.0], []
    statuses = iter([7, 7, 9, 9])
    shard = watcher.shards[0]
    shard.refusal, shard.lost = None, threading.Event()

    def look_again(seconds):
        clock[0] += watcher.own.eval_interval_seconds
        version = next(statuses, None)
        if version is None:
            watcher.interrupted.set()
        else:
            shard.status = make_status(version)

    def evaluate(status):
        evaluated.append(status.version)
        return status.version

    monkeypatch.setattr(role, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(watcher, "_show", lambda status: None)
    monkeypatch.setattr(watcher, "_evaluate", evaluate)
    monkeypatch.setattr(watcher.interrupted, "wait", look_again)
    watcher.scripts, watcher._fetcher = None, object()
    watcher._observe()
    assert evaluated == [7, 9]


def test_a_supervisor_without_a_model_evaluates_nothing(watcher, monkeypatch):
    shard = watcher.shards[0]
    shard.refusal, shard.lost, watcher.scripts = None, threading.Event(), None
    monkeypatch.setattr(watcher, "_show", lambda status: None)
    monkeypatch.setattr(watcher, "_evaluate", lambda status: pytest.fail("evaluated"))
    monkeypatch.setattr(watcher.interrupted, "wait", lambda seconds: watcher.interrupted.set())
    watcher._observe()
