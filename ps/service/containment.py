"""Isolation of failures in a shard's writer thread: a failed request affects only its client.

The writer thread serves all clients of a shard, and does three kinds of work.

First, the writer thread calls the shard's state machine with events. An event that fails may leave
the state of the state machine inconsistent. If an event of a worker fails, `JournaledCore` expels
that worker; any other failing event ends the process.

Second, the writer thread works for single clients: it sends a welcome, a status, a reply, or the
opening of a script's barrier. Work of the writer thread for one client only reads the shard's state
machine. If work for one client fails, the client gets a refusal and its stream ends.

Third, the writer thread does regular work for all clients, for example sends the status to all
observers. If regular work of the writer thread fails, the thread skips the work until it is due
again.

`Containment` runs the work for one client and the regular work. Each failure of work for one client
or of regular work is a bug of Thinwire. The connection guard counts each failure in `refused_peers`
as `internal`, and the first failure of each kind is logged with a traceback.
"""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable

from absl import logging

from thinwire.ops.printable import printable, printable_traceback
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.security.connection_guard import ConnectionGuard
from thinwire.ps.core import events
from thinwire.ps.service.connections import Connection

#: Name under which the connection guard counts failures in the writer thread.
INTERNAL = "internal"
#: Limit on the number of characters of an error's text that a refusal quotes.
_LONGEST_CAUSE = 200


@dataclasses.dataclass(frozen=True)
class ClientRequest:
    """Work for one client that the client's reader thread queues for the writer thread.

    Attributes:
        connection: Network connection of the client that sent the request.
        what: Name of the request for logs and refusals, for example "a Hello".
        work: Function that serves the request.
    """

    connection: Connection
    what: str
    work: Callable[[], None]


#: Queue of the shard's writer thread. An item is an event of the core, work for one client, or a
#: callable with work of the shard.
WriterQueue = queue.SimpleQueue[events.Event | ClientRequest | Callable[[], None]]


class Containment:
    """Runs work whose failure must not end the shard's writer thread; used on that thread.

    Args:
        guard: Function that returns the guard, which counts refusals. The server may replace the
            guard before it listens.
    """

    def __init__(self, guard: Callable[[], ConnectionGuard]) -> None:
        self._guard = guard
        self._logged: set[tuple[str, type[Exception]]] = set()

    def serve(self, request: ClientRequest) -> None:
        """Serve a client's request in the writer thread. If serving the request fails, send the
        client a refusal and end the client's stream.
        """
        connection = request.connection
        error = self._failure_of(request.what, connection.stream.peer, request.work)
        if error is None:
            return
        cause = printable(f"{type(error).__name__}: {error}", _LONGEST_CAUSE)
        message = (
            f"this PS could not serve your request ({request.what}): {cause}. The run continues "
            "without it. This is a bug of Thinwire: please report it with the log of this PS."
        )
        connection.send(pb.ToClient(refusal=pb.Refusal(reason=pb.REASON_INTERNAL, message=message)))
        connection.stream.close()

    def run(self, what: str, work: Callable[[], None]) -> None:
        """Do regular work.

        If regular work of the writer thread fails, log the failure and skip the work until it is
        due again.
        """
        self._failure_of(what, "regular work", work)

    def _failure_of(self, what: str, peer: str, work: Callable[[], None]) -> Exception | None:
        try:
            work()
            return None
        except Exception as error:  # noqa: BLE001 - any error concerns only this client
            kind = what, type(error)
            if kind not in self._logged:
                self._logged.add(kind)
                logging.error(
                    "serving a request of %s failed: %s. The run continues without this request. "
                    "This is a bug of Thinwire: please report it with the following traceback.\n%s",
                    *(peer, what, printable_traceback(error)),
                )
            self._guard().record_refusal(INTERNAL, peer, f"{what}: {type(error).__name__}")
            return error
