"""Manifests of datagrams, between the nouns of ops.routing and the messages of the wire."""

from __future__ import annotations

from ops.routing.assembler import Assembled
from ops.routing.routed import Announced, Manifest
from proto import thinwire_pb2 as pb
from proto.framing import Malformed

_MOST_CHANNELS = 7


def to_message(manifest: Manifest) -> pb.Manifest:
    """Return a manifest as a Push carries it."""
    return pb.Manifest(
        channels=[
            pb.Announced(channel=each.channel, first=each.first, count=each.count)
            for each in manifest.channels
        ],
        k=manifest.k,
        num_blocks=manifest.num_blocks,
        num_skipped=manifest.num_skipped,
        num_reliable=manifest.num_reliable,
        num_dropped=manifest.num_dropped,
    )


def from_message(said: pb.Manifest) -> Manifest:
    """Check and return the manifest of a Push.

    Raises:
        Malformed: Channels do not ascend from 1 to 7, or k is no fraction.
    """
    previous = 0
    for each in said.channels:
        if not previous < each.channel <= _MOST_CHANNELS:
            raise Malformed(f"datagrams of channel {each.channel} announced after {previous}")
        previous = each.channel
    if not 0 <= said.k <= 1:  # NaN fails as well
        raise Malformed(f"k = {said.k} in a manifest; expected 0 to 1")
    return Manifest(
        tuple(Announced(each.channel, each.first, each.count) for each in said.channels),
        said.k,
        said.num_blocks,
        said.num_skipped,
        said.num_reliable,
        said.num_dropped,
    )


def outcome_of(assembled: Assembled, came_late: int) -> pb.Reception:
    """Return what a worker is told of its datagrams of a step; `came_late` are of earlier steps."""
    return pb.Reception(
        announced=assembled.announced,
        arrived=assembled.arrived,
        late=assembled.num_late,
        came_late=came_late,
        fresh=assembled.fresh,
        filled=assembled.fill,
        bitmap=assembled.bitmap or b"",
    )
