"""The interfaces between a datagram sender and its owner: batches, counters, `DatagramSender`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol


class DatagramBatch(Protocol):
    """Datagrams of one size and one channel, one after the other in one buffer.

    They leave in as few system calls as the kernel allows.
    """

    @property
    def channel(self) -> int:
        """1 is the most important one."""

    @property
    def size(self) -> int:
        """Bytes of each datagram."""

    @property
    def count(self) -> int:
        """Datagrams."""

    @property
    def data(self) -> memoryview:
        """``count * size`` bytes, at most 64 KiB."""

    def sign(self, key: bytes) -> None:
        """Write the tags; called once, by the sending thread, just before the first is sent."""


@dataclasses.dataclass
class ChannelCounts:
    """What one channel of a sender has done since it was made."""

    datagrams: int = 0  # handed to the kernel, or to the emulated link
    bytes_on_wire: int = 0  # of those, with IP and UDP headers
    outdated: int = 0  # datagrams dropped unsent: newer steps came before their turn
    refused: int = 0  # ... dropped because the kernel took no more for too long, or failed
    too_large: int = 0  # ... dropped because the path no longer carries their size
    unreachable: int = 0  # times the receiver's machine reported that no socket is open there


class DatagramSender(Protocol):
    """Sends a worker's datagrams to one shard, over sockets or over an emulated link.

    All methods may be called from any thread; none of them raises for a lost datagram.
    """

    @property
    def mtu(self) -> int:
        """Bytes of the largest datagram that passes; may fall while the path is learnt."""

    @property
    def failure(self) -> Exception | None:
        """What ended the sending before its time; nothing is sent any more."""

    def send(self, batches: Sequence[DatagramBatch], step: int) -> None:
        """Queue batches of one step behind earlier ones of their channels; never blocks.

        Batches of steps too far behind this one that still wait are dropped, and counted.
        """

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until nothing is queued; return whether that came about in time."""

    def counts(self) -> tuple[ChannelCounts, ...]:
        """Return a copy of the counters, channel 1 first."""

    def close(self) -> None:
        """Drop what is queued, end the thread and the sockets; may be called twice."""
