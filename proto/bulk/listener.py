"""The shard's port for bulk connections; it listens from the first offer on.

A stranger costs no thread: one loop reads the number of an offer from all who have just connected,
and only who names one that is open gets further.
"""

from __future__ import annotations

import contextlib
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
_STEP_SECONDS = 5.0


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
        self._offers: dict[bytes, tuple[bytes, Offeree]] = {}
        self._lock = threading.Lock()
        self._listening: socket.socket | None = None
        self._wake: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def offer(self, stream: Offeree) -> pb.BulkSession | None:
        """Return what a Welcome offers the stream's client; None where no port can be had."""
        with self._lock:
            if self._stopped or not (self._listening or self._begin()):
                return None
            for number in [each for each, (_, other) in self._offers.items() if other.lost]:
                del self._offers[number]
            number, key = secrets.token_bytes(NUMBER_BYTES), secrets.token_bytes(KEY_BYTES)
            self._offers[number] = key, stream
            assert self._listening is not None
            port = self._listening.getsockname()[1]
        return pb.BulkSession(port=port, number=number, key=key)

    def stop(self) -> None:
        """Accept nobody any more."""
        with self._lock:
            self._stopped = True
            thread, wake, self._wake = self._thread, self._wake, None
        if thread is not None and wake is not None:
            wake.close()  # wakes the thread
            thread.join()

    def _begin(self) -> bool:
        try:
            host, port = self._address.strip("[]"), 0
            family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
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
            return False
        self._listening = listening
        woken, self._wake = socket.socketpair()
        self._thread = threading.Thread(
            target=self._run, args=(listening, woken), name="bulk listener", daemon=True
        )
        self._thread.start()
        return True

    def _run(self, listening: socket.socket, woken: socket.socket) -> None:
        nameless: dict[socket.socket, tuple[float, bytes]] = {}  # deadline, what it has sent

        def forget(each: socket.socket) -> None:
            del nameless[each]
            selector.unregister(each)

        with selectors.DefaultSelector() as selector, listening, woken:
            selector.register(listening, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while not self._stopped:
                patience = _NAMELESS_SECONDS if nameless else None
                ready = [key.fileobj for key, _ in selector.select(patience)]
                for each in ready:
                    if each is listening:
                        with contextlib.suppress(OSError):
                            newcomer, _ = listening.accept()
                            newcomer.setblocking(False)
                            nameless[newcomer] = time.monotonic() + _NAMELESS_SECONDS, b""
                            selector.register(newcomer, selectors.EVENT_READ)
                    elif isinstance(each, socket.socket) and each in nameless:
                        deadline, given = nameless[each]
                        try:
                            more = each.recv(NUMBER_BYTES - len(given))
                        except BlockingIOError:
                            continue
                        except OSError:
                            more = b""
                        given += more
                        nameless[each] = deadline, given
                        if more and len(given) < NUMBER_BYTES:
                            continue
                        forget(each)
                        self._go_on(each, given)
                now = time.monotonic()
                late = [each for each, (deadline, _) in nameless.items() if deadline < now]
                late += list(nameless)[: max(0, len(nameless) - _MOST_NAMELESS)]
                for each in dict.fromkeys(late):
                    forget(each)
                    each.close()
            for each in list(nameless):
                each.close()

    def _go_on(self, each: socket.socket, number: bytes) -> None:
        with self._lock:
            offer = self._offers.pop(number, None)
        if offer is None:
            each.close()
            return
        threading.Thread(
            target=self._admit, args=(each, number, *offer), name="bulk handshake", daemon=True
        ).start()

    def _admit(self, each: socket.socket, number: bytes, key: bytes, stream: Offeree) -> None:
        try:
            each.settimeout(_STEP_SECONDS)
            set_class(each, self._dscp)
            accept(each, number, key, self._credentials, stream.attach)
        except (OSError, ValueError) as error:
            each.close()
            logging.info("%s: no bulk connection: %s", stream.peer, error)
