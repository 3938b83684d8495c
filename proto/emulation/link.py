"""Emulated links: a model of rate, delay and loss, and a sender that delays messages accordingly.

One link model serves real gRPC streams as well as a simulation on a virtual clock. An emulated link
is full duplex and needs one model for each direction.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from thinwire.ops.types import Link

#: Payload of one TCP segment on an Ethernet path, in bytes. The emulated link draws losses for each
#: segment.
SEGMENT_BYTES = 1448
_MIN_ROUND_TRIP_SECONDS = 1e-3


def bytes_per_second(mbps: float) -> float:
    """Return a link's rate in bytes per second; infinity for 0 Mbit/s, which means no limit."""
    return mbps * 1e6 / 8 if mbps > 0 else math.inf


def round_trip_seconds(link: Link) -> float:
    """Return after how many seconds a lost TCP segment is sent again on a link: at least 0.001."""
    return max(2 * link.delay_ms / 1e3, _MIN_ROUND_TRIP_SECONDS)


def draw_losses(random: np.random.Generator, loss: float, num_bytes: int) -> tuple[int, int]:
    """Draw at random how many segments of one reliable message are lost.

    Args:
        random: NumPy generator of the random draws.
        loss: Probability that a TCP segment is lost, 0 to 1.
        num_bytes: Size of the message, in bytes.

    Returns:
        (bytes that the sender retransmits, round trips that the retransmissions take).
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
    """Times at which one message passes an emulated link, in seconds on the model's clock."""

    serialised_at: float  # Time at which the sender has sent all bytes of the message.
    delivered_at: float  # Time at which the receiver has received all bytes of the message.
    bytes_on_wire: int  # Bytes of the message and of its retransmissions.


class LinkModel:
    """Model of one direction of an emulated network link.

    Messages pass an emulated link one after the other at the link's rate and arrive one delay
    later, in order. On an emulated link, a lost TCP segment of a message is sent again one round
    trip (at least 1 ms) later. The retransmission of a lost segment uses the link's rate again and
    delays the segment's message and all later messages, but does not block the sender.

    Args:
        link: Rate (0: no limit), delay and loss probability of the emulated link.
        seed: Seed of the link's random losses.
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
        """Compute the passage of a message that is ready at ``now`` (seconds) after earlier
        messages.
        """
        resent_bytes, rounds = draw_losses(self._random, self._loss, num_bytes)
        bytes_on_wire = num_bytes + resent_bytes
        self._free_at = max(now, self._free_at) + bytes_on_wire / self._bytes_per_second
        arrival = self._free_at + self._delay_seconds + rounds * self._round_trip_seconds
        self._last_delivery_at = max(self._last_delivery_at, arrival)
        return Delivery(self._free_at, self._last_delivery_at, bytes_on_wire)


class EmulatedSender:
    """Sender over one direction of a worker's emulated link, shared by all streams of the worker.
    Thread-safe.

    Args:
        model: Model of the emulated link's rate, delay and loss.
        clock: Function that returns seconds of a monotonic clock.
        sleep: Function that blocks for a number of seconds.
    """

    def __init__(
        self,
        model: LinkModel,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._model = model
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()

    def carry(self, num_bytes: int, ready_at: float) -> int:
        """Wait until a message of ``num_bytes`` has passed the emulated link.

        Args:
            num_bytes: Size of the message with framing, in bytes.
            ready_at: Earliest time at which the message could have been sent over the emulated
                link, in seconds. Messages with equal times pass the link back to back, although the
                caller sends each message only after its emulated delay.

        Returns:
            Bytes on the wire, with retransmissions.
        """
        with self._lock:
            delivery = self._model.send(ready_at, num_bytes)
        remaining = delivery.delivered_at - self._clock()
        if remaining > 0:
            self._sleep(remaining)
        return delivery.bytes_on_wire

    def carry_all(self, sizes: Sequence[int], ready_at: float) -> Iterator[int]:
        """Wait until several messages have passed the emulated link one after the other.

        Args:
            sizes: Size of each message with framing, in bytes.
            ready_at: Earliest time at which all messages could have been sent, in seconds.

        Yields:
            Bytes on the wire of each message, as soon as the message has passed.
        """
        for num_bytes in sizes:
            yield self.carry(num_bytes, ready_at)
