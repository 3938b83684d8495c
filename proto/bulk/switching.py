"""State machines that move a stream's messages from gRPC to its bulk connection.

A client opens its bulk connection in a separate thread while the stream's messages are sent over
gRPC, so heartbeats and requests are not delayed. A firewall that drops packets to the port for bulk
connections costs the run only speed.

A client's stream changes its state `SwitchState` on these events:

    DIALLING -> MOVED on `CONNECTED`: the client sends Switch as its last message over gRPC.
    DIALLING -> WAITING on `TURNED_AWAY`: the shard is overloaded, so the client tries again later.
    DIALLING -> WAITING on `SILENT`: the shard did not answer the client's first attempt, perhaps
        because of a flood, so the client tries again later.
    DIALLING -> STAYING on `UNREACHABLE`: the client's process never tries the shard's bulk port
        again, because it is unreachable or did not answer a second attempt.
    DIALLING -> STAYING on `DISTRUSTED`: the client's process never tries the shard's bulk port
        again, because the peer did not prove that it is the shard.
    DIALLING -> STAYING on `SPENT`: the client's last attempt failed; its next stream gets a new
        offer.
    WAITING -> DIALLING on `DUE`: the pause before the client's next attempt is over.
    Any state -> ENDED on `ENDED`: the client's gRPC stream has ended.

The shard's end of a gRPC stream never waits for a bulk connection. The shard holds the client's
newest authenticated bulk connection until the client's Switch message arrives, which may never
happen.

The shard changes the state `PathState` of its end of the stream on these events:

    GRPC -> OFFERED on `OFFERED`: the shard has offered the client a bulk connection.
    OFFERED -> ATTACHED on `ATTACHED`: the client has proven its identity on a bulk connection.
    ATTACHED -> ATTACHED on `ATTACHED`: the client has replaced its bulk connection by a newer one.
    ATTACHED -> MOVED on `SWITCHED`: the client's Switch has arrived, and its later messages come
        over the bulk connection.
    Any state -> ENDED on `ENDED`: the client's gRPC stream has ended.
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

#: Fraction of the lease that one attempt to open a bulk connection may take. The gRPC stream works
#: during the attempt, so the limit only bounds how long a blocked port is not reported. An attempt
#: takes four round trips, which any link that is fast enough for the lease completes in a quarter
#: of the lease.
SWITCH_PER_LEASE = 1 / 4
#: Longest time in seconds of one attempt to open a bulk connection, however long the lease is. The
#: limit permits one retransmission: TCP sends a lost first packet again after 1 s.
_LONGEST_ATTEMPT_SECONDS = 2.0
#: Largest number of attempts of one stream to open a bulk connection. The attempts and their pauses
#: take 150 s in total.
MOST_ATTEMPTS = 12
#: First and longest pause between two connection attempts, in seconds.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 30.0
#: Shortest pause after a connection attempt that got no answer, in seconds.
_SILENCE_SECONDS = 1.0
#: Number of unanswered attempts after which a process treats a shard's port as blocked.
_SILENCES = 2
#: Lifetime of a shard's offer of a bulk connection, in seconds: enough for all client attempts.
OFFER_SECONDS = 180.0
#: Seconds to wait before an unreachable bulk port is reported. The ports of a shard that has died
#: are unreachable too, but within this time the gRPC stream to a dead shard has ended.
_DEATH_SECONDS = 1.0


def most_seconds(lease_seconds: float) -> float:
    """Return the time limit of one attempt to open a bulk connection, in seconds.

    Args:
        lease_seconds: Lease of the run, in seconds; 0 if unknown.
    """
    if lease_seconds <= 0:
        return _LONGEST_ATTEMPT_SECONDS
    return min(_LONGEST_ATTEMPT_SECONDS, SWITCH_PER_LEASE * lease_seconds)


# -- the client ------------------------------------------------------------------------------------


class SwitchState(enum.Enum):
    """State of a client's gRPC stream on its move to a bulk connection."""

    DIALLING = "an attempt is running; messages go over gRPC"
    WAITING = "the next attempt is not due yet; messages go over gRPC"
    MOVED = "messages go over the bulk connection"
    STAYING = "messages go over gRPC until the stream ends"
    ENDED = "the stream has ended"


class SwitchEvent(enum.Enum):
    """Event that changes the `SwitchState` of a client's gRPC stream.

    A failed attempt is the event with the name of its `BulkFailure`.
    """

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
#: Failures of a connection attempt after which another attempt may succeed.
_MAY_PASS = (BulkFailure.TURNED_AWAY, BulkFailure.SILENT)


class ClientSwitch:
    """State machine of one gRPC stream's attempts to open a bulk connection; no clock, no socket.

    Attributes:
        state: Current state of the client's stream on its move to a bulk connection.
        attempt: Index of the running or next attempt to open a bulk connection, from 0.
    """

    def __init__(self) -> None:
        self.state = SwitchState.DIALLING
        self.attempt = 0
        self._pauses = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)

    def on(self, event: SwitchEvent) -> None:
        """Change the `SwitchState` of the client's gRPC stream by one event."""
        if (self.state, event) not in SWITCH_TRANSITIONS:
            raise RuntimeError(
                f"event {event.name} is not allowed in the switch state {self.state.name}"
            )
        self.state = SWITCH_TRANSITIONS[self.state, event]

    def fail(self, failure: BulkFailure, draw: float) -> float | None:
        """Record a failed connection attempt; return the pause before the next attempt, in seconds.

        Args:
            failure: Kind of the failure of the connection attempt.
            draw: Random number, uniform in [0, 1), which spreads the next attempts of clients that
                an overloaded shard has rejected together.

        Returns:
            The pause in seconds, or None if no further attempt follows.
        """
        self.attempt += 1
        is_spent = self.attempt == MOST_ATTEMPTS and failure in _MAY_PASS
        self.on(SwitchEvent.SPENT if is_spent else SwitchEvent[failure.name])
        if self.state is not SwitchState.WAITING:
            return None
        pause = self._pauses.next_seconds(draw)
        return max(pause, _SILENCE_SECONDS) if failure is BulkFailure.SILENT else pause


class UnreachablePorts:
    """Set of the gRPC addresses of shards with an unusable bulk port. Thread-safe."""

    def __init__(self) -> None:
        self._avoided: set[str] = set()
        self._reported: set[str] = set()
        self._num_silences: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()

    def __contains__(self, address: str) -> bool:
        with self._lock:
            return address in self._avoided

    def is_dropped(self, address: str) -> bool:
        """Count an unanswered connection attempt; return True if the shard's port counts as
        blocked.
        """
        with self._lock:
            self._num_silences[address] += 1
            return self._num_silences[address] >= _SILENCES

    def clear(self, address: str) -> None:
        """Record that a shard's bulk port is reachable: reset the count of unanswered attempts."""
        with self._lock:
            del self._num_silences[address]

    def avoid(self, address: str) -> None:
        """Mark the shard's bulk port as unusable: clients then ignore the shard's offers."""
        with self._lock:
            self._avoided.add(address)

    def report(self, address: str, text: str) -> None:
        """Log why the messages to a shard are sent over gRPC, once per shard."""
        with self._lock:
            is_new = address not in self._reported
            self._reported.add(address)
        if is_new:
            logging.warning("%s", text)


#: Bulk ports that this process could not reach. After a lost connection, a worker's next stream
#: does not try an unreachable port again.
UNREACHABLE = UnreachablePorts()

_CONSEQUENCE = (
    "On a fast network, dense exchanges run at a third to two thirds of the full speed; training "
    "is otherwise unaffected."
)
_REMEDY = (
    "For full speed, let this node open TCP connections to that host at other ports than --port: "
    "the bulk port of a PS is any free port (on Linux from net.ipv4.ip_local_port_range, 32768 to "
    "60999)."
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
    """Try to open a bulk connection until the client's stream has moved, stays on gRPC or ends.

    The caller runs the connection attempts in a separate thread.

    Args:
        address: ``host:port`` of the shard's gRPC server.
        port: TCP port on which the shard accepts bulk connections.
        dial: Function of the index of an attempt that returns the open bulk connection or raises
            NoBulkConnection.
        take: Function called with the open bulk connection, which the stream takes over.
        ended: Event that is set when the client's gRPC stream has ended.
        draw: Function that returns a random number, uniform in [0, 1).
        ports: Unreachable bulk ports of shards that this process has recorded.

    Returns:
        The final state of the stream: moved, staying on gRPC, or ended.
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
                        "%s: the bulk connection to port %d failed (%s); messages are sent over "
                        "gRPC until another attempt succeeds",
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
                logging.info("%s: messages now use a bulk connection to port %d", address, port)
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
            f"the program that answers at port {port} of that host is not the PS ({error}). "
            f"{_CONSEQUENCE} {_REMEDY} A NAT or proxy on the path must not change the ports."
        )
    else:
        text += (
            f"{MOST_ATTEMPTS} times the connection to port {port} of that host ended before the "
            f"handshake was complete ({error}). {_CONSEQUENCE} Strangers may flood the port, or a "
            "machine on the path may cut connections: let only nodes of the run reach that host. "
            "The next stream tries again."
        )
    ports.report(address, text)


# -- the shard -------------------------------------------------------------------------------------


class PathState(enum.Enum):
    """State of the shard's end of a gRPC stream on the move to a bulk connection."""

    GRPC = "no bulk connection was offered"
    OFFERED = "the client may connect; messages go over gRPC"
    ATTACHED = "the client has connected; messages go over gRPC"
    MOVED = "the client sends its messages over the bulk connection"
    ENDED = "the stream has ended"


class PathEvent(enum.Enum):
    """Event that changes the `PathState` of a gRPC stream at the shard."""

    OFFERED = "offered"
    ATTACHED = "attached"
    SWITCHED = "the client's Switch has arrived"
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
    """State machine of a shard that decides whether a stream's messages use gRPC or a bulk
    connection. Thread-safe.

    An event of a stream that is not legal in the stream's current state is ignored. Two examples of
    events that are not legal: a client's bulk connection becomes ready just after its stream has
    ended, and a hostile client sends Switch without a bulk connection.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.state = PathState.GRPC
        self.connection: BulkConnection | None = None

    def offer(self) -> bool:
        """Return True if the shard may offer the stream's client a bulk connection now."""
        with self._lock:
            return self._on(PathEvent.OFFERED)

    def attach(self, connection: BulkConnection) -> None:
        """Store an authenticated bulk connection, to which the client may switch later."""
        with self._lock:
            former, takes = self.connection, self._on(PathEvent.ATTACHED)
            if takes:
                self.connection = connection
        if not takes:
            connection.abort()
        elif former is not None:
            former.abort()

    def switch(self) -> BulkConnection | None:
        """Return the bulk connection that the client has switched to; None if none is attached."""
        with self._lock:
            self._on(PathEvent.SWITCHED)
            # A connection that has ended is returned too, because the caller reads the connection's
            # last received messages.
            return self.connection

    def end(self) -> None:
        """Close the bulk connection, because its gRPC stream has ended."""
        with self._lock:
            self._on(PathEvent.ENDED)
            connection = self.connection
        if connection is not None:
            connection.abort()

    def _on(self, event: PathEvent) -> bool:
        state = PATH_TRANSITIONS.get((self.state, event))
        self.state = state or self.state
        return state is not None
