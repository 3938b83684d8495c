"""Limits the TCP connections of a listening node, so that descriptors remain for its files.

The library gRPC keeps a TCP connection open for seconds before the HTTP/2 handshake ends, and for
more seconds without a stream. The connection limit of gRPC itself rejects the newest connection, so
unknown clients could lock out workers. `ConnectionSweeper` closes pending TCP connections (without
an accepted stream) when there are many. `ConnectionSweeper` first closes the oldest pending
connections of the client address with the most pending connections
(`thinwire.proto.security.fair_places`). `ConnectionSweeper` finds the process's TCP connections in
the list of its descriptors, /dev/fd.
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

#: Numbers of connections without an accepted stream: the maximum between two sweeps, the number
#: that starts a sweep, and the number that a sweep leaves open.
MOST_PENDING, SWEPT_FROM, SWEPT_TO = 256, 128, 64
_SWEEP_SECONDS = 0.1
_DESCRIPTORS = "/dev/fd"
#: Soft limit of open files that the process requests from the system.
_WANTED_DESCRIPTORS = 16_384
#: File descriptors reserved for files (snapshots, journals, logs, libraries) and for other ports.
_RESERVED_DESCRIPTORS = 128
_FEWEST_CONNECTIONS = 16
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of open files up to the hard limit; return the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _WANTED_DESCRIPTORS
    target = _WANTED_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        target = min(target, hard)
    if target > soft:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            return target
    return soft


def most_connections(streams: int | None) -> int:
    """Return the maximum number of connections to a port, so that descriptors remain for files.

    Args:
        streams: Maximum number of client streams of the port; None: unlimited.
    """
    possible = raise_descriptor_limit() - _num_descriptors() - _RESERVED_DESCRIPTORS
    if streams is not None and streams > possible:
        logging.warning(
            "this process may open only %d more files, but up to %d streams of clients may open: "
            "raise the limit (ulimit -n %d)",
            possible,
            streams,
            streams + MOST_PENDING + _RESERVED_DESCRIPTORS,
        )
    target = possible if streams is None else min(possible, streams + MOST_PENDING)
    return max(_FEWEST_CONNECTIONS, target)


class ConnectionSweeper:
    """A thread that closes excess TCP connections without a stream, and streams without a timely
    Hello.

    Attributes:
        port: TCP port whose connections the sweeper limits.

    Args:
        port: TCP port at which this process listens and whose connections the sweeper limits.
        guard: Connection guard, which knows the admitted client streams.
    """

    def __init__(self, port: int, guard: ConnectionGuard) -> None:
        self.port, self._guard = port, guard
        self._pending: FairPlaces[str] = FairPlaces()
        self._others = _num_descriptors()
        self._over = threading.Event()
        threading.Thread(target=self._run, name=f"sweeper {port}", daemon=True).start()

    def stop(self) -> None:
        """Stop the sweeper's thread without waiting until the thread ends."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(_SWEEP_SECONDS):
            try:
                self._guard.end_overdue(time.monotonic())
                self.sweep(time.monotonic())
            except OSError as error:
                logging.log_every_n_seconds(logging.WARNING, "sweep failed: %s", 10, error)

    def sweep(self, now: float) -> None:
        """Close TCP connections if too many connections have no accepted stream.

        Args:
            now: Current monotonic time, in seconds.
        """
        known = self._guard.known_peers()
        # Counting file descriptors is cheap, and only a high count requires examining each
        # descriptor.
        if _num_descriptors() - self._others - len(known) <= SWEPT_FROM:
            return
        descriptors, self._others = _connections(self.port)
        for peer in self._pending.holders():
            if peer not in descriptors or peer in known:
                self._pending.leave(peer)
        pending = set(self._pending.holders())
        for peer in descriptors:
            if peer not in pending and peer not in known:
                self._pending.take(peer, address_of_peer(peer), now, len(descriptors))
        if len(self._pending) <= SWEPT_FROM:
            return
        # The connection of a stream that was admitted after the set `known` was read must not be
        # closed.
        lost = set(self._pending.shrink(SWEPT_TO)) - self._guard.known_peers()
        text = f"no stream in time; only {SWEPT_FROM} connections may have no stream"
        for peer in lost:
            _peer_of(descriptors[peer], self.port, ends=peer)
            self._guard.record_refusal("connections", peer, text)


def _num_descriptors() -> int:
    try:
        return len(os.listdir(_DESCRIPTORS))
    except OSError:  # the process already has too many open files
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _connections(port: int) -> tuple[dict[str, int], int]:
    """Return the connections to a port of this process, and the number of its other descriptors.

    Returns:
        A dict from peer address to descriptor, and the number of files and other ports' sockets.
    """
    descriptors, names = {}, os.listdir(_DESCRIPTORS)
    for name in names:
        peer = _peer_of(int(name), port)
        if peer is not None:
            descriptors[peer] = int(name)
    return descriptors, len(names) - len(descriptors)


def _peer_of(descriptor: int, port: int, ends: str | None = None) -> str | None:
    """Return the peer address of a connection to a port; None for a descriptor of another kind.

    Args:
        descriptor: File descriptor of this process, which another thread may close or reuse at any
            moment.
        port: TCP port at which this process listens.
        ends: Peer address of the connection to shut down; None to shut down no connection.
    """
    # The descriptor is duplicated before it is examined. Without the duplicate, another thread
    # could close the descriptor between the examination and the shutdown, and the shutdown would
    # hit a different file that was given the same number.
    try:
        copy = os.dup(descriptor)
    except OSError:  # another thread has closed the file descriptor
        return None
    try:
        connection = socket.socket(fileno=copy)
    except OSError:  # the file descriptor is not a socket
        os.close(copy)
        return None
    with connection, contextlib.suppress(OSError):  # the listening socket has no peer
        if connection.family in _FAMILIES and connection.getsockname()[1] == port:
            peer = _peer(*connection.getpeername()[:2])
            if peer == ends:
                connection.shutdown(socket.SHUT_RDWR)
            return peer
    return None


def _peer(host: str, port: int) -> str:
    """Return a client's address in gRPC's form, for example ipv4:10.0.0.3:4711."""
    host = host.removeprefix("::ffff:")
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
