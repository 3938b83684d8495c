"""Emulated links: a pure model of rate, delay and loss, and a sender that keeps to it.

The same model serves real streams and a simulation on a virtual clock. A link is full duplex: one
model for each direction.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from thinwire.ops.types import Link

#: Payload of one TCP segment on an Ethernet path; the unit of loss.
SEGMENT_BYTES = 1448
_MIN_ROUND_TRIP_SECONDS = 1e-3


def bytes_per_second(mbps: float) -> float:
    """Return a link's rate; 0 Mbit/s is no limit."""
    return mbps * 1e6 / 8 if mbps > 0 else math.inf


def round_trip_seconds(link: Link) -> float:
    """Return how long it takes until a lost segment is sent again: at least 1 ms."""
    return max(2 * link.delay_ms / 1e3, _MIN_ROUND_TRIP_SECONDS)


def draw_losses(random: np.random.Generator, loss: float, num_bytes: int) -> tuple[int, int]:
    """Draw the losses of one reliable message.

    Args:
        random: Source of the draw.
        loss: Probability that a segment is lost.
        num_bytes: Of the message.

    Returns:
        Bytes sent again, and the round trips waited for them.
    """
    if loss <= 0:
        return 0, 0
    missing = math.ceil(num_bytes / SEGMENT_BYTES)
    resent = rounds = 0
    while missing := int(random.binomial(missing, loss)):
        resent += missing
        rounds += 1
    return resent * min(SEGMENT_BYTES, num_bytes), rounds


@dataclasses.dataclass(frozen=True)
class Delivery:
    """When one message passes a link, in seconds on the model's clock."""

    serialised_at: float  # the sender is done with it
    delivered_at: float  # the receiver has all of it
    bytes_on_wire: int  # with what was sent again


class LinkModel:
    """One direction of an emulated link.

    Messages pass one after the other at the link's rate and arrive one delay later, in order. Each
    lost segment is sent again one round trip (at least 1 ms) later: it costs its bytes again and
    holds back its message, and so all after it, but not the sender.

    Args:
        link: Rate, delay and loss; zero means without that limit.
        seed: Seeds the losses.
    """

    def __init__(self, link: Link, seed: int = 0) -> None:
        self._bytes_per_second = bytes_per_second(link.mbps)
        self._delay_seconds = link.delay_ms / 1e3
        self._round_trip_seconds = round_trip_seconds(link)
        self._loss = link.loss
        self._random = np.random.default_rng(seed)
        self._free_at = -math.inf
        self._last_delivery_at = -math.inf

    def send(self, now: float, num_bytes: int) -> Delivery:
        """Pass one message that its sender had ready at ``now``, behind all earlier ones."""
        resent_bytes, rounds = draw_losses(self._random, self._loss, num_bytes)
        bytes_on_wire = num_bytes + resent_bytes
        self._free_at = max(now, self._free_at) + bytes_on_wire / self._bytes_per_second
        arrival = self._free_at + self._delay_seconds + rounds * self._round_trip_seconds
        self._last_delivery_at = max(self._last_delivery_at, arrival)
        return Delivery(self._free_at, self._last_delivery_at, bytes_on_wire)


class EmulatedSender:
    """One direction of one worker's link, shared by all its streams; thread-safe.

    Args:
        model: Rate, delay and loss.
        clock: Seconds; monotone.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        model: LinkModel,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._model = model
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()

    def now(self) -> float:
        """Seconds on the sender's clock."""
        return self._clock()

    def carry(self, num_bytes: int, ready_at: float) -> int:
        """Wait until a message of ``num_bytes`` has passed the link.

        Args:
            num_bytes: With framing.
            ready_at: When the message could have been sent at the earliest. Messages that were
                ready together pass back to back, though each is handed on only after its delay.

        Returns:
            Bytes on the wire, with what was sent again.
        """
        with self._lock:
            delivery = self._model.send(ready_at, num_bytes)
        remaining = delivery.delivered_at - self._clock()
        if remaining > 0:
            self._sleep(remaining)
        return delivery.bytes_on_wire

    def carry_all(self, sizes: Sequence[int], ready_at: float) -> Iterator[int]:
        """Let messages pass one after the other; see `carry`.

        Args:
            sizes: Bytes of each, with framing.
            ready_at: When the first could have been sent at the earliest, and so all.

        Yields:
            Bytes on the wire of each, as soon as it has passed.
        """
        for num_bytes in sizes:
            yield self.carry(num_bytes, ready_at)
