"""The shard's port for bulk connections; it listens from the first offer on.

Nobody is accepted while no offer is open. One thread accepts, and runs all handshakes
(`Handshake`), so a connection costs no thread before it carries frames.

Theory of operation. A connection is a stranger until it has sent the number of an open offer, which
nobody can guess. Strangers share 64 places: a newcomer always gets one, and where there is none the
oldest one of the address with the most loses its own (`FairPlaces`). An honest client sends its
number with its first packet, so it needs a place for an instant, and a stranger that waits cannot
take that away. After the number a connection belongs to the stream of the offer. A stream has one
such connection at a time: its next attempt ends the one before, and so does its own end.

Every connection has one deadline, from the moment when it was accepted until both ends are proven.
Bytes that trickle in do not move it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Protocol

from absl import logging

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.bulk.connection import BulkConnection
from thinwire.proto.bulk.handshake import (
    KEY_BYTES,
    NUMBER_BYTES,
    Handshake,
    HandshakeState,
    number_of,
    set_class,
)
from thinwire.proto.bulk.switching import MOST_ATTEMPTS, OFFER_SECONDS
from thinwire.proto.bulk.tls import TlsRecords, context_of
from thinwire.proto.security.fair_places import FairPlaces, address_of
from thinwire.runtime.run.credentials import Credentials

#: Connections that have not named an offer yet, each with a descriptor. A flood of 200 a second
#: takes a third of a second to fill them, a thousand times what an honest client needs one for.
MOST_STRANGERS = 64
#: From the moment when a connection is accepted to both proofs, TLS included. A client gives up
#: after 2 s (`switching.most_seconds`), so an honest one never meets this.
HANDSHAKE_SECONDS = 5.0
#: Connections that the system holds for this port. While an offer is open there are so many that a
#: flood does not make the system drop an honest client's first packet, which to the client would
#: look like a firewall; while none is open there are few, as nobody is expected.
_BACKLOG_OPEN, _BACKLOG_CLOSED = 1024, 8
#: Accepted between two looks at the connections that have places already.
_ACCEPTED_AT_A_TIME = 32
_LOOK_SECONDS = 1.0
#: How long nobody is accepted after the process has run out of descriptors or memory.
_REST_SECONDS = 1.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Offeree(Protocol):
    """The stream that an offer is made on."""

    peer: str

    @property
    def lost(self) -> bool:
        """Whether it has ended."""

    def attach(self, connection: BulkConnection) -> None:
        """Take the connection over."""


@dataclasses.dataclass(eq=False)
class _OpenOffer:
    """What one stream's client may connect with."""

    first_number: bytes
    key: bytes
    stream: Offeree
    deadline: float
    attempt: int = 0  # those before it are used
    connection: _Half | None = None  # of the newest attempt, while it is not proven

    def numbers(self, until: int = MOST_ATTEMPTS) -> list[bytes]:
        """Return the numbers from the next attempt on, up to the one before `until`."""
        return [number_of(self.first_number, self.key, n) for n in range(self.attempt, until)]


@dataclasses.dataclass(eq=False)
class _Half:
    """A connection whose ends are not proven."""

    socket: socket.socket
    deadline: float
    number: bytes = b""  # as much of it as has come
    offer: _OpenOffer | None = None  # that it has named
    handshake: Handshake | None = None
    unsent: bytes = b""


class BulkListener:
    """Accepts the connections that streams have offered.

    Args:
        address: To bind: the same as gRPC's.
        credentials: Of the shard.
        dscp: Class of service of what is sent, 0..63; None: the system's own.
        clock: Monotonic.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        dscp: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address, self._credentials, self._dscp = address, credentials, dscp
        self._clock = clock
        self._context: ssl.SSLContext | None = None
        self._offers: dict[Offeree, _OpenOffer] = {}
        self._numbers: dict[bytes, tuple[_OpenOffer, int]] = {}  # number -> its offer and attempt
        self._lock = threading.Lock()  # over both tables
        self._listening: socket.socket | None = None
        self._port = 0
        self._wake: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def offer(self, stream: Offeree) -> pb.BulkSession | None:
        """Return what a Welcome offers the stream's client; None where no port can be had."""
        number, key = secrets.token_bytes(NUMBER_BYTES), secrets.token_bytes(KEY_BYTES)
        with self._lock:
            if self._listening is None and not self._stopped:
                self._begin()
            if self._stopped or self._listening is None or self._wake is None:
                return None
            self._remove(stream)
            if not self._offers:
                self._listening.listen(_BACKLOG_OPEN)  # before the client knows of the port
            offer = _OpenOffer(number, key, stream, self._clock() + OFFER_SECONDS)
            self._offers[stream] = offer
            for attempt, each in enumerate(offer.numbers()):
                self._numbers[each] = offer, attempt
            self._awaken()
        return pb.BulkSession(port=self._port, number=number, key=key)

    def withdraw(self, stream: Offeree) -> None:
        """End a stream's offer: it has switched, or has ended."""
        with self._lock:
            if self._remove(stream):
                self._awaken()

    def stop(self) -> None:
        """Accept nobody any more, and end every handshake."""
        with self._lock:
            self._stopped = True
            thread, wake, self._wake = self._thread, self._wake, None
        if thread is not None and wake is not None:
            wake.close()
            thread.join()

    def _awaken(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(BlockingIOError):  # so many that it wakes anyway
                self._wake.send(b"!")

    def _begin(self) -> None:
        """Listen, at the first offer."""
        try:
            if self._credentials.certificate:
                self._context = context_of(self._credentials, serves=True)
            host = self._address.strip("[]")
            family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listening = socket.socket(family, kind)
            try:
                listening.bind(where)
                listening.listen(_BACKLOG_CLOSED)
                listening.setblocking(False)
            except BaseException:
                listening.close()
                raise
        except (OSError, ValueError) as error:
            logging.warning("no bulk connections: no port on %s: %s", self._address, error)
            self._stopped = True
            return
        self._port = int(listening.getsockname()[1])
        woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._listening = listening
        self._thread = threading.Thread(
            target=self._run, args=(listening, woken), name="bulk listener", daemon=True
        )
        self._thread.start()

    def _remove(self, stream: Offeree) -> _OpenOffer | None:
        """Forget a stream's offer; for the holder of the lock."""
        offer = self._offers.pop(stream, None)
        if offer is None:
            return None
        for number in offer.numbers():
            self._numbers.pop(number, None)
        if not self._offers and self._listening is not None and not self._stopped:
            self._listening.listen(_BACKLOG_CLOSED)
        return offer

    # -- the listening thread -------------------------------------------------------------------

    def _run(self, listening: socket.socket, woken: socket.socket) -> None:
        with woken, selectors.DefaultSelector() as selector:
            halves = _Halves(selector)
            selector.register(woken, selectors.EVENT_READ)
            is_open, rests_until = False, -math.inf
            while not self._stopped:
                if is_open != (bool(self._offers) and self._clock() >= rests_until):
                    is_open = not is_open
                    if is_open:
                        selector.register(listening, selectors.EVENT_READ)
                    else:
                        selector.unregister(listening)
                idle = not self._offers and not len(halves)
                events = selector.select(None if idle else _LOOK_SECONDS)
                # Those who have a place come first: one that has sent its number needs none.
                for key, _ in events:
                    if key.fileobj is woken:
                        woken.recv(4096)
                    elif isinstance(key.data, _Half) and key.data in halves:
                        self._advance(key.data, halves)
                if any(key.fileobj is listening for key, _ in events):
                    try:
                        self._accept(listening, halves)
                    except OSError as error:
                        if error.errno in _EXHAUSTED:  # else the loop would run without a pause
                            logging.log_every_n_seconds(
                                logging.WARNING, "accepting no bulk connection: %s", 10, error
                            )
                            halves.end_strangers()
                            rests_until = self._clock() + _REST_SECONDS
                self._end_late(halves)
            halves.end_all()
        with self._lock:
            listening.close()

    def _accept(self, listening: socket.socket, halves: _Halves) -> None:
        for _ in range(_ACCEPTED_AT_A_TIME):
            if not self._offers:  # the last one was withdrawn a moment ago
                return
            try:
                connected, address = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            connected.setblocking(False)
            half = _Half(connected, self._clock() + HANDSHAKE_SECONDS)
            halves.add(half, address_of(str(address[0])), self._clock())
            self._advance(half, halves)  # its number has come with it, as a rule

    def _end_late(self, halves: _Halves) -> None:
        now = self._clock()
        with self._lock:
            for offer in list(self._offers.values()):
                if offer.deadline < now or offer.stream.lost:
                    self._remove(offer.stream)
        for half in halves.late(now):
            if half.offer is not None and not half.offer.stream.lost:
                reason = f"its handshake took longer than {HANDSHAKE_SECONDS:g} s"
                logging.info("%s: no bulk connection: %s", half.offer.stream.peer, reason)
            halves.end(half)

    def _advance(self, half: _Half, halves: _Halves) -> None:
        """Read what has come, send what is due, and take the connection over when it is proven."""
        try:
            self._send(half, halves)
            while not half.unsent and half in halves:
                if half.handshake and half.handshake.state is HandshakeState.PROVEN:
                    self._take_over(half, half.handshake, halves)
                    return
                wanted = NUMBER_BYTES - len(half.number)
                if half.handshake is not None:
                    wanted = half.handshake.wanted_bytes
                data = half.socket.recv(wanted)
                if not data:
                    raise ConnectionResetError("the other end closed the connection")
                if half.handshake is None:
                    self._take_number(half, data, halves)
                else:
                    half.unsent = half.handshake.receive(data)
                self._send(half, halves)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            halves.end(half)
            if half.offer is not None:
                logging.info("%s: no bulk connection: %s", half.offer.stream.peer, error)

    @staticmethod
    def _send(half: _Half, halves: _Halves) -> None:
        if half.unsent:
            with contextlib.suppress(BlockingIOError):
                half.unsent = half.unsent[half.socket.send(half.unsent) :]
            halves.watch(half)

    def _take_number(self, half: _Half, data: bytes, halves: _Halves) -> None:
        half.number += data
        if len(half.number) < NUMBER_BYTES:
            return
        with self._lock:
            offer, attempt = self._numbers.get(half.number, (None, 0))
            if offer is not None:
                for used in offer.numbers(until=attempt + 1):
                    del self._numbers[used]
                offer.attempt = attempt + 1
        if offer is None:
            halves.end(half)
            return
        halves.name(half, offer)
        set_class(half.socket, self._dscp)
        records = None if self._context is None else TlsRecords(self._context, None)
        half.handshake = Handshake(
            half.number, offer.key, self._credentials.token, records, serves=True
        )
        half.unsent = half.handshake.begin()

    @staticmethod
    def _take_over(half: _Half, handshake: Handshake, halves: _Halves) -> None:
        """Give the connection to its stream, before the client learns that it stands."""
        offer = half.offer
        halves.release(half)
        wire = handshake.wire(half.socket)
        connection = BulkConnection(wire)
        if offer is not None:
            offer.stream.attach(connection)
        try:
            wire.send((handshake.proof,))  # never waits: all that was sent before has arrived
        except OSError:  # the client has left; it may come again
            connection.abort()


class _Halves:
    """The connections whose ends are not proven; for the listening thread."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._all: dict[_Half, None] = {}  # in the order in which they came
        self._strangers: FairPlaces[_Half] = FairPlaces()

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, half: _Half) -> bool:
        return half in self._all

    def add(self, half: _Half, address: str, now: float) -> None:
        """Take in a stranger; where there are too many, another one goes."""
        self._all[half] = None
        self._selector.register(half.socket, selectors.EVENT_READ, half)
        for lost in self._strangers.take(half, address, now, MOST_STRANGERS):
            self.end(lost)

    def name(self, half: _Half, offer: _OpenOffer) -> None:
        """Make a stranger the connection of an offer; end the one before."""
        self._strangers.leave(half)
        if offer.connection is not None:
            self.end(offer.connection)
        half.offer, offer.connection = offer, half

    def watch(self, half: _Half) -> None:
        """Wait until more can be sent, if there is more to send, else until more has come."""
        wanted = selectors.EVENT_WRITE if half.unsent else selectors.EVENT_READ
        self._selector.modify(half.socket, wanted, half)

    def late(self, now: float) -> list[_Half]:
        """Return those whose time is over, and those whose stream has ended."""
        return [
            half
            for half in self._all
            if half.deadline < now or (half.offer is not None and half.offer.stream.lost)
        ]

    def release(self, half: _Half) -> None:
        """Forget a connection, and leave its socket open."""
        if half not in self._all:
            return
        del self._all[half]
        self._strangers.leave(half)
        self._selector.unregister(half.socket)
        if half.offer is not None and half.offer.connection is half:
            half.offer.connection = None

    def end(self, half: _Half) -> None:
        """Close a connection."""
        if half in self._all:
            self.release(half)
        half.socket.close()

    def end_strangers(self) -> None:
        """Close all that have not named an offer."""
        for half in self._strangers.shrink(0):
            self.end(half)

    def end_all(self) -> None:
        """Close all."""
        for half in list(self._all):
            self.end(half)
