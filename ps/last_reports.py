"""The last figures of following shards: they come before the summary is written."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from proto import thinwire_pb2 as pb
from ps.reported import is_last

if TYPE_CHECKING:
    from ps.server import ShardServer

#: After the end of the run. A constant: it is people who wait, and what is missed is a second's
#: figures of a shard whose network is cut.
_PATIENCE_SECONDS = 2.0


def are_due(server: ShardServer) -> bool:
    """Return whether this (following) shard's figures will not change any more."""
    return server.core.stop_reason is not None and not server.connections.workers


def are_awaited(server: ShardServer) -> bool:
    """Return whether other shards, as far as they are connected, have more to tell (shard 0)."""
    ended_at = server.core.accounts.ended_at
    if ended_at is None or time.monotonic() - ended_at >= _PATIENCE_SECONDS:
        return False
    return any(
        not (shard.left or shard.stream.lost or is_last(_report_of(server, shard.id)))
        for shard in server.connections.with_role(pb.ROLE_SHARD)
    )


def _report_of(server: ShardServer, shard: int) -> str:
    return server.reports.get((pb.ROLE_SHARD, shard), "{}")
