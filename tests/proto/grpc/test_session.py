"""A client's log lines while it looks for a shard, and after it has found the shard."""

import random
import threading

import pytest

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import Unreachable, session


class Address:
    """Sessions; the first few get no answer."""

    def __init__(self, shut):
        self.shut = shut

    def open(self, timeout_seconds, is_closing):
        if self.shut:
            self.shut -= 1
            raise Unreachable("nobody answers")
        return pb.Welcome()

    def close(self, grace_seconds):
        pass


class Impatient(threading.Event):
    """Waits for nothing."""

    def wait(self, timeout=None):
        return self.is_set()


def lines_of(caplog, shut):
    address = Address(shut)
    with caplog.at_level("INFO", logger="absl"):
        session.Dialler("the PS at ps:1", lambda: address, Impatient()).dial(600.0)
    return [record.getMessage() for record in caplog.records]


def test_who_had_to_look_says_once_why_and_that_it_found(caplog):
    assert lines_of(caplog, shut=3) == [
        "connecting to the PS at ps:1 for up to 600 s: nobody answers",
        "found the PS at ps:1",
    ]


def test_who_finds_at_once_says_nothing(caplog):
    assert not lines_of(caplog, shut=0)


def test_who_looks_draws_nothing_of_what_the_script_draws(caplog):
    before = random.getstate()
    lines_of(caplog, shut=3)
    assert random.getstate() == before


class PatientFor(threading.Event):
    """Lets virtual time pass where it is to wait."""

    now = 0.0

    def wait(self, timeout=None):
        self.now += timeout or 0.0
        return self.is_set()


class Quarantining(Address):
    """Asks for 50 s more instead of not answering."""

    def open(self, timeout_seconds, is_closing):
        if not self.shut:
            return pb.Welcome()
        self.shut -= 1
        raise session.RequestRejected(
            pb.Refusal(reason=pb.REASON_QUARANTINED, retry_after_seconds=50.0)
        )


def test_a_shard_that_asks_for_time_is_waited_for_beyond_the_patience_for_a_silent_one(monkeypatch):
    over, address = PatientFor(), Quarantining(3)
    monkeypatch.setattr(session.time, "monotonic", lambda: over.now)
    dialler = session.Dialler("the PS at ps:1", lambda: address, over)
    assert dialler.dial(60.0)[1] == pb.Welcome()
    assert over.now >= 150.0


@pytest.mark.parametrize(("mbps", "takes_bulk"), [(0.0, True), (10.0, False)])
def test_what_passes_an_emulated_link_asks_for_no_connection_beside_it(mbps, takes_bulk):
    hello = pb.Hello(role=pb.ROLE_WORKER, id=1, link=pb.EmulatedLink(mbps=mbps))
    session.ClientSession("127.0.0.1:1", hello, 100).close(0.0)
    assert hello.bulk is takes_bulk
