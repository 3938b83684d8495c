"""Records of a run: the best model, reached targets, and targets that are never evaluated."""

import json
import queue
import threading
import types

import numpy as np
import pytest

from tests.supervisor.samples import make_status
from tests.thinwire.simulator.toy import run_of
from tests.virtual.toy import method
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.runtime.run.target import Target
from thinwire.supervisor import recorder
from thinwire.supervisor.evaluation_requests import EvaluationRequests
from thinwire.supervisor.recorder import Recorder
from thinwire.supervisor.shard_stream import ShardStream, ShardStreams

WEIGHTS = np.zeros(3, np.float32)


@pytest.fixture
def opened(tmp_path):
    """Return what opens the records of a run to a target, and the saves of its best model."""
    made = []

    def open_records(metrics, target=None, goal="rmse<=0"):
        scored = iter(metrics)
        saves = []
        scorer = types.SimpleNamespace(
            goal=Target.parse(goal), score=lambda *unused: next(scored), save=saves.append
        )
        settings = {"target": Target.parse(target) if target else None}
        run = run_of(method("asgd", 2), 2, run_dir=tmp_path / "run", **settings)
        made.append(Recorder(run, scorer))
        return made[-1], saves

    yield open_records
    for each in made:
        each.close()


def evaluate(recorder, count):
    """Evaluate this many versions; return the version that reached the target."""
    reached = []
    for version in range(1, count + 1):
        recorder.evaluate(make_status(version), WEIGHTS, [version], final=False)
        if recorder.has_reached_target():
            reached.append(version)
    return reached


def test_the_best_model_is_kept_by_the_task_s_metric(opened):
    values = [float("nan"), 0.5, 0.7, 0.4, 0.4]
    recorder, saves = opened([{"rmse": value, "loss": 1.0} for value in values])
    assert evaluate(recorder, 5) == []
    assert [path.name for path in saves] == ["best.keras"] * 2


def test_the_target_s_metric_comes_first(opened, caplog):
    caplog.set_level("INFO", logger="absl")
    scores = [{"rmse": 1.0 - n / 10, "mae": value} for n, value in enumerate((0.5, 0.6, 0.3))]
    recorder, saves = opened(scores, target="val_mae<=0.3")
    assert evaluate(recorder, 3) == [3]
    assert len(saves) == 2  # 0.5 and 0.3, though each rmse was better than the one before
    assert "val_mae is 0.3000: the target val_mae<=0.3 is reached" in caplog.text


def test_a_target_that_nobody_measures_is_warned_of_once(opened, caplog):
    recorder, saves = opened([{"rmse": 0.5, "loss": 0.1}] * 4, target="f1>=0.9")
    assert evaluate(recorder, 4) == []
    assert len(saves) == 1  # by the task's metric
    assert caplog.text.count("--target=f1>=0.9: the evaluations have no f1") == 1
    assert "have rmse, loss" in caplog.text


def test_metrics_from_elsewhere_join_those_of_the_same_version(opened):
    recorder, _ = opened([{"rmse": 0.5}], target="f1>=0.9")
    recorder.evaluate(make_status(1), WEIGHTS, [1], final=False)
    recorder.record(make_status(1), {"f1": 0.95}, [1])
    assert recorder.has_reached_target()
    assert recorder.latest.metrics == {"rmse": 0.5, "f1": 0.95}


def test_the_log_ends_with_the_end_of_the_run(opened, tmp_path, monkeypatch):
    """Statuses come every few seconds, and the last one has the reason."""
    monkeypatch.setattr(recorder, "write_report", lambda run_dir: run_dir / "report" / "index.html")
    records, _ = opened([{"rmse": 0.5}])
    evaluate(records, 1)
    records.finish(make_status(2, stop_reason="iter_max"))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert (last["kind"], last["version"], last["stop_reason"]) == ("status", 2, "iter_max")


class ListeningSession:
    """A stream to a shard that sends some messages and breaks."""

    address = "here"

    def __init__(self, *messages):
        self.messages = iter(messages)

    def listen(self):
        found = next(self.messages, None)
        if found is None:
            raise StreamLost("the end")
        return found, memoryview(b"")


def test_a_run_with_one_fit_that_validates_has_validation_data():
    """A later model may lack it; evaluations of the earlier model are still wanted."""
    fits = (pb.FitBegun(fit=n, validates=n == 2) for n in (1, 2, 3))
    sent = (pb.ToClient(fit_begun=fit) for fit in fits)
    stream = ShardStream(ListeningSession(*sent), queue.SimpleQueue())
    assert stream.lost.wait(30) and stream.validates
    assert stream.refusal is None


def test_a_shard_s_refusal_is_kept_and_ends_the_wait_for_a_reply():
    refusal = pb.Refusal(reason=pb.REASON_FULL)
    stream = ShardStream(ListeningSession(pb.ToClient(refusal=refusal)), queue.SimpleQueue())
    assert stream.lost.wait(30) and stream.refusal == refusal
    assert [stream.replies.get(), stream.replies.get()] == [None, None]  # it, and the end


def test_no_stream_stays_open_where_a_later_shard_rejects():
    """Each try of a Supervisor would leave some on the shards that had let it in."""
    closed = []

    class Session(ListeningSession):
        def close(self, patience):
            closed.append((self.number, patience))

    def dialler(number):
        def dial(patience):
            if number == 2:
                raise Unreachable("nobody is there")
            session = Session()
            session.number = number
            return session, pb.Welcome()

        return types.SimpleNamespace(dial=dial)

    run = run_of(method("asgd", 2), 2)
    streams = ShardStreams(run, lambda number: pb.Hello(), (), threading.Event())
    streams._diallers = [dialler(number) for number in range(3)]
    with pytest.raises(Unreachable):
        streams.connect()
    assert sorted(closed) == [(0, 0.0), (1, 0.0)]


def test_a_client_leaves_the_shards_once():
    """Its next fetch of the model then connects again, and uses no closed stream."""
    sent, closed = [], []
    session = types.SimpleNamespace(send_control=sent.append, close=lambda: closed.append(1))
    run = run_of(method("asgd", 2), 2)
    streams = ShardStreams(run, lambda number: pb.Hello(), (), threading.Event())
    streams.shards = [types.SimpleNamespace(session=session)]
    streams.leave()
    streams.leave()
    assert [message.leave.cause for message in sent] == ["done"] and closed == [1]
    assert streams.shards == []


def test_a_request_that_comes_again_gets_the_same_answer(monkeypatch):
    """From a shard 0 that was started again: some workers have the answer already."""
    monkeypatch.setattr(EvaluationRequests, "_keep", lambda self: None)
    requests = EvaluationRequests(run_of(method("asgd", 2), 2))
    wanted, sent = pb.ToClient(epoch_ended=pb.EpochEnded(fit=1, epoch=4)), []
    session = types.SimpleNamespace(send_control=sent.append)
    requests._receive(session, wanted)
    assert requests.take(1) == (1, 4)
    answer = pb.Evaluated(fit=1, epoch=4, answers=True, versions=[9])
    requests.report(answer)
    assert requests.take(1) is None and sent == []
    requests._receive(session, wanted)
    assert requests.take(1) is None and sent == [pb.ToServer(evaluated=answer)]
