"""Each state of a switch, at the client and at the shard, without a socket or a clock."""

import itertools
import logging
import threading

import pytest

from thinwire.proto.bulk.handshake import BulkFailure, NoBulkConnection
from thinwire.proto.bulk.switching import (
    MOST_ATTEMPTS,
    OFFER_SECONDS,
    PATH_TRANSITIONS,
    SWITCH_TRANSITIONS,
    ClientSwitch,
    PathEvent,
    PathState,
    ServerPath,
    SwitchEvent,
    SwitchState,
    UnreachablePorts,
    most_seconds,
    run_attempts,
)

ADDRESS, PORT = "10.0.0.1:2223", 40001


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SwitchState, SwitchEvent)))
def test_a_client_moves_as_the_table_has_it(state, event):
    switch = ClientSwitch()
    switch.state = state
    if (state, event) not in SWITCH_TRANSITIONS:
        with pytest.raises(RuntimeError, match=state.name):
            switch.on(event)
        assert switch.state is state
    else:
        switch.on(event)
        assert switch.state is SWITCH_TRANSITIONS[state, event]


@pytest.mark.parametrize("lease", [0.5, 1.0, 2.0, 7.9, 10.0, 300.0])
def test_no_attempt_is_as_long_as_half_a_lease(lease):
    assert 0 < most_seconds(lease) <= min(2.0, lease / 4)


def test_pauses_grow_differ_and_fit_into_the_offer():
    pauses = {}
    for draw in (0.0, 0.999):
        switch, pauses[draw] = ClientSwitch(), []
        while (pause := switch.fail(BulkFailure.TURNED_AWAY, draw)) is not None:
            pauses[draw].append(pause)
            switch.on(SwitchEvent.DUE)
        assert switch.state is SwitchState.STAYING and switch.attempt == MOST_ATTEMPTS
    short, long = pauses[0.0], pauses[0.999]
    assert short[0] < 0.2 and all(a < b for a, b in zip(short, long, strict=True))
    assert sum(long) + MOST_ATTEMPTS * most_seconds(0) < OFFER_SECONDS


class Ended(threading.Event):
    """Says how long it was waited for, and passes the time itself."""

    def __init__(self, after=10**9):
        super().__init__()
        self.waits, self._after = [], after

    def wait(self, timeout=None):
        self.waits.append(timeout)
        if len(self.waits) >= self._after:
            self.set()
        return self.is_set()


def attempts(outcomes, ended=None, ports=None):
    """Run a client on these outcomes; return the state, the dialed ports, the used connection."""
    dialled, taken = [], []

    def dial(attempt):
        dialled.append(attempt)
        outcome = outcomes[min(attempt, len(outcomes) - 1)]
        if isinstance(outcome, BulkFailure):
            raise NoBulkConnection(outcome, "for a reason")
        return outcome

    ports = UnreachablePorts() if ports is None else ports
    state = run_attempts(ADDRESS, PORT, dial, taken.append, ended or Ended(), lambda: 0.5, ports)
    return state, dialled, taken


@pytest.mark.parametrize("failure", [BulkFailure.UNREACHABLE, BulkFailure.DISTRUSTED])
def test_a_port_that_cannot_be_used_is_remembered_and_reported_once(failure, caplog):
    ports = UnreachablePorts()
    for _ in range(3):
        with caplog.at_level(logging.INFO):
            assert attempts([failure], ports=ports) == (SwitchState.STAYING, [0], [])
    assert ADDRESS in ports and "10.0.0.1:2224" not in ports
    (line,) = caplog.messages
    for part in (ADDRESS, str(PORT), "for a reason", "speed", "ip_local_port_range"):
        assert part in line


def test_the_second_silence_counts_as_a_firewall_and_is_reported_once(caplog):
    ports = UnreachablePorts()
    assert attempts([BulkFailure.SILENT], ports=ports) == (SwitchState.STAYING, [0, 1], [])
    assert ADDRESS in ports
    (line,) = caplog.messages
    assert f"TCP port {PORT} of that host cannot be reached (for a reason)" in line


def test_silences_of_several_streams_are_counted_together():
    """Otherwise a client that reconnects often would never give up."""
    ports = UnreachablePorts()
    assert attempts([BulkFailure.SILENT], Ended(after=1), ports)[0] is SwitchState.ENDED
    assert ADDRESS not in ports
    assert attempts([BulkFailure.SILENT], ports=ports) == (SwitchState.STAYING, [0], [])
    assert ADDRESS in ports


def test_a_silence_of_a_flood_is_forgotten_with_the_first_connection(caplog):
    ports, ended = UnreachablePorts(), Ended()
    for _ in range(3):
        outcome = attempts([BulkFailure.SILENT, "connection"], ended, ports)
        assert outcome == (SwitchState.MOVED, [0, 1], ["connection"])
    assert ADDRESS not in ports and not caplog.messages and min(ended.waits) >= 1.0


def test_a_client_that_is_turned_away_tries_again_on_the_same_stream(caplog):
    ports, ended = UnreachablePorts(), Ended()
    away = BulkFailure.TURNED_AWAY
    with caplog.at_level(logging.INFO):
        result = attempts([away, away, away, "connection"], ended, ports)
    assert result == (SwitchState.MOVED, [0, 1, 2, 3], ["connection"])
    assert len(ended.waits) == 3 and ended.waits[0] < ended.waits[1] < ended.waits[2]
    assert ADDRESS not in ports
    assert len(caplog.messages) == 2  # for the first and the last attempt


def test_after_the_last_attempt_the_next_stream_may_try(caplog):
    ports = UnreachablePorts()
    for _ in range(2):
        state, dialled, _ = attempts([BulkFailure.TURNED_AWAY], ports=ports)
        assert state is SwitchState.STAYING and dialled == list(range(MOST_ATTEMPTS))
    assert ADDRESS not in ports
    assert sum(f"{MOST_ATTEMPTS} times" in line for line in caplog.messages) == 1


def test_a_stream_that_ends_in_a_pause_tries_no_more():
    assert attempts([BulkFailure.TURNED_AWAY], Ended(after=2)) == (SwitchState.ENDED, [0, 1], [])


def test_a_port_of_a_shard_that_has_died_is_not_remembered(caplog):
    ports = UnreachablePorts()
    state, _, _ = attempts([BulkFailure.UNREACHABLE], Ended(after=1), ports)
    assert state is SwitchState.ENDED and ADDRESS not in ports and not caplog.messages


# -- the shard -----------------------------------------------------------------------------------


class Connection:
    """Counts its ends."""

    def __init__(self):
        self.num_aborts = 0

    def abort(self):
        self.num_aborts += 1


def do(path, event):
    return {
        PathEvent.OFFERED: path.offer,
        PathEvent.ATTACHED: lambda: path.attach(Connection()),
        PathEvent.SWITCHED: path.switch,
        PathEvent.ENDED: path.end,
    }[event]()


@pytest.mark.parametrize(("state", "event"), list(itertools.product(PathState, PathEvent)))
def test_a_shard_moves_as_the_table_has_it(state, event):
    path = ServerPath()
    path.state = state
    do(path, event)
    assert path.state is PATH_TRANSITIONS.get((state, event), state)


def test_the_newest_connection_counts_until_the_client_switches():
    path, (first, second, late) = ServerPath(), (Connection() for _ in range(3))
    assert path.switch() is None  # a switch by a hostile client
    assert path.offer()
    path.attach(first)
    path.attach(second)
    assert (first.num_aborts, second.num_aborts) == (1, 0)
    assert path.switch() is second and path.state is PathState.MOVED
    path.attach(late)
    assert late.num_aborts == 1 and path.connection is second
    assert not path.offer()
    path.end()
    assert second.num_aborts == 1 and path.switch() is second  # a connection at its end


def test_a_connection_that_comes_after_the_end_is_closed():
    path, connection = ServerPath(), Connection()
    path.offer()
    path.end()
    path.attach(connection)
    assert connection.num_aborts == 1 and path.connection is None
