"""The receiver's half: datagrams and reliable parts go in, complete steps come out.

A worker's session with a shard has one `Reassembler`. It parses and authenticates datagrams, places
them in the step they belong to (`StepWindow`), counts, and closes steps in order: when everything
announced has arrived, or the wait is over. It reads no clock, knows no sockets and has one
caller at a time.
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
#: Bytes of a float32, which block sizes are given in.
_ENTRY_BYTES = 4
#: Ended steps that may wait to be closed: a worker is one push ahead at most.
_MOST_ENDED = 2


@dataclasses.dataclass(frozen=True)
class ReassembledStep:
    """One step of one worker, reassembled."""

    step: int
    blocks: tuple[Block, ...]  # float32, dense or sparse, slots ascending; low rank as it arrived
    flat: Float32 | None  # [shard] float32: all of them, if every slot is there and dense
    fresh: float  # share of the blocks sent or intended that came in time
    fill: float  # the same plus places where only something late came
    mean_lateness: float  # in steps, of the late datagrams that were added; 0 without any
    num_late: int  # late datagrams that were added
    announced: int  # datagrams
    arrived: int  # of those, in time; the others are lost or late
    bitmap: bytes | None  # which ones, with --dgt_error_feedback; see SealedStep.lost


class Reassembler:
    """Reassembles one worker's steps, in order.

    A step opens with its first datagram or its first reliable part (its end marker); one more may
    be received beside it. It is closed when all reliable parts have come and nothing announced is
    missing, or the wait is over. Step numbers grow, but may skip some: a step that was begun and
    never ended is forgotten.

    Source: the diff-reception of Zhou et al., "DGT", Future Generation Computer Systems 121, 2021.
    Differences: datagrams are authenticated; each counts once; late ones only up to an age; a
    bounded wait if wanted.

    Attributes:
        counters: What was received, dropped and used since the session began.
    """

    def __init__(
        self, session: DatagramSession, sizes: Sequence[int], rules: ReassemblyRules
    ) -> None:
        """Start a session.

        Args:
            session: Its id, key and worker.
            sizes: Entries of the shard's slots.
            rules: The router's.
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
        self._closed: int | None = None  # the newest closed step, modulo 2**32
        self._past: dict[int, SequenceSet] = {}  # closed steps that may still get late datagrams
        self._newest: ReassembledStep | None = None
        self._blocks_per_datagram = 0.0  # of the last step that announced any

    # -- datagrams --------------------------------------------------------------------------

    def feed(self, datagrams: bytes | bytearray | memoryview, size: int, now: float) -> None:
        """Process what one receive call returned; never raises, whatever the bytes.

        Args:
            datagrams: One after the other; they may be overwritten afterwards.
            size: Bytes of each; the last may be shorter.
            now: By the caller's clock.
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
        if is_late.any():  # their slots are closed, the step is not
            self._keep_late(arrivals.select(is_late), step.sequences, 1)
            arrivals = arrivals.select(~is_late)
        fresh = self._new(arrivals, step.sequences, IN_TIME)
        if len(fresh):
            step.place(fresh)

    def _new(self, arrivals: ParsedDatagrams, sequences: SequenceSet, mark: int) -> ParsedDatagrams:
        """Return those that did not come before."""
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
        """Handle datagrams of a step that is closed."""
        first = self._window.first
        awaited = (self._closed or 0) + 1 if first is None else first.number
        self._keep_late(arrivals, self._past.get(arrivals.step), ahead(awaited, arrivals.step))

    def _keep_late(
        self, arrivals: ParsedDatagrams, sequences: SequenceSet | None, age: int
    ) -> None:
        """Count late datagrams, once each, and keep them until their slots are closed again.

        With `dgt_reception` drop they are not kept. Without `sequences` they are useless: their
        step was never closed, or is forgotten.
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
        """Add the reliable part of a step, or of one tensor of it: the end marker.

        A repeated part is ignored. Older steps that were not ended are forgotten.

        Args:
            step: In full.
            blocks: Reliable ones; each slot in at most one part of the step.
            manifest: What travels in datagrams for the same slots.
            now: By the caller's clock.

        Raises:
            ValueError: The step is closed, or blocks and manifest do not fit the shard or what was
                added before.
        """
        self._advance(now)
        number = step % _MODULUS
        if self._closed is not None and ahead(number, self._closed) <= 0:
            raise ValueError(f"step {step} is closed; expected a later one")
        for each in manifest.channels:
            if not 1 <= each.channel <= self._rules.dgt_channels:
                raise ValueError(
                    f"channel {each.channel}: expected 1 to {self._rules.dgt_channels}"
                )
        found = self._window.find(number) or self._window.begin(number)
        if found.is_repeated(blocks):
            return
        found.add_reliable(blocks, manifest, now, self._rules.dgt_wait_ms / 1000)
        found.step = step
        self._window.forget_before(found)
        self._advance(now)

    def end_step(self, step: int, now: float) -> None:
        """Note that all reliable parts of a step have been added.

        Raises:
            ValueError: None was, or the announcements leave gaps.
        """
        found = self._window.find(step % _MODULUS)
        if found is None or found.step is None:
            raise ValueError(f"step {step} ends, but nothing of it was marked")
        if not found.ended:
            found.sequences.finish()
            found.ended = True
        self._advance(now)

    def on_refused(self, step: int) -> None:
        """Use nothing more of a closed step that was refused: its worker keeps all of it."""
        self._past.pop(step % _MODULUS, None)

    # -- closing ----------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Return when `close` is due, in the past if it is already; None: nothing is awaited."""
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
        """Close what is complete, or has waited long enough, of the oldest step."""
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
        """Return the next step if it is complete or has waited long enough; call until None."""
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
        """Return the newest closed step once more, if it has this number."""
        newest = self._newest
        return newest if newest is not None and newest.step == step else None

    def _assembled(self, step: PartialStep) -> ReassembledStep:
        """Return a closed step, and count it."""
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
        each = self._blocks_per_datagram
        here = num_reliable + each * num_arrived
        assembled = ReassembledStep(
            step=step.step if step.step is not None else step.number,
            blocks=step.blocks(),
            flat=step.flat(),
            fresh=_share(here, sent),
            fill=_share(here + each * step.num_filled, sent),
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
    """Return part / whole, within 0 and 1; 1 of nothing."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 1.0


class StepWindow:
    """The open steps of a worker: the oldest, and at most one ahead; numbers are modulo 2**32.

    A worker begins a step only after the reply to the last but one. So a step that has no reliable
    part when a second newer one arrives will never have one.
    """

    def __init__(self, offsets: Sequence[int], counters: ReassemblyCounters) -> None:
        """Start with none; slots lie at `offsets` in the shard, the total at the end."""
        self._offsets, self._counters = offsets, counters
        self._open: list[PartialStep] = []  # ascending

    @property
    def first(self) -> PartialStep | None:
        """The oldest one: only it may be closed."""
        return self._open[0] if self._open else None

    def find(self, number: int) -> PartialStep | None:
        """Return the open step with this number."""
        return next((step for step in self._open if step.number == number), None)

    def step_for(self, number: int) -> PartialStep | str:
        """Return the step that datagrams belong to, opened if need be, or why there is none.

        Args:
            number: Newer than every closed step's.
        """
        found = self.find(number)
        if found is not None:
            return found
        older = [step for step in self._open if ahead(step.number, number) < 0]
        newer = self._open[len(older) :]
        if any(step.groups for step in newer):
            return "abandoned"
        if len(self._open) > 1:
            if not older:
                return "abandoned"
            if older[0].groups:
                return "too_new"
            self._forget(older[0])
        return self.begin(number)

    def begin(self, number: int) -> PartialStep:
        """Open a step.

        Raises:
            ValueError: Too many earlier ones are still to be closed.
        """
        if sum(step.ended for step in self._open) >= _MOST_ENDED:
            raise ValueError(
                f"step {number} begins, but {_MOST_ENDED} earlier ones wait to be closed"
            )
        step = PartialStep(number, self._offsets)
        older = [each for each in self._open if ahead(each.number, number) < 0]
        self._open.insert(len(older), step)
        return step

    def forget_before(self, step: PartialStep) -> None:
        """Forget older steps that were not ended."""
        for older in self._open[: self._open.index(step)]:
            if not older.ended:
                self._forget(older)

    def remove_first(self) -> None:
        """Remove the oldest one: it is closed."""
        del self._open[0]

    def _forget(self, step: PartialStep) -> None:
        self._counters.dropped["abandoned"] += step.num_placed
        self._open.remove(step)
