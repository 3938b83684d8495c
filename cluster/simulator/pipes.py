"""Links on the virtual clock: the emulated channel's own model, without its sleeping."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from cluster.simulator.clock import Clock
from ops.types import Link
from proto.channel_emulated import LinkModel
from proto.grpc_common import wire_bytes


class Pipe:
    """One direction of a link.

    Attributes:
        num_bytes: Training bytes that its sender has put on it, with what was sent again.
        free_at: When the last byte of all that was sent is through, in seconds.
    """

    def __init__(self, link: Link, seed: int = 0) -> None:
        """Start idle; `seed` seeds the losses."""
        self._model = LinkModel(link, seed)
        self.num_bytes = 0
        self.free_at = 0.0

    def send(self, now: float, size: int, counted: bool) -> float:
        """Put `size` bytes on the link; return when they have arrived."""
        delivery = self._model.send(now, size)
        self.num_bytes += delivery.bytes_on_wire if counted else 0
        self.free_at = delivery.delivered_at
        return delivery.delivered_at


def sizes_on_wire(frames: Sequence[bytes]) -> list[int]:
    """Return what each frame costs on a stream, framing included."""
    return [wire_bytes(len(frame)) for frame in frames]


def carry(
    clock: Clock,
    hops: Sequence[Pipe],
    sizes: Sequence[int],
    counted: bool,
    deliver: Callable[[], None],
) -> None:
    """Pass a message over one hop after the other, frame by frame.

    Args:
        clock: Virtual time.
        hops: The pipes on the way, at least one.
        sizes: Bytes of each frame; a message of no known size is only delayed.
        counted: Whether they are training bytes.
        deliver: Called when the last frame has arrived.
    """
    first, rest = hops[0], hops[1:]
    arrivals = [first.send(clock.now, size, counted) for size in sizes or (0,)]
    if not rest:
        clock.at(arrivals[-1], deliver)
        return
    for number, (size, arrival) in enumerate(zip(sizes or (0,), arrivals, strict=True), 1):
        done = deliver if number == len(arrivals) else _nothing
        clock.at(arrival, functools.partial(carry, clock, rest, (size,), counted, done))


def _nothing() -> None:
    """Do nothing: a frame that is not the last delivers no message."""
