"""Shard's side of the datagram path: join datagrams and reliable parts to a worker's pushes.

A worker's session with a shard has one `Reassembler`. The reassembler parses and authenticates
datagrams, adds the values of each datagram to its step (one push), and closes steps in order. A
step is closed when all announced datagrams have arrived, or when the wait for them is over. The
reassembler reads no clock, uses no sockets and must have one caller at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.routing.base import Manifest, ReassemblyRules
from thinwire.ops.routing.counters import ReassemblyCounters
from thinwire.ops.routing.datagram_format import DatagramSession
from thinwire.ops.routing.parser import DatagramParser, ParsedDatagrams
from thinwire.ops.routing.partial_step import LateBlocks, PartialStep
from thinwire.ops.routing.sequence_set import IN_TIME, LATE, SequenceSet, ahead
from thinwire.ops.types import Block

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

_MODULUS = 1 << 32
#: Size of a float32 in bytes; --dgt_block_size is given in bytes of float32 entries.
_ENTRY_BYTES = 4
#: Largest number of steps that have ended (their reliable parts are complete) and are not closed: a
#: worker sends at most one push before the reply to its previous push.
_MOST_ENDED = 2


@dataclasses.dataclass(frozen=True)
class ReassembledStep:
    """One push of one worker, reassembled from datagrams and reliable parts."""

    step: int  # step number of the push
    # One block per slot, ascending: float32, dense or sparse, or a low-rank block as it arrived.
    blocks: tuple[Block, ...]
    flat: Float32 | None  # [shard] float32: all blocks; None if a slot is missing or sparse
    fresh: float  # fraction of the worker's blocks (sent or dropped) that arrived in time
    fill: float  # `fresh` plus the fraction of blocks that only late datagrams have filled
    mean_lateness: float  # mean age of the late datagrams that were added, in steps; 0: none added
    num_late: int  # number of late datagrams of earlier steps that were added
    announced: int  # number of datagrams that the worker announced
    arrived: int  # number of announced datagrams that arrived in time
    # Bits of the announced datagrams, 1 if the datagram arrived in time; `SealedStep.lost`
    # describes the order of the bits. None without --dgt_error_feedback.
    bitmap: bytes | None


class Reassembler:
    """Reassembles one worker's pushes (steps) from datagrams and reliable parts, in order.

    A step opens with its first datagram or its first reliable part (also called end marker). At
    most two steps are open at the same time. A step is closed when all its reliable parts have
    arrived and no announced datagram is missing, or when the wait is over. Step numbers ascend, and
    may have gaps: a step that was begun and never ended is forgotten.

    Source: the diff-reception of Zhou et al., "DGT", Future Generation Computer Systems 121, 2021.
    Differences: datagrams are authenticated and count once; late datagrams count only up to an
    age; the shard can wait a bounded time for missing datagrams.

    Attributes:
        counters: Counters of received, dropped and used datagrams since the start of the session.
    """

    def __init__(
        self, session: DatagramSession, sizes: Sequence[int], rules: ReassemblyRules
    ) -> None:
        """Start the reassembly of one worker's pushes to one shard.

        Args:
            session: Id, key and worker of the datagram session.
            sizes: Number of entries of each slot (slice of a variable) of the shard.
            rules: The router's settings for reassembly.
        """
        self.counters = ReassemblyCounters.zero(rules.dgt_channels)
        block_entries = max(1, rules.dgt_block_size // _ENTRY_BYTES)
        self._rules = rules
        self._parser = DatagramParser(
            session, sizes, block_entries, rules.dgt_channels, self.counters
        )
        self._late = LateBlocks(sizes, rules.dgt_late_decay)
        self._window = StepWindow(
            [0, *np.cumsum(np.array(sizes, np.int64)).tolist()], self.counters
        )
        self._closed: int | None = None  # newest closed step, modulo 2**32; None: no closed step
        self._past: dict[int, SequenceSet] = {}  # recently closed step -> its arrived datagrams
        self._newest: ReassembledStep | None = None
        # Mean number of gradient blocks per datagram in the last step that announced datagrams.
        self._blocks_per_datagram = 0.0

    # -- datagrams --------------------------------------------------------------------------

    def feed(self, datagrams: bytes | bytearray | memoryview, size: int, now: float) -> None:
        """Process the datagrams that one receive call returned; invalid bytes raise no exception.

        Args:
            datagrams: Consecutive datagrams; the caller may overwrite the buffer after the call.
            size: Size of each datagram, in bytes; the last datagram may be shorter.
            now: Current time by the caller's clock, in seconds.
        """
        self._advance(now)
        for arrivals in self._parser.parse(memoryview(datagrams), size):
            self._place(arrivals)

    def _place(self, arrivals: ParsedDatagrams) -> None:
        if self._closed is not None and ahead(arrivals.step, self._closed) <= 0:
            self._place_late(arrivals)
            return
        step = self._window.step_for(arrivals.step)
        if isinstance(step, str):
            self.counters.dropped[step] += len(arrivals)
            return
        is_late = step.closed[arrivals.slots]
        if is_late.any():  # the step is open, but the slots of these datagrams are closed
            self._keep_late(arrivals.select(is_late), step.sequences, 1)
            arrivals = arrivals.select(~is_late)
        fresh = self._new(arrivals, step.sequences, IN_TIME)
        if len(fresh):
            step.place(fresh)

    def _new(self, arrivals: ParsedDatagrams, sequences: SequenceSet, mark: int) -> ParsedDatagrams:
        """Return the datagrams that have not arrived before; count duplicates as dropped."""
        if not len(arrivals):
            return arrivals
        new, num_outside = sequences.add(arrivals.channel, arrivals.sequences, mark)
        if new.all():
            return arrivals
        self.counters.dropped["unannounced"] += num_outside
        self.counters.dropped["duplicate"] += len(new) - int(np.count_nonzero(new)) - num_outside
        return arrivals.select(new)

    # -- late datagrams ---------------------------------------------------------------------

    def _place_late(self, arrivals: ParsedDatagrams) -> None:
        """Count and keep, or drop, datagrams of a step that is closed."""
        first = self._window.first
        awaited = (self._closed or 0) + 1 if first is None else first.number
        self._keep_late(arrivals, self._past.get(arrivals.step), ahead(awaited, arrivals.step))

    def _keep_late(
        self, arrivals: ParsedDatagrams, sequences: SequenceSet | None, age: int
    ) -> None:
        """Count late datagrams once, and keep them until a later push closes their slots.

        With --dgt_reception=drop, late datagrams are not kept. If `sequences` is None, all
        datagrams are dropped: their step was never closed, or is forgotten.
        """
        if sequences is None or age > self._rules.dgt_max_late:
            reason = "too_old" if age > self._rules.dgt_max_late else "abandoned"
            self.counters.dropped[reason] += len(arrivals)
            return
        new = self._new(arrivals, sequences, LATE)
        self.counters.num_late[arrivals.channel] += len(new)
        if self._rules.dgt_reception == "drop":
            self.counters.dropped["late"] += len(new)
        elif len(new):
            self._late.add(new, age)

    # -- the reliable part ------------------------------------------------------------------

    def add_reliable(
        self, step: int, blocks: Sequence[Block], manifest: Manifest, now: float
    ) -> None:
        """Add a reliable part of a push: the part of all slots, or the part of one tensor.

        A repeated part is ignored. Older steps that were not ended are forgotten.

        Args:
            step: Full step number of the push.
            blocks: Blocks of the reliable part; a slot may be in only one reliable part of a step.
            manifest: Announcement of the datagrams for the slots in `blocks`.
            now: Current time by the caller's clock, in seconds.

        Raises:
            ValueError: The step is closed, or blocks and manifest do not fit the shard or the
                step's earlier reliable parts.
        """
        self._advance(now)
        number = step % _MODULUS
        if self._closed is not None and ahead(number, self._closed) <= 0:
            raise ValueError(
                f"a reliable part arrived for step {step}, which is already closed; expected a "
                "later step"
            )
        for announced in manifest.channels:
            if not 1 <= announced.channel <= self._rules.dgt_channels:
                raise ValueError(
                    f"a worker announces datagrams on channel {announced.channel}: expected 1 to "
                    f"{self._rules.dgt_channels}"
                )
        partial = self._window.find(number) or self._window.begin(number)
        if partial.is_repeated(blocks):
            return
        partial.add_reliable(blocks, manifest, now, self._rules.dgt_wait_ms / 1000)
        partial.step = step
        self._window.forget_before(partial)
        self._advance(now)

    def end_step(self, step: int, now: float) -> None:
        """Mark a step as ended: all its reliable parts have been added.

        Raises:
            ValueError: No reliable part of the step was added, or the announced sequence numbers
                have gaps.
        """
        partial = self._window.find(step % _MODULUS)
        if partial is None or partial.step is None:
            raise ValueError(f"step {step} ends, but none of its reliable parts has arrived")
        if not partial.ended:
            partial.sequences.finish()
            partial.ended = True
        self._advance(now)

    def on_refused(self, step: int) -> None:
        """Drop further datagrams of a closed step, because the shard refused the push.

        The worker keeps all values of a refused push and sends them later, so a late datagram of
        the push would count twice.
        """
        self._past.pop(step % _MODULUS, None)

    # -- closing ----------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Return the time when `close` is due, perhaps in the past; None if no step waits."""
        step = self._window.first
        if step is None or not step.groups:
            return None
        waiting = [group for group in step.groups if not group.closed]
        if not waiting:
            return step.groups[-1].marked_at if step.ended else None
        return min(
            group.marked_at if step.is_complete(group) else group.deadline for group in waiting
        )

    def _advance(self, now: float) -> None:
        """Close slots of the oldest step that are complete, or that have waited long enough."""
        step = self._window.first
        if step is None:
            return
        for group in step.groups:
            if group.closed:
                continue
            complete = step.is_complete(group)
            if complete or group.deadline <= now:
                self.counters.num_incomplete += not complete
                self.counters.dropped["whole"] += step.close(group, self._late)

    def close(self, now: float) -> ReassembledStep | None:
        """Return the next push if it is complete or its wait is over; call again until None."""
        self._advance(now)
        step = self._window.first
        if step is None or not step.ended or not all(group.closed for group in step.groups):
            return None
        step.close_rest(self._late)
        self._window.remove_first()
        self._newest = self._assembled(step)
        self._closed = step.number
        self._past[step.number] = step.sequences
        for number in list(self._past):
            if ahead(step.number, number) >= self._rules.dgt_max_late:
                del self._past[number]
        return self._newest

    def find_closed(self, step: int) -> ReassembledStep | None:
        """Return the newest closed step for a second time; None if it is not number `step`."""
        newest = self._newest
        return newest if newest is not None and newest.step == step else None

    def _assembled(self, step: PartialStep) -> ReassembledStep:
        """Return the reassembled push of a closed step, and add the step to the counters."""
        announced, in_time = step.sequences.announced(), step.sequences.in_time()
        for channel in announced:
            self.counters.num_announced[channel] += announced[channel]
            self.counters.num_arrived[channel] += in_time[channel]
        num_announced, num_arrived = sum(announced.values()), sum(in_time.values())
        sent = step.total(lambda manifest: manifest.num_blocks - manifest.num_skipped)
        num_reliable = step.total(lambda manifest: manifest.num_reliable)
        unreliable = sent - num_reliable - step.total(lambda manifest: manifest.num_dropped)
        if num_announced:
            self._blocks_per_datagram = max(0, unreliable) / num_announced
        # The number of arrived blocks is estimated from the number of arrived datagrams: a block
        # may need several datagrams, and a sparse datagram may have entries of several blocks.
        blocks_per_datagram = self._blocks_per_datagram
        num_fresh = num_reliable + blocks_per_datagram * num_arrived
        assembled = ReassembledStep(
            step=step.step if step.step is not None else step.number,
            blocks=step.blocks(),
            flat=step.flat(),
            fresh=_share(num_fresh, sent),
            fill=_share(num_fresh + blocks_per_datagram * step.num_filled, sent),
            mean_lateness=step.sum_of_ages / step.num_late if step.num_late else 0.0,
            num_late=step.num_late,
            announced=num_announced,
            arrived=num_arrived,
            bitmap=step.sequences.bitmap() if self._rules.dgt_error_feedback else None,
        )
        self._count(step, assembled)
        return assembled

    def _count(self, step: PartialStep, assembled: ReassembledStep) -> None:
        counters = self.counters
        counters.num_closed += 1
        counters.num_late_used += step.num_late
        counters.sum_of_ages += step.sum_of_ages
        counters.blocks += step.total(lambda manifest: manifest.num_blocks)
        counters.blocks_skipped += step.total(lambda manifest: manifest.num_skipped)
        counters.blocks_reliable += step.total(lambda manifest: manifest.num_reliable)
        counters.blocks_dropped += step.total(lambda manifest: manifest.num_dropped)
        counters.sum_k += step.groups[-1].manifest.k
        counters.sum_fresh += assembled.fresh
        counters.sum_fill += assembled.fill


def _share(part: float, whole: int) -> float:
    """Return the fraction part / whole, limited to the range 0 to 1; 1 if `whole` is 0."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 1.0


class StepWindow:
    """The open steps (pushes that are not complete) of a worker: at most two.

    Step numbers are modulo 2**32. A worker is at most one push ahead of the replies: it begins step
    n only after the reply to step n - 2. If a step has no reliable part when datagrams of a second
    newer step arrive, the reliable part will therefore never arrive.
    """

    def __init__(self, offsets: Sequence[int], counters: ReassemblyCounters) -> None:
        """Start without steps; `offsets` has each slot's start in the shard, and its size."""
        self._offsets, self._counters = offsets, counters
        self._open: list[PartialStep] = []  # open steps in the order of their numbers

    @property
    def first(self) -> PartialStep | None:
        """The oldest open step, the only one that may be closed; None if no step is open."""
        return self._open[0] if self._open else None

    def find(self, number: int) -> PartialStep | None:
        """Return the open step with this number; None if the step is not open."""
        return next((step for step in self._open if step.number == number), None)

    def step_for(self, number: int) -> PartialStep | str:
        """Return the step of received datagrams, and open the step if necessary.

        Args:
            number: Step number of the datagrams, newer than every closed step.

        Returns:
            The open step with this number; or a key of `REASONS` if the datagrams must be dropped.
        """
        partial = self.find(number)
        if partial is not None:
            return partial
        older = [step for step in self._open if ahead(step.number, number) < 0]
        newer = self._open[len(older) :]
        # Reliable parts arrive in order of steps. A newer step has a reliable part, so the reliable
        # part of this step will never arrive.
        if any(step.groups for step in newer):
            return "abandoned"
        if len(self._open) > 1:
            if not older:
                return "abandoned"
            # A step with a reliable part will be closed, so the window cannot move past it.
            if older[0].groups:
                return "too_new"
            self._forget(older[0])
        return self.begin(number)

    def begin(self, number: int) -> PartialStep:
        """Open a step of the worker and return it.

        Raises:
            ValueError: Too many earlier steps are not closed yet.
        """
        if sum(step.ended for step in self._open) >= _MOST_ENDED:
            raise ValueError(
                f"a worker begins step {number}, but its {_MOST_ENDED} earlier steps are not "
                "closed yet"
            )
        step = PartialStep(number, self._offsets)
        older = [partial for partial in self._open if ahead(partial.number, number) < 0]
        self._open.insert(len(older), step)
        return step

    def forget_before(self, step: PartialStep) -> None:
        """Forget the steps before `step` that were never ended."""
        for older in self._open[: self._open.index(step)]:
            if not older.ended:
                self._forget(older)

    def remove_first(self) -> None:
        """Remove the oldest open step, because it is closed."""
        del self._open[0]

    def _forget(self, step: PartialStep) -> None:
        self._counters.dropped["abandoned"] += step.num_placed
        self._open.remove(step)
