"""Control streams of scripts at a real server: who may open one, and its effects."""

import types

import numpy as np
import pytest

from tests.ps.streams import Shard, Stream, frame
from tests.virtual.run import MiniRun
from tests.virtual.toy import SPEC, method
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.security.credentials import part_of, part_of_worker
from thinwire.ps.scripts.run_control import RunControl
from thinwire.ps.service import observers, server
from thinwire.ps.service.served_model import ServedModel
from thinwire.runtime.run.settings import FINISHED, SCRIPT_FAILED

LEASE = 10.0


def hello(worker, **fields):
    given = {"role": pb.ROLE_SCRIPT, "id": worker, "num_shards": 1, "incarnation": worker}
    return pb.Hello(protocol_version=messages.PROTOCOL_VERSION, **{**given, **fields})


class ControlStream:
    """An open stream to a shard, of a client without part in the updates."""

    def __init__(self, shard, first):
        self.shard, self.stream = shard, Stream(shard.server)
        self.reader = shard.server.reader_of(self.stream)
        self.send(hello=first)

    def send(self, **body):
        self.is_open = self.reader.receive(frame(**body))
        self.shard.server.run_until(self.shard.server.queue.empty)
        return self

    def last(self, body):
        return self.stream.last(body)[0]


class Script(ControlStream):
    """Control stream of a worker's script."""

    def __init__(self, server, worker, **fields):
        super().__init__(server, hello(worker, **fields))


def test_scripts_meet_and_finish():
    shard = Shard()
    one, two = Script(shard, 1), Script(shard, 2)
    assert one.last("welcome").run_id == "run"
    one.send(barrier=pb.Barrier(name="fit-1-begin"))
    assert one.last("barrier") is None
    two.send(barrier=pb.Barrier(name="fit-1-begin"))
    assert one.last("barrier") == two.last("barrier") == pb.Barrier(name="fit-1-begin")
    one.send(finished=pb.Finished())
    assert one.last("finished") == pb.Finished()
    assert shard.core.stop_reason is None
    two.send(finished=pb.Finished())
    assert shard.core.stop_reason == FINISHED
    assert one.last("halt") == two.last("halt") == pb.Halt(cause=FINISHED)


def test_the_error_of_a_script_reaches_everybody_with_its_worker():
    shard = Shard()
    one, two = Script(shard, 1), Script(shard, 2)
    one.send(barrier=pb.Barrier(name="fit-1-end"))
    two.send(finished=pb.Finished(failed=True, message="KeyError: 'x'"))
    halt = pb.Halt(cause=SCRIPT_FAILED, message="worker 2 failed: KeyError: 'x'")
    assert one.last("halt") == halt
    assert shard.core.stop_reason == SCRIPT_FAILED
    late = Script(shard, 1, incarnation=7)
    assert late.last("halt") == halt, "one that comes later learns it, too"


@pytest.mark.parametrize(
    ("worker", "fields", "reason"),
    [
        (3, {}, pb.REASON_ID_RANGE),
        (0, {}, pb.REASON_ID_RANGE),
        (1, {"run_id": "another"}, pb.REASON_RUN),
        (1, {"shard": 1, "num_shards": 2}, pb.REASON_TOPOLOGY),
        (1, {"num_shards": 2}, pb.REASON_TOPOLOGY),
    ],
)
def test_who_is_not_let_in(worker, fields, reason):
    script = Script(Shard(), worker, **fields)
    assert script.last("refusal").reason == reason
    assert not script.is_open


@pytest.mark.parametrize(
    "body",
    [
        {"barrier": pb.Barrier(name="x" * 101)},
        {"barrier": pb.Barrier(passed=["x"] * 20_001)},
        {"barrier": pb.Barrier(name="a", passed=["x" * 101])},
        {"pull": pb.Pull()},
        {"halt": pb.Halt(cause="finished")},
        {"push": pb.Push()},
    ],
)
def test_what_a_script_must_not_send(body):
    shard = Shard()
    script = Script(shard, 1).send(**body)
    assert script.last("refusal").reason == pb.REASON_MALFORMED
    assert not script.is_open
    assert shard.core.stop_reason is None


def test_other_roles_have_no_barriers():
    for body in ({"barrier": pb.Barrier(name="a")}, {"finished": pb.Finished()}):
        assert Shard().say(body, id=1).last("refusal")[0].reason == pb.REASON_MALFORMED


def test_a_new_stream_of_a_script_takes_the_place_of_the_old_one():
    shard = Shard()
    old, other = Script(shard, 1), Script(shard, 2)
    new = Script(shard, 1)
    assert old.stream.closed
    old.reader.forget()
    shard.server.run_until(shard.server.queue.empty)
    old.send(finished=pb.Finished(failed=True))  # its pending messages
    assert shard.core.stop_reason is None
    new.send(barrier=pb.Barrier(name="fit-1-begin"))
    other.send(barrier=pb.Barrier(name="fit-1-begin"))
    assert new.last("barrier") is not None


def test_a_script_needs_the_certificate_of_its_worker():
    assert part_of(hello(3)) == part_of_worker(3)


class EvaluatorStream(ControlStream):
    """Control stream of an evaluator."""

    def __init__(self, shard, incarnation):
        first = hello(0, role=pb.ROLE_EVALUATOR, incarnation=incarnation)
        super().__init__(shard, first)

    def answer(self, loss):
        metrics = [pb.Metric(name="loss", values=[loss])]
        answer = pb.Evaluated(fit=1, epoch=0, answers=True, versions=[0], metrics=metrics)
        return self.send(evaluated=answer)


def test_only_the_evaluator_that_has_the_place_answers():
    """The earlier evaluator may live: it has the weights of separate streams."""
    shard = Shard()
    one = Script(shard, 1)
    Script(shard, 2)
    former, present = EvaluatorStream(shard, 5), EvaluatorStream(shard, 6)
    one.send(fit_begun=pb.FitBegun(fit=1, validates=True))
    one.send(epoch_ended=pb.EpochEnded(fit=1, epoch=0))
    assert former.stream.closed and present.last("epoch_ended").epoch == 0
    former.answer(9.0)
    assert one.last("evaluated") is None
    present.answer(0.5)
    assert one.last("evaluated").metrics[0].values == [0.5]


def test_scripts_are_excused_for_the_time_in_which_the_shard_stood_still(monkeypatch):
    shard, now, excused = Shard(), [100.0], []
    monkeypatch.setattr(server, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    shard.server._due = dict.fromkeys(shard.server._due, 1e9)
    monkeypatch.setattr(shard.server.scripts, "excuse", excused.append)
    shard.server.queue.put(lambda: now.__setitem__(0, 160.0))  # it is stopped meanwhile
    shard.server.queue.put(lambda: None)  # came meanwhile
    shard.server.run_until(shard.server.queue.empty)
    assert excused == [60.0]


def test_scripts_that_never_came_are_excused_for_a_stall_of_the_shard():
    """They may have dialed while the shard stood still; heartbeats are still in its queue."""
    shard, now = Shard(), [0.0]
    scripts = RunControl(shard.server, LEASE, clock=lambda: now[0])
    scripts.barriers.begin(1, 1, scripts.now())
    patience = shard.core.config.start_timeout_seconds
    assert patience > 5 * LEASE
    now[0] += 5 * LEASE
    scripts.excuse(5 * LEASE)
    scripts.tick()
    assert scripts.is_running(1)
    now[0] += LEASE
    assert not scripts.is_running(1)
    now[0] = patience + 5 * LEASE - 1
    scripts.barriers.alive(1, scripts.now())
    assert scripts.barriers.present(scripts.now()) == [1, 2]
    now[0] += 1
    assert scripts.barriers.present(scripts.now()) == [1]


def test_slots_are_those_of_the_present_phase(monkeypatch):
    """It may begin at the version at which a script has requested them before."""
    sent = []
    monkeypatch.setattr(observers, "frames", lambda message, pieces: sent.append(pieces) or ())
    shard = Shard("asgd")
    one = Script(shard, 1).send(slots=pb.SlotsRequest(weights=True))
    other = MiniRun(method("asgd", nb_workers=2), iter_max=10**6).shards[0]
    other.model.theta += 1.0
    layout, version = shard.server.layout, shard.core.version
    other.continue_run_of(shard.core)
    shard.server.begin_phase(ServedModel.of(other, SPEC, layout, phase=1))
    assert shard.server.core.version == version
    one.send(slots=pb.SlotsRequest(weights=True))
    before, after = (np.frombuffer(b"".join(map(bytes, each)), "<f4") for each in sent)
    np.testing.assert_array_equal(after[: layout.size], before[: layout.size] + 1)
