"""Decides how long a PS shard serves its clients after the end of the run."""

from __future__ import annotations

import time

from thinwire.ps.flags import PsFlags
from thinwire.ps.service import leader_client
from thinwire.ps.service.leader_client import LeaderClient
from thinwire.ps.service.server import ShardServer

#: Seconds without sent bytes after which an interrupted PS stops waiting for its clients.
_INTERRUPTED_LINGER_SECONDS = 1.5


class Linger:
    """Wait of a shard, after the end of the run, until every client knows of the end.

    Args:
        own: Settings of this PS shard from its command-line flags.
        server: Network server of the shard.
        leader: Connection to shard 0; None on shard 0.
        counts_onlookers: True if a Supervisor that only reads the run's status also counts as the
            run's Supervisor, because workers send the model.
    """

    def __init__(
        self,
        own: PsFlags,
        server: ShardServer,
        leader: LeaderClient | None,
        counts_onlookers: bool,
    ) -> None:
        self._own, self._server, self._leader = own, server, leader
        self._counts_onlookers = counts_onlookers
        # Number of bytes sent to all clients, and the time of the number's last change in seconds
        # after the run's end.
        self._flowed = (0, 0.0)

    def is_over(self, interrupted: bool) -> bool:
        """Return True if every client knows of the run's end, or the wait for them has timed out.

        Args:
            interrupted: True if a signal has ended this shard.
        """
        server, own = self._server, self._own
        if server.core.stop_reason is None:
            return False
        if self._leader is not None and leader_client.figures_are_final(server):
            self._leader.report_end()
        # A signal to a following shard (id 1 and up) does not end the run. The workers of the run
        # continue and do not leave, so the shard waits for no client.
        if interrupted and self._leader is not None:
            return True
        since = time.monotonic() - (server.core.ended_at or 0.0)
        if since >= own.linger_seconds or (interrupted and self._nothing_flows(since)):
            return True
        clients = server.connections.everyone()
        leads = self._leader is None
        waits_for_supervisor = leads and not self._had_supervisor() and not interrupted
        everyone_left = all(client.left or client.stream.lost for client in clients)
        patience = own.linger_seconds / 3 if waits_for_supervisor else 0.2
        return everyone_left and since >= patience

    def _nothing_flows(self, since: float) -> bool:
        """Return True if no bytes were sent to any client for `_INTERRUPTED_LINGER_SECONDS`.

        A client that is suspended, or whose host is lost, never disconnects, so waiting longer for
        this client is useless.

        Args:
            since: Time since the end of the run, in seconds.
        """
        num_bytes = sum(client.stream.bytes_sent for client in self._server.connections.everyone())
        if num_bytes != self._flowed[0]:
            self._flowed = num_bytes, since
        return since - self._flowed[1] >= _INTERRUPTED_LINGER_SECONDS

    def _had_supervisor(self) -> bool:
        """Return True if the run's Supervisor has connected."""
        connections = self._server.connections
        looked_on = self._counts_onlookers and connections.had_onlooker
        return connections.had_supervisor or looked_on
