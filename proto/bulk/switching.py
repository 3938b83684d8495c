"""When a stream moves to its bulk connection: the states of both ends, and what a client remembers.

The client. A thread of the stream tries while the stream itself works over gRPC: its heartbeats and
requests do not wait. So a firewall that drops the port costs the run nothing but speed.

    DIALLING --connected----> MOVED      Switch is the last message over gRPC.
    DIALLING --turned away--> WAITING    A shard that is crowded: another attempt, a little later.
    WAITING  --due----------> DIALLING
    DIALLING --silent-------> WAITING    A firewall or a flood: a second attempt shows which one.
    DIALLING --unreachable--> STAYING    Remembered for the life of this process; also the second
                                         silence, be it on this stream or on a later one.
    DIALLING --distrusted---> STAYING    The same.
    DIALLING --spent--------> STAYING    The last attempt; the next stream begins with a new offer.
    any      --ended--------> ENDED      The stream has ended.

The shard has no state in which its stream waits. It takes in the newest proven connection of the
client until the client's Switch comes, if it ever does.

    GRPC     --offered--> OFFERED
    OFFERED  --attached-> ATTACHED
    ATTACHED --attached-> ATTACHED   The client gave the one before up, a moment before it stood.
    ATTACHED --switched-> MOVED      The client's Switch has come; the rest is on the connection.
    any      --ended----> ENDED
"""

from __future__ import annotations

import collections
import enum
import threading
from collections.abc import Callable

from absl import logging

from thinwire.proto.bulk.connection import BulkConnection
from thinwire.proto.bulk.handshake import BulkFailure, NoBulkConnection
from thinwire.runtime.failure_detector import Backoff

#: Of the lease, for one whole attempt. The stream works meanwhile, so this only bounds how long a
#: port that drops everything goes unreported. An attempt takes four round trips, which a
#: quarter of any lease that a link can keep has time for.
SWITCH_PER_LEASE = 1 / 4
#: With long leases; TCP sends a first packet that was lost again after 1 s.
_LONGEST_ATTEMPT_SECONDS = 2.0
#: Attempts of one stream, and the pauses between them: 150 s in all.
MOST_ATTEMPTS = 12
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 30.0
#: From a silence to the second attempt, at least.
_SILENCE_SECONDS = 1.0
#: How many attempts on a port meet silence before it counts as dropped, in the life of a process.
_SILENCES = 2
#: How long a shard's offer stands: all attempts of a client fit in.
OFFER_SECONDS = 180.0
#: How soon a stream ends after a shard has died, whose ports are then unreachable for another
#: reason than a firewall.
_DEATH_SECONDS = 1.0


def most_seconds(lease_seconds: float) -> float:
    """Return how long one attempt may take.

    Args:
        lease_seconds: Of the run; 0: not known.
    """
    if lease_seconds <= 0:
        return _LONGEST_ATTEMPT_SECONDS
    return min(_LONGEST_ATTEMPT_SECONDS, SWITCH_PER_LEASE * lease_seconds)


# -- the client ------------------------------------------------------------------------------------


class SwitchState(enum.Enum):
    """Where a client's stream is."""

    DIALLING = "an attempt is under way; messages go over gRPC"
    WAITING = "the next attempt is not due; messages go over gRPC"
    MOVED = "the connection stands, and is used"
    STAYING = "all goes over gRPC as long as the stream lives"
    ENDED = "the stream has ended"


class SwitchEvent(enum.Enum):
    """What moves it."""

    CONNECTED = "connected"
    TURNED_AWAY = "turned away"
    SILENT = "silent for the first time"
    UNREACHABLE = "unreachable"
    DISTRUSTED = "distrusted"
    SPENT = "turned away for the last time"
    DUE = "the pause is over"
    ENDED = "the stream has ended"


_State, _Event = SwitchState, SwitchEvent
SWITCH_TRANSITIONS: dict[tuple[SwitchState, SwitchEvent], SwitchState] = {
    (_State.DIALLING, _Event.CONNECTED): _State.MOVED,
    (_State.DIALLING, _Event.TURNED_AWAY): _State.WAITING,
    (_State.DIALLING, _Event.SILENT): _State.WAITING,
    (_State.DIALLING, _Event.UNREACHABLE): _State.STAYING,
    (_State.DIALLING, _Event.DISTRUSTED): _State.STAYING,
    (_State.DIALLING, _Event.SPENT): _State.STAYING,
    (_State.DIALLING, _Event.ENDED): _State.ENDED,
    (_State.WAITING, _Event.DUE): _State.DIALLING,
    (_State.WAITING, _Event.ENDED): _State.ENDED,
    (_State.MOVED, _Event.ENDED): _State.ENDED,
    (_State.STAYING, _Event.ENDED): _State.ENDED,
}
_EVENT_OF = {
    BulkFailure.SILENT: _Event.SILENT,
    BulkFailure.UNREACHABLE: _Event.UNREACHABLE,
    BulkFailure.DISTRUSTED: _Event.DISTRUSTED,
    BulkFailure.TURNED_AWAY: _Event.TURNED_AWAY,
}


#: Another attempt may succeed.
_MAY_PASS = (BulkFailure.TURNED_AWAY, BulkFailure.SILENT)


class ClientSwitch:
    """Decides on the attempts of one stream; without a clock, a socket or a thread.

    Attributes:
        state: See `SwitchState`.
        attempt: The number of the one that is under way or next, from 0.
    """

    def __init__(self) -> None:
        self.state = SwitchState.DIALLING
        self.attempt = 0
        self._pauses = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)

    def on(self, event: SwitchEvent) -> None:
        """Move by one event."""
        if (self.state, event) not in SWITCH_TRANSITIONS:
            raise RuntimeError(f"a stream's switch is {self.state.name} and met {event.name}")
        self.state = SWITCH_TRANSITIONS[self.state, event]

    def fail(self, failure: BulkFailure, draw: float) -> float | None:
        """Record that the attempt has failed; return how long to pause, or None for no other one.

        Args:
            failure: In which manner.
            draw: Uniform in [0, 1): clients that were turned away together do not return together.
        """
        self.attempt += 1
        is_spent = self.attempt == MOST_ATTEMPTS and failure in _MAY_PASS
        self.on(SwitchEvent.SPENT if is_spent else _EVENT_OF[failure])
        if self.state is not SwitchState.WAITING:
            return None
        pause = self._pauses.next_seconds(draw)
        return max(pause, _SILENCE_SECONDS) if failure is BulkFailure.SILENT else pause


class UnreachablePorts:
    """The shards whose bulk ports this process cannot use, by their gRPC addresses (any thread)."""

    def __init__(self) -> None:
        self._avoided: set[str] = set()
        self._reported: set[str] = set()
        self._num_silences: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def __contains__(self, address: str) -> bool:
        with self._lock:
            return address in self._avoided

    def is_dropped(self, address: str) -> bool:
        """Record that a shard's port was silent; return whether it has been so too often."""
        with self._lock:
            self._num_silences[address] += 1
            return self._num_silences[address] >= _SILENCES

    def clear(self, address: str) -> None:
        """Record that a shard's port can be reached."""
        with self._lock:
            del self._num_silences[address]

    def avoid(self, address: str) -> None:
        """Accept no offer of this shard any more."""
        with self._lock:
            self._avoided.add(address)

    def report(self, address: str, text: str) -> None:
        """Log why a shard's messages stay on gRPC, the first time."""
        with self._lock:
            is_new = address not in self._reported
            self._reported.add(address)
        if is_new:
            logging.warning("%s", text)


#: Of this process. A worker is one process in a run, so its next stream, after a cut, does not try
#: in vain again.
UNREACHABLE = UnreachablePorts()

_CONSEQUENCE = (
    "On a fast network dense exchanges then run at a third to two thirds of the speed; nothing "
    "else changes."
)
_REMEDY = (
    "To move them, let this node open TCP connections to that host beyond --port too: a PS listens "
    "at any free port (on Linux those of net.ipv4.ip_local_port_range, 32768 to 60999)."
)


def run_attempts(
    address: str,
    port: int,
    dial: Callable[[int], BulkConnection],
    take: Callable[[BulkConnection], None],
    ended: threading.Event,
    draw: Callable[[], float],
    ports: UnreachablePorts,
) -> SwitchState:
    """Make a client's attempts until the stream has moved, stays or ends; in a thread of its own.

    Args:
        address: ``host:port`` of the shard's gRPC.
        port: Of the shard's bulk connections.
        dial: Makes the attempt of this number; raises NoBulkConnection.
        take: Takes the connection over.
        ended: Set when the stream has ended.
        draw: Uniform in [0, 1).
        ports: What this process remembers.

    Returns:
        The state at the end.
    """
    switch, is_reported = ClientSwitch(), False
    while switch.state is SwitchState.DIALLING:
        try:
            connection = dial(switch.attempt)
        except NoBulkConnection as error:
            if ended.is_set():
                switch.on(SwitchEvent.ENDED)
                break
            failure = error.failure
            if failure is BulkFailure.SILENT and ports.is_dropped(address):
                failure = BulkFailure.UNREACHABLE
            pause = switch.fail(failure, draw())
            if pause is not None:
                if failure is BulkFailure.TURNED_AWAY and not is_reported:
                    is_reported = True
                    logging.info(
                        "%s: port %d turned this node away (%s); messages go over gRPC until "
                        "another attempt succeeds",
                        *(address, port, error),
                    )
                switch.on(SwitchEvent.ENDED if ended.wait(pause) else SwitchEvent.DUE)
            elif ended.wait(_DEATH_SECONDS):
                switch.on(SwitchEvent.ENDED)
            else:
                _report(address, port, failure, error, ports)
        else:
            ports.clear(address)
            take(connection)
            switch.on(SwitchEvent.CONNECTED)
            if switch.attempt:
                logging.info("%s: messages moved to port %d after all", address, port)
    return switch.state


def _report(
    address: str, port: int, failure: BulkFailure, error: NoBulkConnection, ports: UnreachablePorts
) -> None:
    text = f"messages to {address} stay on gRPC: "
    if failure is BulkFailure.UNREACHABLE:
        ports.avoid(address)
        text += (
            f"TCP port {port} of that host cannot be reached ({error}). {_CONSEQUENCE} {_REMEDY}"
        )
    elif failure is BulkFailure.DISTRUSTED:
        ports.avoid(address)
        text += (
            f"another program than the PS answers at port {port} of that host ({error}). "
            f"{_CONSEQUENCE} {_REMEDY} A NAT or proxy in between must not change the ports."
        )
    else:
        text += (
            f"port {port} of that host was connected {MOST_ATTEMPTS} times, and each time the "
            f"connection ended before both ends were proven ({error}). {_CONSEQUENCE} Others may "
            "flood that port, or a machine in between cuts the connections: let only nodes of the "
            "run reach that host. The next stream tries again."
        )
    ports.report(address, text)


# -- the shard -------------------------------------------------------------------------------------


class PathState(enum.Enum):
    """Where a shard's stream is."""

    GRPC = "nothing was offered"
    OFFERED = "the client may connect; messages go over gRPC"
    ATTACHED = "the client has connected; messages go over gRPC"
    MOVED = "what the client sends comes over the connection"
    ENDED = "the stream has ended"


class PathEvent(enum.Enum):
    """What moves it."""

    OFFERED = "offered"
    ATTACHED = "attached"
    SWITCHED = "the client's Switch has come"
    ENDED = "the stream has ended"


PATH_TRANSITIONS: dict[tuple[PathState, PathEvent], PathState] = {
    (PathState.GRPC, PathEvent.OFFERED): PathState.OFFERED,
    (PathState.GRPC, PathEvent.ENDED): PathState.ENDED,
    (PathState.OFFERED, PathEvent.OFFERED): PathState.OFFERED,
    (PathState.OFFERED, PathEvent.ATTACHED): PathState.ATTACHED,
    (PathState.OFFERED, PathEvent.ENDED): PathState.ENDED,
    (PathState.ATTACHED, PathEvent.ATTACHED): PathState.ATTACHED,
    (PathState.ATTACHED, PathEvent.SWITCHED): PathState.MOVED,
    (PathState.ATTACHED, PathEvent.ENDED): PathState.ENDED,
    (PathState.MOVED, PathEvent.ENDED): PathState.ENDED,
}


class ServerPath:
    """The path of one stream's messages at the shard (any thread).

    An event that the state has no place for changes nothing: a client's connection may stand when
    its stream has just ended, and a hostile client may send Switch without one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.state = PathState.GRPC
        self.connection: BulkConnection | None = None

    def offer(self) -> bool:
        """Return whether the client may be offered a connection."""
        with self._lock:
            return self._on(PathEvent.OFFERED)

    def attach(self, connection: BulkConnection) -> None:
        """Take a proven connection over, for when the client switches to it."""
        with self._lock:
            former, takes = self.connection, self._on(PathEvent.ATTACHED)
            if takes:
                self.connection = connection
        if not takes:
            connection.abort()
        elif former is not None:
            former.abort()

    def switch(self) -> BulkConnection | None:
        """Return the connection that the client has switched to; None: it has none."""
        with self._lock:
            self._on(PathEvent.SWITCHED)
            return self.connection  # one that has ended is read to its end

    def end(self) -> None:
        """End the connection with the stream."""
        with self._lock:
            self._on(PathEvent.ENDED)
            connection = self.connection
        if connection is not None:
            connection.abort()

    def _on(self, event: PathEvent) -> bool:
        state = PATH_TRANSITIONS.get((self.state, event))
        self.state = state or self.state
        return state is not None
