"""Requests that the writer thread serves for one client, whose failure costs that client alone.

The writer thread serves every client of a shard. There are three kinds of work on it:

* Events of the core. The core's state may be torn when one fails. `JournaledCore` turns a failing
  event of a worker into the expulsion of that worker; any other failure ends the process.
* Work for one client: a welcome, a status, a script's barrier, the sending of a reply. It only
  reads the core. When it fails, the client gets a refusal, and its stream ends.
* Work at regular times for nobody in particular: the status for everybody who watches. When it
  fails, it is left out until it is due again.

`Containment` runs the second and the third kind. Each failure is a bug of Thinwire: it is counted
in `refused_peers` as `internal`, and the first of each kind is logged with its traceback.
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

#: The reason under which failures are counted.
INTERNAL = "internal"
#: Characters of an error's text in a refusal.
_LONGEST_CAUSE = 200


@dataclasses.dataclass(frozen=True)
class ClientRequest:
    """Work that a reader thread queues for the writer thread, for one client.

    Attributes:
        connection: The stream of the client.
        what: The request, as a log names it.
        work: Serves it.
    """

    connection: Connection
    what: str
    work: Callable[[], None]


#: Of the writer thread: events of the core, work for one client, and work of the shard itself.
WriterQueue = queue.SimpleQueue[events.Event | ClientRequest | Callable[[], None]]


class Containment:
    """Runs work whose failure must not end the writer thread (writer thread).

    Args:
        guard: Returns who counts refusals; a server changes it before it listens.
    """

    def __init__(self, guard: Callable[[], ConnectionGuard]) -> None:
        self._guard = guard
        self._logged: set[tuple[str, type[Exception]]] = set()

    def serve(self, request: ClientRequest) -> None:
        """Serve a client's request; where that fails, reject it and end the client's stream."""
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
        """Do regular work; where that fails, leave it out until it is due again."""
        self._failure_of(what, "regular work", work)

    def _failure_of(self, what: str, peer: str, work: Callable[[], None]) -> Exception | None:
        try:
            work()
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this client's alone
            kind = what, type(error)
            if kind not in self._logged:
                self._logged.add(kind)
                logging.error(
                    "cannot do this for %s: %s. The run continues without it. This is a bug of "
                    "Thinwire: please report it with what follows.\n%s",
                    *(peer, what, printable_traceback(error)),
                )
            self._guard().record_refusal(INTERNAL, peer, f"{what}: {type(error).__name__}")
            return error
