"""What a worker has sent, by channel: blocks as the router parts them, bytes as they leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from absl import logging

from ops.datagram_counts import SentCounts
from ops.routing.routed import Routed
from worker.datagram_leg import DatagramLeg

#: Why datagrams were not sent, as the senders count it.
_UNSENT = ("outdated", "refused", "too_large")


class DatagramTotals:
    """One worker's counts over all its shards.

    Args:
        worker: Its id.
        legs: To each shard.
        channels: How many there are beside the stream.
        bytes_up: Says what was sent in all, streams and datagrams.
        tells: Whether a line is logged for each exchange.
    """

    def __init__(
        self,
        worker: int,
        legs: Sequence[DatagramLeg],
        channels: int,
        bytes_up: Callable[[], int],
        tells: bool = False,
    ) -> None:
        self._worker, self._legs, self._channels = worker, legs, channels
        self._bytes_up, self._tells = bytes_up, tells
        self._parted = SentCounts(blocks=[0] * (channels + 1))  # blocks; the rest stays 0
        self._told = SentCounts()

    def note(self, routed: Sequence[Routed]) -> None:
        """Count how an exchange travels; `routed` has a part for each shard (training thread)."""
        blocks = np.zeros(self._channels + 1, np.int64)
        for part in routed:
            blocks[0] += part.num_reliable
            for each in part.unreliable:
                blocks += np.bincount(each.channels, minlength=len(blocks))
        self._parted = self._parted.plus(
            SentCounts(
                pushes=1,
                sum_k=routed[0].k,  # the same for all shards
                blocks=blocks.tolist(),
                skipped=sum(part.num_skipped for part in routed),
                dropped=sum(part.num_dropped for part in routed),
                non_finite=sum(part.num_nonfinite for part in routed),
            )
        )

    def counts(self) -> SentCounts:
        """Return what was sent by this process (any thread)."""
        parted, datagrams, num_bytes = self._parted, [0], [0]
        by_leg = [leg.counts() for leg in self._legs]
        of_channels = list(zip(*by_leg, strict=True))
        for of_legs in of_channels:
            datagrams.append(sum(each.datagrams for each in of_legs))
            num_bytes.append(sum(each.bytes_on_wire for each in of_legs))
        num_bytes[0] = max(0, self._bytes_up() - sum(num_bytes))
        unsent = {
            reason: sum(getattr(each, reason) for of_legs in of_channels for each in of_legs)
            for reason in _UNSENT
        }
        return SentCounts(
            parted.pushes,
            parted.sum_k,
            parted.blocks,
            parted.skipped,
            parted.dropped,
            parted.non_finite,
            datagrams,
            num_bytes,
            unsent,
            sum(leg.fell_back for leg in self._legs),
        )

    def tell(self, step: int) -> None:
        """Log an exchange that is over, if asked to; bytes are those since the last one told."""
        if not self._tells:
            return
        counts = self.counts()
        new, self._told = counts.minus(self._told), counts
        logging.info(
            "worker %d, step %d: k %.3f; blocks by channel, 0 reliable: %s; %d skipped, "
            "%d dropped, %d not finite; bytes: %s",
            self._worker,
            step,
            new.sum_k / max(1, new.pushes),
            _by_channel(new.blocks),
            new.skipped,
            new.dropped,
            new.non_finite,
            _by_channel(new.num_bytes),
        )


def totals_of(
    worker: int,
    legs: Sequence[DatagramLeg | None],
    channels: int,
    bytes_up: Callable[[], int],
    tells: bool,
) -> DatagramTotals | None:
    """Return what counts for these legs; None where the method knows no channels."""
    own = [leg for leg in legs if leg is not None]
    return DatagramTotals(worker, own, channels, bytes_up, tells) if channels else None


def _by_channel(counts: Sequence[int]) -> str:
    return " / ".join(map(str, counts))
