"""The shard's port for bulk connections; it listens from the first offer on.

Nobody is accepted while no offer is open. A stranger costs no thread: one loop reads the number of
an offer from all who have just connected, and only who names one that is open gets further.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import selectors
import socket
import threading
import time
from typing import Protocol

from absl import logging

from thinwire.ops.run.credentials import Credentials
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.bulk.connection import BulkConnection
from thinwire.proto.bulk.handshake import KEY_BYTES, NUMBER_BYTES, accept, set_class

#: Connections that have not named an offer yet; beyond these the oldest are closed.
_MOST_NAMELESS = 64
_NAMELESS_SECONDS = 5.0
#: How long an offer stands, and for each step of the handshake after that.
_OPEN_SECONDS, _STEP_SECONDS = 10.0, 5.0
_LOOK_SECONDS = 1.0


class Offeree(Protocol):
    """The stream that an offer is made on."""

    peer: str

    @property
    def lost(self) -> bool:
        """Whether it has ended."""

    def attach(self, connection: BulkConnection) -> None:
        """Take the connection over."""


class BulkListener:
    """Accepts the connections that streams have offered.

    Args:
        address: To bind: the same as gRPC's.
        credentials: Of the shard.
        dscp: Class of service of what is sent, 0..63; None: the system's own.
    """

    def __init__(self, address: str, credentials: Credentials, dscp: int | None) -> None:
        self._address, self._credentials, self._dscp = address, credentials, dscp
        self._offers: dict[bytes, _OpenOffer] = {}
        self._lock = threading.Lock()
        self._port: int | None = None
        self._wake: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def offer(self, stream: Offeree) -> pb.BulkSession | None:
        """Return what a Welcome offers the stream's client; None where no port can be had."""
        number, key = secrets.token_bytes(NUMBER_BYTES), secrets.token_bytes(KEY_BYTES)
        with self._lock:
            if self._port is None and not self._stopped:
                self._begin()
            if self._stopped or self._port is None or self._wake is None:
                return None
            self._offers[number] = _OpenOffer(key, stream, time.monotonic() + _OPEN_SECONDS)
            self._wake.send(b"!")
        return pb.BulkSession(port=self._port, number=number, key=key)

    def stop(self) -> None:
        """Accept nobody any more."""
        with self._lock:
            self._stopped = True
            thread, wake, self._wake = self._thread, self._wake, None
        if thread is not None and wake is not None:
            wake.close()
            thread.join()

    def _begin(self) -> None:
        """Listen, at the first offer."""
        try:
            host = self._address.strip("[]")
            family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listening = socket.socket(family, kind)
            try:
                listening.bind(where)
                listening.listen(_MOST_NAMELESS)
                listening.setblocking(False)
            except BaseException:
                listening.close()
                raise
        except OSError as error:
            logging.warning("no bulk connections: no port on %s: %s", self._address, error)
            self._stopped = True
            return
        self._port = int(listening.getsockname()[1])
        woken, self._wake = socket.socketpair()
        self._thread = threading.Thread(
            target=self._run, args=(listening, woken), name="bulk listener", daemon=True
        )
        self._thread.start()

    def _run(self, listening: socket.socket, woken: socket.socket) -> None:
        with listening, woken, selectors.DefaultSelector() as selector:
            waiting = _Nameless(selector)
            selector.register(woken, selectors.EVENT_READ)
            is_open = False
            while not self._stopped:
                if is_open != bool(self._offers):
                    is_open = not is_open
                    change = selector.register if is_open else selector.unregister
                    change(listening, *((selectors.EVENT_READ,) if is_open else ()))
                for key, _ in selector.select(_LOOK_SECONDS if is_open or waiting else None):
                    if key.fileobj is woken:
                        woken.recv(100)
                    elif key.fileobj is listening:
                        with contextlib.suppress(OSError):
                            waiting.add(listening.accept()[0])
                    elif isinstance(key.fileobj, socket.socket):
                        number = waiting.read(key.fileobj)
                        if number is not None:
                            self._go_on(key.fileobj, number)
                waiting.close_late(time.monotonic())
                self._forget_late(time.monotonic())
            waiting.close_late(math.inf)

    def _forget_late(self, now: float) -> None:
        with self._lock:
            for number, offer in list(self._offers.items()):
                if offer.deadline < now or offer.stream.lost:
                    del self._offers[number]

    def _go_on(self, connected: socket.socket, number: bytes) -> None:
        with self._lock:
            offer = self._offers.pop(number, None)
        if offer is None:
            connected.close()
            return
        threading.Thread(
            target=self._admit, args=(connected, number, offer), name="bulk handshake", daemon=True
        ).start()

    def _admit(self, connected: socket.socket, number: bytes, offer: _OpenOffer) -> None:
        try:
            connected.settimeout(_STEP_SECONDS)
            set_class(connected, self._dscp)
            accept(connected, number, offer.key, self._credentials, offer.stream.attach)
        except (OSError, ValueError) as error:
            connected.close()
            logging.info("%s: no bulk connection: %s", offer.stream.peer, error)


@dataclasses.dataclass(frozen=True)
class _OpenOffer:
    key: bytes
    stream: Offeree
    deadline: float


class _Nameless:
    """Connections that have not named an offer yet; for the listening thread."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._found: dict[socket.socket, tuple[float, bytes]] = {}  # deadline, what it has sent

    def __len__(self) -> int:
        return len(self._found)

    def add(self, connected: socket.socket) -> None:
        """Take in a newcomer; where there are too many, the oldest one goes."""
        connected.setblocking(False)
        self._found[connected] = time.monotonic() + _NAMELESS_SECONDS, b""
        self._selector.register(connected, selectors.EVENT_READ)
        if len(self._found) > _MOST_NAMELESS:
            self._close(next(iter(self._found)))

    def read(self, connected: socket.socket) -> bytes | None:
        """Return the number that a connection has sent; it is no longer nameless then."""
        if connected not in self._found:
            return None
        deadline, given = self._found[connected]
        try:
            more = connected.recv(NUMBER_BYTES - len(given))
        except BlockingIOError:
            return None
        except OSError:
            more = b""
        if not more:
            self._close(connected)
        elif len(given + more) < NUMBER_BYTES:
            self._found[connected] = deadline, given + more
        else:
            self._forget(connected)
            return given + more
        return None

    def close_late(self, now: float) -> None:
        """Close those whose time is over."""
        for connected in [each for each, (deadline, _) in self._found.items() if deadline < now]:
            self._close(connected)

    def _forget(self, connected: socket.socket) -> None:
        del self._found[connected]
        self._selector.unregister(connected)

    def _close(self, connected: socket.socket) -> None:
        self._forget(connected)
        connected.close()
