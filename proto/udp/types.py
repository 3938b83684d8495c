"""Interfaces between a datagram sender and its user: batches, counters, `DatagramSender`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol


class DatagramBatch(Protocol):
    """UDP datagrams of one size and one channel, stored consecutively in one buffer.

    The sender uses as few system calls for a batch of datagrams as the kernel allows.
    """

    @property
    def channel(self) -> int:
        """Number of the channel of the batch's datagrams; channel 1 is the most important one."""

    @property
    def size(self) -> int:
        """Size of each datagram of the batch, in bytes."""

    @property
    def count(self) -> int:
        """Number of datagrams in the batch."""

    @property
    def data(self) -> memoryview:
        """Bytes of the batch's datagrams, ``count * size`` bytes, at most 64 KiB."""

    def sign(self, key: bytes) -> None:
        """Write the signatures into the batch's datagrams.

        The sending thread calls `sign` once, just before it sends the batch's first datagram.
        """


@dataclasses.dataclass
class ChannelCounts:
    """Counters of one channel of a datagram sender, since the sender was created."""

    datagrams: int = 0  # number of datagrams passed to the kernel or to the emulated link
    bytes_on_wire: int = 0  # number of bytes of the sent datagrams, with IP and UDP headers
    outdated: int = 0  # number of datagrams dropped because newer steps were queued
    # Number of datagrams dropped because the kernel failed, or accepted none for too long.
    refused: int = 0
    # Number of datagrams dropped because they are too large for the network path.
    too_large: int = 0
    # Number of reports from the receiver's machine that the port has no open socket.
    unreachable: int = 0


class DatagramSender(Protocol):
    """Sends a worker's datagrams to one shard, over sockets or over an emulated link.

    All methods of a datagram sender are thread-safe. No method of a datagram sender raises an
    exception for a lost datagram.
    """

    @property
    def mtu(self) -> int:
        """Size in bytes of the largest datagram that the network path carries; the size may
        fall.
        """

    @property
    def failure(self) -> Exception | None:
        """Exception that ended the sending thread for good; None while the thread works."""

    def send(self, batches: Sequence[DatagramBatch], step: int) -> None:
        """Queue batches of datagrams of one step after earlier batches of their channels; never
        block.

        The sender drops and counts queued batches of steps that are too far behind ``step``.
        """

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until no datagram is queued in the sender; return False after a timeout."""

    def counts(self) -> tuple[ChannelCounts, ...]:
        """Return a copy of the channels' datagram counters, channel 1 first."""

    def close(self) -> None:
        """Drop queued datagrams, end the sending thread and close its sockets."""
