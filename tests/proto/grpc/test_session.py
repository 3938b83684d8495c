"""What a client says while it looks for a shard, and when it has found it."""

import random
import threading

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import Unreachable, session


class Address:
    """Sessions of which the first few are not answered."""

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
        "looking for the PS at ps:1, for up to 600 s: nobody answers",
        "found the PS at ps:1",
    ]


def test_who_finds_at_once_says_nothing(caplog):
    assert not lines_of(caplog, shut=0)


def test_who_looks_draws_nothing_of_what_the_script_draws(caplog):
    before = random.getstate()
    lines_of(caplog, shut=3)
    assert random.getstate() == before
