"""The shard's port for bulk (TCP) connections, which opens at the first offer to a client.

The shard's bulk port accepts connections only while an offer of a bulk connection to a client is
open. One thread of the shard accepts bulk connections and runs all their handshakes (`Handshake`).
A bulk (TCP) connection occupies no thread of its own before it carries frames.

Theory of operation. A bulk connection is a stranger (not related to any client) until it has sent
the secret number of an open offer. A stranger (connection of an unknown client) cannot guess the
number of an offer, which has 16 random bytes. At most 64 strangers (connections that have not sent
an offer's number) stay open together. A shard always accepts a new connection to its bulk (TCP)
port. If too many connections have not sent an offer's number, the shard closes the oldest
connection of the address with the most such connections (`FairPlaces`). An honest client sends the
number of its offer in its first packet, so waiting connections of unknown clients cannot keep an
honest client out. After it has sent an offer's number, a bulk connection belongs to the gRPC stream
of that offer. A gRPC stream has at most one bulk connection whose client has not proven its
identity. The client's next attempt, or the end of its gRPC stream, closes a bulk connection whose
client has not proven its identity.

On every bulk connection, the client must prove its identity within a time limit from the acceptance
of the connection. Single bytes that a client sends do not extend the deadline of its handshake.
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

#: Largest number of connections that have not sent an offer's number yet, each of which needs a
#: file descriptor. A flood of 200 connections per second reaches this number in a third of a
#: second. An honest client sends the number within a thousandth of that time.
MOST_STRANGERS = 64
#: Time limit in seconds from the acceptance of a connection to both proofs, including the TLS
#: handshake. A client gives up after 2 s (`switching.most_seconds`), so an honest client never
#: reaches this limit.
HANDSHAKE_SECONDS = 5.0
#: Length of the listening socket's accept queue, in connections. While an offer is open, the queue
#: is long enough that a flood does not make the system drop an honest client's first packet; the
#: client would mistake the drop for a firewall. Without an open offer, no connection is expected.
_BACKLOG_OPEN, _BACKLOG_CLOSED = 1024, 8
#: Largest number of connections that the listening thread accepts before it continues the open
#: handshakes.
_ACCEPTED_AT_A_TIME = 32
#: Longest time between two checks of the handshakes' deadlines, in seconds.
_LOOK_SECONDS = 1.0
#: Seconds for which the listening thread accepts no connection after the process has run out of
#: descriptors or memory.
_REST_SECONDS = 1.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Offeree(Protocol):
    """The gRPC stream whose client receives the offer of a bulk connection.

    Attributes:
        peer: Name of the stream's client (its address), for log lines.
    """

    peer: str

    @property
    def lost(self) -> bool:
        """True if the client's gRPC stream has ended."""

    def attach(self, connection: BulkConnection) -> None:
        """Take over a bulk connection whose client has proven its identity."""


@dataclasses.dataclass(eq=False)
class _OpenOffer:
    """A valid offer of a bulk connection to the client of one gRPC stream."""

    first_number: bytes
    key: bytes
    stream: Offeree
    deadline: float
    # Index of the client's next attempt to connect. The secret numbers of earlier attempts are
    # invalid.
    attempt: int = 0
    # Connection of the client's newest attempt; None before the first attempt.
    connection: _Half | None = None

    def numbers(self, until: int = MOST_ATTEMPTS) -> list[bytes]:
        """Return the secret numbers of the connection attempts from the next attempt to attempt
        `until` (exclusive).
        """
        return [number_of(self.first_number, self.key, n) for n in range(self.attempt, until)]


@dataclasses.dataclass(eq=False)
class _Half:
    """An accepted bulk connection whose client has not yet proven its identity."""

    socket: socket.socket
    deadline: float
    number: bytes = b""  # Received bytes of the connection attempt's secret number.
    # Offer with the received number; None until the number has arrived.
    offer: _OpenOffer | None = None
    handshake: Handshake | None = None
    unsent: bytes = b""


class BulkListener:
    """Offers bulk (TCP) connections to the clients of gRPC streams, and accepts these connections.

    Args:
        address: IP address or host name to listen on, equal to the address of the shard's gRPC
            server.
        credentials: Certificate, key and token of the shard.
        dscp: Class of service of sent packets, 0..63; None: the system's default.
        clock: Function that returns seconds of a monotonic clock.
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
        # Secret number -> (offer of a bulk connection, index of the attempt).
        self._numbers: dict[bytes, tuple[_OpenOffer, int]] = {}
        self._lock = threading.Lock()  # Lock that protects the dicts _offers and _numbers.
        self._listening: socket.socket | None = None
        self._port = 0
        self._wake: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def offer(self, stream: Offeree) -> pb.BulkSession | None:
        """Return the offer of a bulk connection for a stream's Welcome; None if no port can be
        opened.
        """
        number, key = secrets.token_bytes(NUMBER_BYTES), secrets.token_bytes(KEY_BYTES)
        with self._lock:
            if self._listening is None and not self._stopped:
                self._begin()
            if self._stopped or self._listening is None or self._wake is None:
                return None
            self._remove(stream)
            if not self._offers:
                # The longer accept queue must be set before the client gets the port.
                self._listening.listen(_BACKLOG_OPEN)
            offer = _OpenOffer(number, key, stream, self._clock() + OFFER_SECONDS)
            self._offers[stream] = offer
            for attempt, attempt_number in enumerate(offer.numbers()):
                self._numbers[attempt_number] = offer, attempt
            self._awaken()
        return pb.BulkSession(port=self._port, number=number, key=key)

    def withdraw(self, stream: Offeree) -> None:
        """Remove the offer of a stream that has moved to its bulk connection or has ended."""
        with self._lock:
            if self._remove(stream):
                self._awaken()

    def stop(self) -> None:
        """Stop accepting bulk connections, and end all handshakes of bulk connections."""
        with self._lock:
            self._stopped = True
            thread, wake, self._wake = self._thread, self._wake, None
        if thread is not None and wake is not None:
            wake.close()
            thread.join()

    def _awaken(self) -> None:
        if self._wake is not None:
            # If the buffer of the wake-up socket is full, its bytes already wake the listening
            # thread.
            with contextlib.suppress(BlockingIOError):
                self._wake.send(b"!")

    def _begin(self) -> None:
        """Open the shard's bulk port and start the listening thread. The method `offer` calls
        `_begin` at the first offer of a bulk connection.
        """
        try:
            if self._credentials.certificate:
                self._context = context_of(self._credentials, serves=True)
            host = self._address.strip("[]")
            family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listening = socket.socket(family, kind)
            try:
                listening.bind(address)
                listening.listen(_BACKLOG_CLOSED)
                listening.setblocking(False)
            except BaseException:
                listening.close()
                raise
        except (OSError, ValueError) as error:
            logging.warning(
                "bulk connections are disabled: cannot open a port on %s: %s", self._address, error
            )
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
        """Remove a stream's offer of a bulk connection and the numbers of its attempts. The caller
        of `_remove` holds the listener's lock.
        """
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
                # Accepted connections are served before new connections are accepted, so that a new
                # connection displaces no connection whose number has arrived.
                for key, _ in events:
                    if key.fileobj is woken:
                        woken.recv(4096)
                    elif isinstance(key.data, _Half) and key.data in halves:
                        self._advance(key.data, halves)
                if any(key.fileobj is listening for key, _ in events):
                    try:
                        self._accept(listening, halves)
                    except OSError as error:
                        # The listening socket stays readable after an error of accept. Without the
                        # pause, the loop would retry without end and occupy a core.
                        if error.errno in _EXHAUSTED:
                            logging.log_every_n_seconds(
                                logging.WARNING, "cannot accept bulk connections now: %s", 10, error
                            )
                            halves.end_strangers()
                            rests_until = self._clock() + _REST_SECONDS
                self._end_late(halves)
            halves.end_all()
        with self._lock:
            listening.close()

    def _accept(self, listening: socket.socket, halves: _Halves) -> None:
        for _ in range(_ACCEPTED_AT_A_TIME):
            # The last offer of a bulk connection was withdrawn after `select` returned.
            if not self._offers:
                return
            try:
                connected, address = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            connected.setblocking(False)
            half = _Half(connected, self._clock() + HANDSHAKE_SECONDS)
            halves.add(half, address_of(str(address[0])), self._clock())
            # The secret number of an honest client has usually arrived already.
            self._advance(half, halves)

    def _end_late(self, halves: _Halves) -> None:
        now = self._clock()
        with self._lock:
            for offer in list(self._offers.values()):
                if offer.deadline < now or offer.stream.lost:
                    self._remove(offer.stream)
        for half in halves.late(now):
            if half.offer is not None and not half.offer.stream.lost:
                reason = f"the handshake took longer than {HANDSHAKE_SECONDS:g} s"
                logging.info("peer %s: bulk connection failed: %s", half.offer.stream.peer, reason)
            halves.end(half)

    def _advance(self, half: _Half, halves: _Halves) -> None:
        """Continue a bulk connection's handshake; attach the connection after a valid proof."""
        try:
            self._send(half, halves)
            while not half.unsent and half in halves:
                if half.handshake and half.handshake.state is HandshakeState.PROVEN:
                    self._take_over(half, half.handshake, halves)
                    return
                num_bytes = NUMBER_BYTES - len(half.number)
                if half.handshake is not None:
                    num_bytes = half.handshake.wanted_bytes
                data = half.socket.recv(num_bytes)
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
                logging.info("peer %s: bulk connection failed: %s", half.offer.stream.peer, error)

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
        """Attach the bulk connection to its gRPC stream, then send the shard's proof."""
        # The connection is attached to its stream before the proof is sent. The client sends Switch
        # on the gRPC stream as soon as it has the shard's proof, and Switch is valid only on a
        # stream with an attached connection.
        offer = half.offer
        halves.release(half)
        wire = handshake.wire(half.socket)
        connection = BulkConnection(wire)
        if offer is not None:
            offer.stream.attach(connection)
        try:
            # Sending the proof does not block: the client has received all earlier bytes, so the
            # socket's send buffer is empty.
            wire.send((handshake.proof,))
        except OSError:  # The client has closed the bulk connection and may try again.
            connection.abort()


class _Halves:
    """The accepted bulk connections whose clients have not yet proven their identity."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        # Connections whose clients have not proven their identity, oldest first.
        self._all: dict[_Half, None] = {}
        self._strangers: FairPlaces[_Half] = FairPlaces()

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, half: _Half) -> bool:
        return half in self._all

    def add(self, half: _Half, address: str, now: float) -> None:
        """Add a new bulk connection; if too many have not sent an offer's number, close one of
        them.
        """
        self._all[half] = None
        self._selector.register(half.socket, selectors.EVENT_READ, half)
        for displaced in self._strangers.take(half, address, now, MOST_STRANGERS):
            self.end(displaced)

    def name(self, half: _Half, offer: _OpenOffer) -> None:
        """Assign a bulk connection to the offer whose number it sent; close the offer's earlier
        connection.
        """
        self._strangers.leave(half)
        if offer.connection is not None:
            self.end(offer.connection)
        half.offer, offer.connection = offer, half

    def watch(self, half: _Half) -> None:
        """Wait until the connection can be written if it has unsent bytes, else until it can be
        read.
        """
        event = selectors.EVENT_WRITE if half.unsent else selectors.EVENT_READ
        self._selector.modify(half.socket, event, half)

    def late(self, now: float) -> list[_Half]:
        """Return the bulk connections past their deadline, and those whose gRPC stream has
        ended.
        """
        return [
            half
            for half in self._all
            if half.deadline < now or (half.offer is not None and half.offer.stream.lost)
        ]

    def release(self, half: _Half) -> None:
        """Remove a bulk connection from the selector and tables of the listening thread; keep its
        socket open.
        """
        if half not in self._all:
            return
        del self._all[half]
        self._strangers.leave(half)
        self._selector.unregister(half.socket)
        if half.offer is not None and half.offer.connection is half:
            half.offer.connection = None

    def end(self, half: _Half) -> None:
        """Close a connection whose client has not proven its identity, and remove it from the
        tables.
        """
        if half in self._all:
            self.release(half)
        half.socket.close()

    def end_strangers(self) -> None:
        """Close all bulk connections that have not sent an offer's number."""
        for half in self._strangers.shrink(0):
            self.end(half)

    def end_all(self) -> None:
        """Close all bulk connections whose clients have not yet proven their identity."""
        for half in list(self._all):
            self.end(half)
