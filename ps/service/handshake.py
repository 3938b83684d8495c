"""Checks of a Hello before it reaches the core, and limits on one client's requests."""

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
    """What this shard is, and what a client must agree with."""

    run_id: str
    shard: int
    num_shards: int
    generation: int
    fingerprint: list[pb.Setting]
    model: list[pb.Tensor] | None  # None: a worker is to offer it
    settings: list[pb.Setting]  # what shards must agree on besides the fingerprint
    phase: int = 0  # of the script; see Hello


def identity(
    run_id: str,
    shard: int,
    num_shards: int,
    generation: int,
    fingerprint: list[tuple[str, str]],
    spec: ModelSpec | None,
    settings: list[tuple[str, str]],
    phase: int = 0,
) -> Identity:
    """Return the shard's identity as messages of the wire."""
    return Identity(
        run_id,
        shard,
        num_shards,
        generation,
        messages.settings_of(fingerprint),
        None if spec is None else messages.tensors_of(spec),
        messages.settings_of(settings),
        phase,
    )


def hello_to_leader(mine: Identity, address: str = "") -> pb.Hello:
    """Return a following shard's Hello to shard 0, which shows that it is of the same run.

    Without a model it only looks for that of shard 0.

    Args:
        mine: The shard's.
        address: ``host:port`` where others reach it; empty: where they know it.
    """
    if mine.model is None:
        return pb.Hello(
            protocol_version=messages.PROTOCOL_VERSION,
            role=pb.ROLE_SHARD,
            id=mine.shard,
            shard=0,
            num_shards=mine.num_shards,
        )
    return pb.Hello(
        protocol_version=messages.PROTOCOL_VERSION,
        role=pb.ROLE_SHARD,
        id=mine.shard,
        run_id=mine.run_id,
        fingerprint=mine.fingerprint + mine.settings,
        model=mine.model,
        shard=0,
        num_shards=mine.num_shards,
        phase=mine.phase,
        peer_address=address,
        generation=mine.generation,
    )


#: Roles whose clients have no part in the updates, and of these those that control scripts.
_CONTROLLERS = (pb.ROLE_SCRIPT, pb.ROLE_EVALUATOR)
_OBSERVERS = (pb.ROLE_SUPERVISOR, *_CONTROLLERS)


def check_hello(hello: pb.Hello, mine: Identity) -> tuple[int, str] | None:
    """Return (reason, message) of a refusal, or None for a Hello of our version that fits."""
    if hello.role not in (*_OBSERVERS, pb.ROLE_WORKER, pb.ROLE_SHARD):
        return pb.REASON_MALFORMED, f"role: unknown value {hello.role}."
    looks_only = hello.role in _OBSERVERS and not hello.model
    # A Supervisor that only looks need not know it.
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
    if (other := _other_run(hello, mine) or _other_phase(hello, mine, looks_only)) is not None:
        return other
    if mine.model is not None and not looks_only:
        difference = messages.first_difference(mine.model, list(hello.model))
        if difference:
            return pb.REASON_MODEL, (
                f"model differs: {difference}; give all nodes the same --network or --model, or "
                "all workers the same script. A changed script needs another --run_dir, or "
                "--overwrite."
            )
    if hello.role in _OBSERVERS or looks_only:
        return None
    expected = list(mine.fingerprint)
    given = [row for row in hello.fingerprint if not row.name.startswith(program.PREFIX)]
    if hello.role == pb.ROLE_SHARD:
        expected += mine.settings
    if mine.model is None:  # what the script brings is not known yet
        given = given[: len(expected)]
    difference = _first_of_offers(expected, given) or messages.first_difference(expected, given)
    if difference:
        return pb.REASON_FINGERPRINT, (
            f"method or split of the data differs: {difference}; give all nodes the same --method, "
            "policy flags, --seed and --partition, and all workers the same script."
        )
    return None


def program_of(hello: pb.Hello) -> program.Rows:
    """Return what a worker computes with, as its Hello has it; empty: it has no script."""
    return program.program_rows((row.name, row.value) for row in hello.fingerprint)


def _first_of_offers(expected: Sequence[pb.Setting], given: Sequence[pb.Setting]) -> str | None:
    """Return the first difference between two offers by its place; None: it is no offer's.

    The rows of an offer are JSON (`Offer.fingerprint`), which nobody wants to read whole.
    """
    for one, other in zip(expected, given, strict=False):
        if one != other:
            is_offers = one.name == other.name and one.name.startswith(OFFER_PREFIX)
            name = one.name.removeprefix(OFFER_PREFIX)
            return offer_difference(name, one.value, other.value) if is_offers else None
    return None


def _other_run(hello: pb.Hello, mine: Identity) -> tuple[int, str] | None:
    """Return why a client of another run is refused; None: it is of this one, or of none yet."""
    begins = mine.model is None and mine.shard == 0  # a run that nobody belongs to yet
    if hello.run_id and (begins or mine.run_id) and hello.run_id != mine.run_id:
        return pb.REASON_RUN, (
            f"run_id: this PS runs {mine.run_id or 'a new run'}, the client belongs to "
            f"{hello.run_id!r}; restart the client, or point it to its own PS."
        )
    return None


def _other_phase(hello: pb.Hello, mine: Identity, looks_only: bool) -> tuple[int, str] | None:
    """Return why a worker is too late for its phase, or a shard is to come again; None: neither."""
    if hello.role == pb.ROLE_WORKER and hello.phase < mine.phase:
        return pb.REASON_PHASE, (
            f"phase: the run's model has changed since, and this worker was started again, or was "
            f"away, in the phase {hello.phase} of its script; expected {mine.phase}. It takes part "
            "again when its script comes that far."
        )
    if hello.role == pb.ROLE_SHARD and hello.phase != mine.phase and not looks_only:
        return pb.REASON_STARTING, (
            f"phase: this shard is in the phase {mine.phase} of the script, and PS {hello.id} in "
            f"{hello.phase}; try again."
        )
    return None


def _looks_for_model(hello: pb.Hello) -> bool:
    """Return whether a following shard without model looks for that of shard 0."""
    return hello.role == pb.ROLE_SHARD and not hello.model and not hello.fingerprint


#: Streams beyond those of each worker and shard: of supervisors, and of clients that come back
#: before their old stream has been missed.
_SPARE_STREAMS = 16
#: Streams that one address cannot take, however many it opens.
_STREAMS_OF_OTHERS = 64
#: Requests that are answered with the model or a part of it.
REQUESTS = ("pull", "push", "slots")
#: Links that can be emulated: the flags' own limits, and no rate that stands still.
_SLOWEST_MBPS, _FASTEST_MBPS, _LONGEST_DELAY_MS, _HIGHEST_LOSS = 1e-3, 1e6, 60_000.0, 0.95


def guard_of(run: Run) -> ConnectionGuard:
    """Return the guard of a run's shard; all its clients may be of one address."""
    # A worker's script has a stream, too, and one more to look for another shard's address.
    own = 3 * run.nb_workers + run.nb_ps + _SPARE_STREAMS
    limits = Limits(streams=own + _STREAMS_OF_OTHERS, streams_per_address=own)
    return ConnectionGuard(run.credentials, limits)


def unanswered(body: str | None, stream: ServerStream, limits: Limits) -> str | None:
    """Return why a client must not send another request, if so.

    Args:
        body: Of its message.
        stream: The client's.
        limits: Of every client.
    """
    waiting = stream.num_waiting
    if body not in REQUESTS or waiting < limits.waiting_replies:
        return None
    return f"a {body} while {waiting} replies wait to be taken; expected one at a time."


def checked_link(given: pb.EmulatedLink) -> Link:
    """Return a client's emulated link.

    Raises:
        Malformed: Of a link that nobody can have chosen by flags; NaN fails every comparison.
    """
    link = Link(given.mbps, given.delay_ms, given.loss)
    fast_enough = link.mbps == 0 or _SLOWEST_MBPS <= link.mbps <= _FASTEST_MBPS
    short_enough = 0 <= link.delay_ms <= _LONGEST_DELAY_MS
    if not (fast_enough and short_enough and 0 <= link.loss <= _HIGHEST_LOSS):
        raise Malformed(
            f"{link}: expected 0 (no limit) or {_SLOWEST_MBPS:g} to {_FASTEST_MBPS:g} Mbit/s, a "
            f"delay up to {_LONGEST_DELAY_MS:g} ms and a loss up to {_HIGHEST_LOSS:g}"
        )
    return link
