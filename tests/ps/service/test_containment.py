"""A failing request affects only its client: the writer thread serves all other clients."""

import contextlib
import threading
import types

import pytest
from absl import logging

from tests.ps.streams import HONEST, ROGUE, Shard, push_frame
from tests.ps.telemetry.test_instruments import instruments_of, read
from tests.virtual.toy import SPEC
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.ps.persistence.journal import Uncodable
from thinwire.ps.service import server as service
from thinwire.ps.service.connections import Connection

MODEL = messages.tensors_of(SPEC)


class Broken(Exception):
    """A bug of Thinwire."""


def fail(*given):
    raise Broken("not \x1b[31mthis\n way")


@pytest.fixture
def log(monkeypatch):
    """The lines that are logged as errors."""
    lines = []
    monkeypatch.setattr(logging, "error", lambda text, *given, **more: lines.append(text % given))
    return lines


def look(shard, **fields):
    """Send the Hello of a monitoring client."""
    return shard.say(role=pb.ROLE_SUPERVISOR, id=0, fingerprint=[], **{"model": [], **fields})


def refusal_of(stream):
    refusal, _ = stream.last("refusal")
    return refusal


def trains(shard):
    """Whether a worker can join and train."""
    before, epoch = shard.core.version, shard.core.membership.epoch + 1  # it joins
    push = push_frame(incarnation=5, epoch=epoch)
    shard.say({"pull": pb.Pull()}, push, id=HONEST, incarnation=5)
    return shard.core.version == before + 1


def test_who_wants_a_status_that_cannot_be_made_is_rejected_and_the_others_are_served(log):
    shard = Shard("asgd")
    made, shard.server.observers.on_status = shard.server.observers.on_status, fail
    shard.server._due["status"] = float("inf")  # only monitoring clients request one
    first, second = look(shard), look(shard)
    for stream in (first, second):
        refusal = refusal_of(stream)
        assert refusal.reason == pb.REASON_INTERNAL and stream.closed
        assert "Broken" in refusal.message and "report it" in refusal.message
        assert refusal.message.isprintable()
        assert stream.last("welcome")[0] is None
    assert shard.server.guard.refused["internal"] == 2
    assert len([line for line in log if "Traceback" in line]) == 1
    assert trains(shard)
    shard.server.observers.on_status = made
    report, _ = look(shard).last("report")
    assert '"internal":2' in report.document
    found = read(instruments_of(shard)[0], shard)
    assert found["refused_peers"]["internal"] == 2


def test_a_regular_status_that_fails_is_left_out_until_it_is_due_again(log):
    shard = Shard("asgd")
    evaluates = {"model": MODEL}
    shard.server._due["status"] = 0.0
    shard.server.observers.on_status = fail
    stream = look(shard, **evaluates)
    assert stream.last("welcome")[0] is not None and not stream.closed
    assert shard.server.guard.refused["internal"] >= 1
    assert len([line for line in log if "Traceback" in line]) == 1
    assert trains(shard)
    assert shard.core.stop_reason is None


def test_the_end_of_the_run_comes_to_everybody_without_a_status(log):
    shard = Shard("asgd")
    stream = look(shard, model=MODEL)
    number = shard.server.connections.add_observer(connection_of(shard, stream))
    shard.server.observers.on_status = fail
    shard.server.queue.put(events.Stop("iter_max"))
    shard.server.run_until(shard.server.queue.empty)
    assert stream.last("halt")[0].cause == "iter_max"
    shard.server.connections.drop_observer(number)


def connection_of(shard, stream):
    return Connection(stream, shard.hello(role=pb.ROLE_SUPERVISOR, model=MODEL), 0)


SCRIPT = {"role": pb.ROLE_SCRIPT, "id": ROGUE, "incarnation": 3, "fingerprint": [], "model": []}
LOOKS = {"role": pb.ROLE_SUPERVISOR, "id": 0, "fingerprint": [], "model": []}
EVALUATOR = LOOKS | {"role": pb.ROLE_EVALUATOR}
REQUESTS = {
    "welcome": ("server.welcome_message", {}, None),
    "evaluation_pull": ("core.whole", LOOKS, {"pull": pb.Pull(observe=True)}),
    "script_hello": ("server.scripts.begin", SCRIPT, None),
    "barrier": ("server.scripts.receive", SCRIPT, {"barrier": pb.Barrier(name="fit-1-begin")}),
    "fit": ("server.scripts.receive", SCRIPT, {"fit_begun": pb.FitBegun(fit=1)}),
    "stop_fit": ("server.scripts.receive", SCRIPT, {"stop_fit": pb.StopFit(fit=1)}),
    "finished": ("server.scripts.receive", SCRIPT, {"finished": pb.Finished()}),
    "alive": ("server.scripts.receive", SCRIPT, {"heartbeat": pb.Heartbeat()}),
    "slots": ("server.observers.send_slots", SCRIPT, {"slots": pb.SlotsRequest()}),
    "evaluator": ("server.scripts.offer_evaluator", LOOKS, {"evaluator": pb.Evaluator()}),
    "evaluated": (
        "server.scripts.receive",
        EVALUATOR,
        {"evaluated": pb.Evaluated(fit=1, versions=[1])},
    ),
}


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_every_request_of_one_client_is_contained(name, monkeypatch, log):
    place, hello, message = REQUESTS[name]
    shard = Shard("asgd")
    owner, _, method = place.rpartition(".")
    broken = shard
    for part in owner.split("."):
        broken = getattr(broken, part)
    with monkeypatch.context() as patched:
        patched.setattr(broken, method, fail)
        stream = shard.say(*([message] if message else []), **hello)
    assert refusal_of(stream).reason == pb.REASON_INTERNAL, name
    assert stream.closed
    assert shard.server.guard.refused["internal"] == 1
    assert [line for line in log if "Traceback" in line]
    assert trains(shard)


@pytest.mark.parametrize("place", ["server.scripts.tick", "server.scripts.lost"])
def test_work_that_nobody_waits_for_is_contained(place, monkeypatch, log):
    shard = Shard("asgd")
    shard.server._due["scripts"] = 0.0
    scripts, method = shard.server.scripts, place.rpartition(".")[2]
    with monkeypatch.context() as patched:
        patched.setattr(scripts, method, fail)
        shard.say(**SCRIPT)
    assert shard.server.guard.refused["internal"] >= 1
    assert trains(shard)


def test_a_failure_of_the_state_machine_itself_still_ends_the_process(monkeypatch):
    shard = Shard("asgd")
    monkeypatch.setitem(type(shard.core)._handlers, events.Stop, fail)
    shard.server.queue.put(events.Stop("iter_max"))
    with pytest.raises(Broken):
        shard.server.run_until(shard.server.queue.empty)


class Journal:
    """A journal that cannot code one kind of event."""

    is_due = False

    def __init__(self, kind):
        self.kind, self.written = kind, []

    def append(self, event, now):
        if isinstance(event, self.kind):
            try:
                fail()
            except Exception as error:
                raise Uncodable(error) from error
        self.written.append(event)


def test_an_event_that_cannot_be_journaled_is_rejected_before_the_core_has_it(log):
    shard = Shard("asgd")
    journal = Journal(events.Leave)
    shard.server.journaled.write_to(journal, {})
    stream = shard.say({"leave": pb.Leave(cause="done")}, incarnation=5)
    (failed,) = [event for event in journal.written if isinstance(event, events.Failed)]
    assert failed.cause.isprintable() and refusal_of(stream).reason == pb.REASON_NOT_MEMBER
    assert shard.core.counters.rejected["fault"] == 1
    assert trains(shard)


def test_the_writer_thread_of_a_served_shard_lives_on(log):
    """With a thread, as in a process: the queue is emptied after the failure."""
    shard = Shard("asgd")
    over = threading.Event()
    writer = threading.Thread(target=shard.server.run_until, args=(over.is_set,), daemon=True)
    shard.server.observers.on_status = fail
    shard.server._due["status"] = float("inf")
    with contextlib.ExitStack() as stack:
        stack.callback(writer.join, 20)
        stack.callback(over.set)
        stream = look(shard)
        writer.start()
        handled = threading.Event()
        shard.server.queue.put(handled.set)
        assert handled.wait(20) and writer.is_alive()
    assert refusal_of(stream).reason == pb.REASON_INTERNAL


def test_a_process_that_stood_still_is_reported_to_the_core_once(monkeypatch):
    """Leases do not count that time: messages of meanwhile are still in the queue."""
    shard, now, handled = Shard("asgd"), [5000.0], []
    server = shard.server
    monkeypatch.setattr(service, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    handle = server.journaled.handle
    monkeypatch.setattr(
        server.journaled, "handle", lambda event, at: handled.append(event) or handle(event, at)
    )
    for seconds in (0.0, 0.1, 60.0, 0.0):
        server.queue.put(lambda passed=seconds: now.__setitem__(0, now[0] + passed))
    server.run_until(server.queue.empty)
    stalls = [event for event in handled if isinstance(event, events.ProcessStalled)]
    assert stalls == [events.ProcessStalled(60.0)]
