"""Checks of a client's Hello message before it reaches the shard's state machine; limits on a
client's requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.ops.offer import OFFER_PREFIX, offer_difference
from thinwire.ops.types import Link, ModelSpec
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.proto.security.connection_guard import ConnectionGuard, Limits
from thinwire.runtime.run import program
from thinwire.runtime.run.settings import Run

if TYPE_CHECKING:
    from thinwire.proto.grpc import ServerStream


@dataclasses.dataclass(frozen=True)
class Identity:
    """Identity of a shard: settings and model that a client's Hello message must match."""

    run_id: str
    shard: int
    num_shards: int
    generation: int
    fingerprint: Sequence[tuple[str, str]]
    # Variables of the shard's model; None if a worker must offer the model.
    spec: ModelSpec | None
    # settings, in addition to `fingerprint`, that must be equal on all shards
    settings: Sequence[tuple[str, str]]
    phase: int = 0  # phase (number of the script's current model), as in Hello.phase


def hello_to_leader(mine: Identity, address: str = "") -> pb.Hello:
    """Return the Hello message that a following shard (id 1 and up) sends to shard 0.

    The Hello message of a shard proves that the shard belongs to the run. A shard without a model
    sends a shorter Hello message, which only requests the identity of shard 0's model.

    Args:
        mine: Identity (settings and model) of the shard that sends the Hello.
        address: ``host:port`` of the shard that sends the Hello; empty if the other nodes already
            know this address.
    """
    hello = pb.Hello(
        protocol_version=messages.PROTOCOL_VERSION,
        role=pb.ROLE_SHARD,
        id=mine.shard,
        shard=0,
        num_shards=mine.num_shards,
    )
    if mine.spec is not None:
        hello.run_id, hello.phase, hello.generation = mine.run_id, mine.phase, mine.generation
        hello.fingerprint.extend(messages.settings_of([*mine.fingerprint, *mine.settings]))
        hello.model.extend(messages.tensors_of(mine.spec))
        hello.peer_address = address
    return hello


#: Roles of clients that only control the run, and roles of clients that neither send nor apply
#: updates.
_CONTROLLERS = (pb.ROLE_SCRIPT, pb.ROLE_EVALUATOR)
_OBSERVERS = (pb.ROLE_SUPERVISOR, *_CONTROLLERS)


def check_hello(hello: pb.Hello, mine: Identity) -> tuple[int, str] | None:
    """Return (reason, message) to refuse a Hello that does not match this shard; else None."""
    if hello.role not in (*_OBSERVERS, pb.ROLE_WORKER, pb.ROLE_SHARD):
        return pb.REASON_MALFORMED, f"role: unknown value {hello.role}."
    looks_only = hello.role in _OBSERVERS and not hello.model
    # A Supervisor that only reads the status may leave the number of shards open.
    any_number = hello.role == pb.ROLE_SUPERVISOR and looks_only and hello.num_shards == 0
    if (hello.shard, hello.num_shards) != (mine.shard, mine.num_shards) and not any_number:
        return pb.REASON_TOPOLOGY, (
            f"shard: this is PS {mine.shard} of {mine.num_shards}, the client looks for PS "
            f"{hello.shard} of {hello.num_shards}; give all nodes the same --nb_ps and --ps_hosts "
            "and this PS its --id_ps."
        )
    if hello.role in _CONTROLLERS and hello.incarnation and mine.shard:
        return pb.REASON_TOPOLOGY, (
            f"shard: this is PS {mine.shard}, and scripts meet at PS 0; give all nodes the same "
            "--ps_hosts."
        )
    if hello.role == pb.ROLE_SHARD and not 1 <= hello.id < mine.num_shards:
        return pb.REASON_TOPOLOGY, (
            f"id: PS {hello.id} does not follow shard 0; expected --id_ps from 1 to "
            f"{mine.num_shards - 1}."
        )
    looks_only = looks_only or _looks_for_model(hello)
    if (refusal := _other_run(hello, mine) or _other_phase(hello, mine, looks_only)) is not None:
        return refusal
    if mine.spec is not None and not looks_only:
        variables = messages.tensors_of(mine.spec)
        difference = messages.first_difference(variables, list(hello.model))
        if difference:
            return pb.REASON_MODEL, (
                f"model differs: {difference}; give all nodes the same --network or --model, or "
                "all workers the same script. A changed script needs another --run_dir, or "
                "--overwrite."
            )
    if hello.role in _OBSERVERS or looks_only:
        return None
    settings = mine.settings if hello.role == pb.ROLE_SHARD else ()
    expected = messages.settings_of([*mine.fingerprint, *settings])
    rows = [row for row in hello.fingerprint if not row.name.startswith(program.PREFIX)]
    if mine.spec is None:  # only the worker's offer, which follows, has the remaining rows
        rows = rows[: len(expected)]
    difference = _first_of_offers(expected, rows) or messages.first_difference(expected, rows)
    if difference:
        return pb.REASON_FINGERPRINT, (
            f"method or split of the data differs: {difference}; give all nodes the same --method, "
            "policy flags, --seed and --partition, and all workers the same script."
        )
    return None


def program_of(hello: pb.Hello) -> program.Rows:
    """Return the rows of a worker's Hello that describe its program (script and versions)."""
    return program.program_rows((row.name, row.value) for row in hello.fingerprint)


def _first_of_offers(expected: Sequence[pb.Setting], given: Sequence[pb.Setting]) -> str | None:
    """Return a text if the first differing row of two Hellos describes a model; else None.

    An offer is a worker's description of the model of its script. The rows that describe a model
    are long JSON documents (`Offer.fingerprint`), so the text about a difference names only its
    place in the document.
    """
    for row, client_row in zip(expected, given, strict=False):
        if row != client_row:
            is_offers = row.name == client_row.name and row.name.startswith(OFFER_PREFIX)
            name = row.name.removeprefix(OFFER_PREFIX)
            return offer_difference(name, row.value, client_row.value) if is_offers else None
    return None


def _other_run(hello: pb.Hello, mine: Identity) -> tuple[int, str] | None:
    """Return the refusal of a client that belongs to another run than the shard; else None."""
    # Shard 0 without a model begins a new run: no client can belong to the new run yet.
    begins = mine.spec is None and mine.shard == 0
    if hello.run_id and (begins or mine.run_id) and hello.run_id != mine.run_id:
        return pb.REASON_RUN, (
            f"run_id: this PS runs {mine.run_id or 'a new run'}, the client belongs to "
            f"{hello.run_id!r}; restart the client, or point it to its own PS."
        )
    return None


def _other_phase(hello: pb.Hello, mine: Identity, looks_only: bool) -> tuple[int, str] | None:
    """Return the refusal of a worker or shard with another model (phase) of the script; else
    None.
    """
    if hello.role == pb.ROLE_WORKER and hello.phase < mine.phase:
        return pb.REASON_PHASE, (
            f"phase: this worker is in phase {hello.phase} of its script, after a restart or a "
            f"disconnection, but the other workers have gone to phase {mine.phase} without it; "
            "it takes part again when its script, or the script's next start, reaches that phase."
        )
    if hello.role == pb.ROLE_SHARD and hello.phase != mine.phase and not looks_only:
        return pb.REASON_STARTING, (
            f"phase: this shard is in phase {mine.phase} of the script, but PS {hello.id} is in "
            f"phase {hello.phase}; try again."
        )
    return None


def _looks_for_model(hello: pb.Hello) -> bool:
    """Return True if a Hello is from a shard that only requests the identity of shard 0's model."""
    return hello.role == pb.ROLE_SHARD and not hello.model and not hello.fingerprint


#: Number of streams in addition to the streams of workers and shards: for supervisors, and for
#: clients that reconnect before the shard has noticed the loss of their old stream.
_SPARE_STREAMS = 16
#: Number of streams that stay free for clients at further addresses when the clients at one address
#: use their whole limit.
_STREAMS_OF_OTHERS = 64
#: Requests that the shard answers with the model or a part of the model.
REQUESTS = ("pull", "push", "slots")
#: Limits of the values of emulated links, equal to the limits of the flags. A rate is 0 (no limit)
#: or at least the lowest rate.
_SLOWEST_MBPS, _FASTEST_MBPS, _LONGEST_DELAY_MS, _HIGHEST_LOSS = 1e-3, 1e6, 60_000.0, 0.95
#: Limit on the characters of a node's address.
_LONGEST_ADDRESS = 300


def guard_of(run: Run) -> ConnectionGuard:
    """Return the `ConnectionGuard` that limits the clients of a shard's network port.

    The guard's limits are wide enough for all clients of the run to share one IP address.
    """
    # A worker has three streams: one for training, one to control its script, and one to look up
    # the addresses of shards.
    node_streams = 3 * run.nb_workers + run.nb_ps + _SPARE_STREAMS
    limits = Limits(streams=node_streams + _STREAMS_OF_OTHERS, streams_per_address=node_streams)
    return ConnectionGuard(run.credentials, limits)


def unanswered(body: str, stream: ServerStream, limits: Limits) -> str | None:
    """Return an error text if a client has too many unanswered requests for the model; else None.

    Args:
        body: Name of the message's body, for example "pull".
        stream: The client's stream of messages.
        limits: Limits on the messages and replies of one client.
    """
    if body not in REQUESTS or (waiting := stream.num_waiting) < limits.waiting_replies:
        return None
    return f"a {body} message before {waiting} replies were read; expected one request at a time."


def checked_link(given: pb.EmulatedLink) -> Link:
    """Return the emulated link (rate, delay, loss) that a client has requested.

    Raises:
        Malformed: A value of the emulated link is NaN or outside the limits of the command-line
            flags.
    """
    link = Link(given.mbps, given.delay_ms, given.loss)
    # NaN fails every comparison, so the conditions test for values that are allowed.
    fast_enough = link.mbps == 0 or _SLOWEST_MBPS <= link.mbps <= _FASTEST_MBPS
    short_enough = 0 <= link.delay_ms <= _LONGEST_DELAY_MS
    if not (fast_enough and short_enough and 0 <= link.loss <= _HIGHEST_LOSS):
        raise Malformed(
            f"link {link}: expected 0 (no limit) or {_SLOWEST_MBPS:g} to {_FASTEST_MBPS:g} Mbit/s, "
            f"a delay up to {_LONGEST_DELAY_MS:g} ms and a loss up to {_HIGHEST_LOSS:g}"
        )
    return link


def check_address(address: str) -> None:
    """Reject an address that no node can have, because the shard sends node addresses to all nodes.

    Raises:
        Malformed: The address is longer than any host name, or it has unprintable characters.
    """
    if len(address) > _LONGEST_ADDRESS or not address.isprintable():
        raise Malformed(
            f"the message has a peer_address of {len(address)} characters; expected at most "
            f"{_LONGEST_ADDRESS} printable ones"
        )
