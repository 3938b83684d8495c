"""States of a client's stream to a PS shard.

    event                                             transition
    Hello of a worker fits the shard's model          BEFORE_HELLO -> WAITING
    the shard's state machine admits the worker       WAITING      -> ADMITTED
    newer stream of the worker, or another phase      ADMITTED     -> REPLACED
    Hello of another client fits the shard            BEFORE_HELLO -> ADMITTED
    the shard requests the worker's model             BEFORE_HELLO -> OFFERING
    the worker's model has arrived                    OFFERING     -> OFFERED
    the client waits for another worker's model       BEFORE_HELLO -> HELD

A stream never leaves the states REPLACED, OFFERED and HELD: the client connects again. The thread
that reads the stream makes all transitions, except the transitions of a worker to ADMITTED and to
REPLACED, which `Connections` makes on the shard's writer thread.
"""

from __future__ import annotations

import enum


class ClientStreamState(enum.Enum):
    """State of a client's stream, which decides the messages that the shard accepts on it."""

    BEFORE_HELLO = "before hello"  # the shard accepts only a Hello
    WAITING = "waiting"  # the worker must wait for the shard's Welcome
    ADMITTED = "admitted"  # the shard accepts the messages of the client's role
    REPLACED = "replaced"  # the worker's messages count only on the worker's newer stream
    OFFERING = "offering"  # the worker must send its model
    OFFERED = "offered"  # the shard builds the worker's model; the worker must send nothing
    HELD = "held"  # the client must send nothing until the shard requests a retry
