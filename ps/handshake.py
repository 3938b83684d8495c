"""Judge a Hello before it reaches the core."""

from __future__ import annotations

import dataclasses

from ops.types import ModelSpec
from proto import convert
from proto import thinwire_pb2 as pb


@dataclasses.dataclass(frozen=True)
class Identity:
    """What this shard is, and what a client must agree with."""

    run_id: str
    shard: int
    num_shards: int
    generation: int
    fingerprint: list[pb.Setting]
    model: list[pb.Tensor]
    settings: list[pb.Setting]  # what shards must agree on besides the fingerprint


def identity(
    run_id: str,
    shard: int,
    num_shards: int,
    generation: int,
    fingerprint: list[tuple[str, str]],
    spec: ModelSpec,
    settings: list[tuple[str, str]],
) -> Identity:
    """Put the shard's identity into words of the wire."""
    return Identity(
        run_id,
        shard,
        num_shards,
        generation,
        convert.settings_of(fingerprint),
        convert.tensors_of(spec),
        convert.settings_of(settings),
    )


def hello_to_leader(mine: Identity) -> pb.Hello:
    """Return what a following shard says to shard 0: that it is of the same run."""
    return pb.Hello(
        protocol_version=convert.PROTOCOL_VERSION,
        role=pb.ROLE_SHARD,
        id=mine.shard,
        run_id=mine.run_id,
        fingerprint=mine.fingerprint + mine.settings,
        model=mine.model,
        shard=0,
        num_shards=mine.num_shards,
    )


def judge(hello: pb.Hello, mine: Identity) -> tuple[int, str] | None:
    """Return (reason, message) of a refusal, or None for a Hello of our version that fits."""
    if hello.role not in (pb.ROLE_WORKER, pb.ROLE_SUPERVISOR, pb.ROLE_SHARD):
        return pb.REASON_MALFORMED, f"role: unknown value {hello.role}."
    if (hello.shard, hello.num_shards) != (mine.shard, mine.num_shards):
        return pb.REASON_TOPOLOGY, (
            f"shard: this is PS {mine.shard} of {mine.num_shards}, the client looks for PS "
            f"{hello.shard} of {hello.num_shards}; give all nodes the same --nb_ps and --ps_hosts "
            "and this PS its --id_ps."
        )
    if hello.role == pb.ROLE_SHARD and not 1 <= hello.id < mine.num_shards:
        return pb.REASON_TOPOLOGY, (
            f"id: PS {hello.id} does not follow shard 0; expected --id_ps from 1 to "
            f"{mine.num_shards - 1}."
        )
    if hello.run_id and mine.run_id and hello.run_id != mine.run_id:
        return pb.REASON_RUN, (
            f"run_id: this PS runs {mine.run_id}, the client belongs to {hello.run_id!r}; "
            "restart the client, or point it to its own PS."
        )
    looks_only = hello.role == pb.ROLE_SUPERVISOR and not hello.model
    difference = convert.first_difference(mine.model, list(hello.model))
    if difference and not looks_only:
        return pb.REASON_MODEL, (
            f"model differs: {difference}; give all nodes the same --network or --model."
        )
    if hello.role == pb.ROLE_SUPERVISOR:
        return None
    expected = list(mine.fingerprint)
    if hello.role == pb.ROLE_SHARD:
        expected += mine.settings
    difference = convert.first_difference(expected, list(hello.fingerprint))
    if difference:
        return pb.REASON_FINGERPRINT, (
            f"method or split of the data differs: {difference}; give all nodes the same --method, "
            "seam flags, --seed and --partition."
        )
    return None
