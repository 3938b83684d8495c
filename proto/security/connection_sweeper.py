"""Bounds the connections of a listening node, so that descriptors are left for its files.

gRPC keeps a connection for some seconds before it has become HTTP/2 and for some more without a
stream, and a limit of its own keeps out whoever comes last. So a sweeper ends the connections that
have led to nothing when there are many: first of the addresses that have the most, and of these the
oldest (`thinwire.proto.security.fair_places`). The process's descriptors are found in /dev/fd, and
each is duplicated before it is examined: a number may be given to another file in between.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time

from absl import logging

from thinwire.proto.security.connection_guard import ConnectionGuard
from thinwire.proto.security.fair_places import FairPlaces, address_of_peer

#: Connections without an accepted stream: how many there may be between two sweeps, how many begin
#: a sweep, and how many it leaves.
MOST_PENDING, SWEPT_FROM, SWEPT_TO = 256, 128, 64
_SWEEP_SECONDS = 0.1
_DESCRIPTORS = "/dev/fd"
#: What the limit of open files is raised to, if the system allows it.
_WANTED_DESCRIPTORS = 16_384
#: Kept for files, and for sockets that are not of the port: snapshots, journals, logs, libraries.
_RESERVED_DESCRIPTORS = 128
_FEWEST_CONNECTIONS = 16
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of open files, within the hard one; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _WANTED_DESCRIPTORS
    wanted = _WANTED_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if wanted > soft:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


def most_connections(streams: int | None) -> int:
    """Return how many connections a port may have; descriptors are left for files.

    Args:
        streams: That the port may have; None: not bounded.
    """
    possible = raise_descriptor_limit() - _num_descriptors() - _RESERVED_DESCRIPTORS
    if streams is not None and streams > possible:
        logging.warning(
            "this process may open %d more files, and %d streams may come: allow it more (ulimit "
            "-n %d)",
            possible,
            streams,
            streams + MOST_PENDING + _RESERVED_DESCRIPTORS,
        )
    wanted = possible if streams is None else min(possible, streams + MOST_PENDING)
    return max(_FEWEST_CONNECTIONS, wanted)


class ConnectionSweeper:
    """Ends connections and streams that lead to nothing, in a thread of its own.

    Attributes:
        port: Whose connections these are.

    Args:
        port: Of this process.
        guard: Knows the clients that stay.
    """

    def __init__(self, port: int, guard: ConnectionGuard) -> None:
        self.port, self._guard = port, guard
        self._pending: FairPlaces[str] = FairPlaces()
        self._others = _num_descriptors()
        self._over = threading.Event()
        threading.Thread(target=self._run, name=f"sweeper {port}", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(_SWEEP_SECONDS):
            try:
                self._guard.end_overdue(time.monotonic())
                self.sweep(time.monotonic())
            except OSError as error:
                logging.log_every_n_seconds(logging.WARNING, "no sweep: %s", 10, error)

    def sweep(self, now: float) -> None:
        """End connections if there are too many without an accepted stream.

        Args:
            now: In seconds.
        """
        known = self._guard.known_peers()
        if _num_descriptors() - self._others - len(known) <= SWEPT_FROM:
            return
        found, self._others = _connections(self.port)
        for peer in self._pending.holders():
            if peer not in found or peer in known:
                self._pending.leave(peer)
        here = set(self._pending.holders())
        for peer in found:
            if peer not in here and peer not in known:
                self._pending.take(peer, address_of_peer(peer), now, len(found))
        if len(self._pending) <= SWEPT_FROM:
            return
        lost = set(self._pending.shrink(SWEPT_TO)) - self._guard.known_peers()
        text = f"no stream before others came; {SWEPT_FROM} connections may be without"
        for peer in lost:
            _peer_of(found[peer], self.port, ends=peer)
            self._guard.record_refusal("connections", peer, text)


def _num_descriptors() -> int:
    try:
        return len(os.listdir(_DESCRIPTORS))
    except OSError:  # too many open files
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _connections(port: int) -> tuple[dict[str, int], int]:
    """Return the connections to a port of this process, and how many other descriptors it has.

    Returns:
        Other end -> descriptor, and the number of files and of other ports' sockets.
    """
    found, names = {}, os.listdir(_DESCRIPTORS)
    for name in names:
        peer = _peer_of(int(name), port)
        if peer is not None:
            found[peer] = int(name)
    return found, len(names) - len(found)


def _peer_of(descriptor: int, port: int, ends: str | None = None) -> str | None:
    """Return the other end of a connection to a port; None: the descriptor is none of these.

    Args:
        descriptor: Of this process; it may be closed, or another's, in any moment.
        port: Of this process.
        ends: The other end of the connection that is to be ended.
    """
    try:
        copy = os.dup(descriptor)
    except OSError:  # closed meanwhile
        return None
    try:
        mine = socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        return None
    with mine, contextlib.suppress(OSError):  # not connected: the one that listens
        if mine.family in _FAMILIES and mine.getsockname()[1] == port:
            peer = _peer(*mine.getpeername()[:2])
            if peer == ends:
                mine.shutdown(socket.SHUT_RDWR)
            return peer
    return None


def _peer(host: str, port: int) -> str:
    """Return a client's address as gRPC writes it."""
    host = host.removeprefix("::ffff:")
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
