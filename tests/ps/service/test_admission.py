"""A server that admits no worker ends; a server that no worker contacts keeps waiting."""

import collections

import pytest

from tests.ps.streams import Shard
from thinwire.ps.service.admission import AdmissionWatch
from thinwire.runtime.run.settings import EXIT_OF_STOP, EXIT_REFUSED, NOBODY_ADMITTED


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.mark.parametrize("reason", ["hello", "token", "identity", "offer", "id_range"])
def test_it_ends_when_time_is_over_and_all_were_refused(clock, reason):
    refused = collections.Counter()
    watch = AdmissionWatch(60.0, lambda: refused, clock)
    refused[reason] += 2
    assert watch.verdict() is None
    clock.now += 61
    why = watch.verdict()
    assert f"2 for {reason}" in why and "--start_timeout_seconds" in why


def test_strangers_are_no_workers_and_nobody_is_no_reason(clock):
    refused = collections.Counter()
    watch = AdmissionWatch(60.0, lambda: refused, clock)
    clock.now += 1000
    assert watch.verdict() is None
    refused.update(silent=3, malformed=1, streams=4)
    assert watch.verdict() is None
    refused["hello"] += 1  # one that comes late ends it immediately
    assert watch.verdict() is not None


def test_one_admitted_worker_is_enough(clock):
    watch = AdmissionWatch(60.0, lambda: {"hello": 5}, clock)
    watch.admitted()
    clock.now += 1000
    assert watch.verdict() is None


def served(clock, *hellos):
    """Return a shard that has read these streams, a minute and a half after its start."""
    shard = Shard()
    guard = shard.server.guard
    shard.server.watch = AdmissionWatch(60.0, lambda: guard.refused, clock)
    for hello in hellos:
        shard.say(**hello)
    clock.now += 90
    shard.server.queue.put(lambda: None)
    shard.server.run_until(shard.server.queue.empty)
    return shard


def test_a_server_whose_workers_are_all_refused_ends_with_code_4(clock):
    shard = served(clock, {"fingerprint": []}, {"id": 99})
    assert shard.core.stop_reason == NOBODY_ADMITTED
    assert EXIT_OF_STOP[NOBODY_ADMITTED] == EXIT_REFUSED == 4
    assert shard.server.guard.refused == {"hello": 1, "id_range": 1}


def test_a_server_with_one_worker_goes_on(clock):
    assert served(clock, {"fingerprint": []}, {"id": 1}).core.stop_reason is None


def test_a_server_that_nobody_visits_goes_on(clock):
    assert served(clock).core.stop_reason is None
