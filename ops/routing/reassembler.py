"""Shard server's side of UDP: join UDP datagrams and gRPC messages to a worker's gradients.

A shard server has one `Reassembler` for each worker's datagram session. The reassembler parses and
authenticates UDP datagrams, adds the values of each datagram to its step (one pushed gradient), and
closes steps in order. The reassembler closes a step (one pushed gradient) when all announced UDP
datagrams have arrived, or when the wait for them is over. The reassembler does not read the clock,
uses no sockets and must have one caller at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from thinwire.ops.routing.base import Manifest
from thinwire.ops.routing.counters import ReassemblyCounters
from thinwire.ops.routing.datagram_format import DatagramSession
from thinwire.ops.routing.dgt_choices import DgtChoices
from thinwire.ops.routing.parser import DatagramParser, ParsedDatagrams
from thinwire.ops.routing.partial_step import LateBlocks, LateValues, PartialStep
from thinwire.ops.routing.sequence_set import IN_TIME, LATE, SequenceSet, ahead
from thinwire.ops.types import Block, Float32

_MODULUS = 1 << 32
#: Largest number of steps (pushed gradients) whose gRPC parts are complete while UDP datagrams are
#: missing: a worker sends at most one push before the reply to its previous push.
_MOST_ENDED = 2


@dataclasses.dataclass(frozen=True)
class ReassembledStep:
    """One worker's pushed gradient, reassembled from UDP datagrams and gRPC messages."""

    step: int  # number of the step whose gradient is pushed
    # One gradient block per variable slice, ordered by slice: float32, dense or sparse, or a
    # low-rank block as it arrived.
    blocks: tuple[Block, ...]
    # [shard] float32: the gradient of all slices; None if a slice is missing or sparse
    flat: Float32 | None
    fresh: float  # fraction of the worker's gradient blocks (sent or dropped) that arrived in time
    fill: float  # `fresh` plus the fraction of gradient blocks that only late datagrams have filled
    # mean delay of the late datagrams that were added, in steps; 0: none was added
    mean_lateness: float
    num_late: int  # number of late datagrams of earlier steps whose gradient values were added
    announced: int  # number of UDP datagrams that the worker announced for this gradient
    arrived: int  # number of announced UDP datagrams that arrived in time
    # Bits of the announced UDP datagrams, 1 if the datagram arrived in time; `SealedStep.lost`
    # describes the order of the bits. None without --dgt_error_feedback.
    bitmap: bytes | None


class Reassembler:
    """Reassembles one worker's pushed gradients from UDP datagrams and gRPC messages, in order.

    A step (one pushed gradient) opens with its first UDP datagram or its first gRPC message. At
    most two steps of a worker are open (being received) at the same time. A step is closed when all
    its gRPC messages have arrived and no announced UDP datagram is missing, or when the wait is
    over. The step numbers of a worker's pushed gradients ascend, and may have gaps, because the
    reassembler forgets a step that has begun and never ended.

    Source: the diff-reception of Zhou et al., "DGT", Future Generation Computer Systems 121, 2021.
    Differences: datagrams are authenticated and count once; late datagrams count only up to an
    age; the shard can wait a bounded time for missing datagrams.

    Attributes:
        counters: Counters of received, dropped and used UDP datagrams since the start of the
            session.
    """

    def __init__(self, session: DatagramSession, sizes: Sequence[int], rules: DgtChoices) -> None:
        """Start the reassembly of one worker's pushed gradients on one shard server.

        Args:
            session: Id, key and worker of the datagram session.
            sizes: Number of entries of each variable slice of the shard server.
            rules: The router's settings for reassembling gradients from datagrams and gRPC
                messages.
        """
        self.counters = ReassemblyCounters.zero(rules.dgt_channels)
        self._rules = rules
        self._parser = DatagramParser(
            session, sizes, rules.block_entries, rules.dgt_channels, self.counters
        )
        self._sizes = sizes
        self._late: LateBlocks = {}
        self._window = StepWindow(
            [0, *np.cumsum(np.array(sizes, np.int64)).tolist()], self.counters
        )
        # newest closed step (step whose wait is over), modulo 2**32; None: no closed step
        self._closed: int | None = None
        # recently closed step (step whose wait is over) -> sequence numbers of its arrived
        # datagrams
        self._past: dict[int, SequenceSet] = {}
        self._newest: ReassembledStep | None = None
        # Mean number of gradient blocks per datagram in the last step that announced datagrams.
        self._blocks_per_datagram = 0.0

    # -- datagrams --------------------------------------------------------------------------

    def feed(self, datagrams: bytes | bytearray | memoryview, size: int, now: float) -> None:
        """Process the datagrams that one receive call returned; invalid bytes raise no exception.

        Args:
            datagrams: Buffer of consecutive datagrams, which the caller may overwrite after the
                call.
            size: Size of each datagram, in bytes; the last datagram may be shorter.
            now: Current time by the caller's clock, in seconds.
        """
        self._advance(now)
        for arrivals in self._parser.parse(memoryview(datagrams), size):
            self._place(arrivals)

    def _place(self, arrivals: ParsedDatagrams) -> None:
        if self._closed is not None and ahead(arrivals.step, self._closed) <= 0:
            first = self._window.first
            awaited = self._closed + 1 if first is None else first.number
            self._keep_late(arrivals, self._past.get(arrivals.step), ahead(awaited, arrivals.step))
            return
        step = self._window.step_for(arrivals.step)
        if isinstance(step, str):
            self.counters.dropped[step] += len(arrivals)
            return
        is_late = step.closed[arrivals.slots]
        # the step is still being received, but the wait for these datagrams' variable slices is
        # over
        if is_late.any():
            self._keep_late(arrivals.select(is_late), step.sequences, 1)
            arrivals = arrivals.select(~is_late)
        fresh = self._new(arrivals, step.sequences, IN_TIME)
        if len(fresh):
            step.place(fresh)

    def _new(self, arrivals: ParsedDatagrams, sequences: SequenceSet, mark: int) -> ParsedDatagrams:
        """Return the datagrams that arrived for the first time; count duplicates as dropped."""
        if not len(arrivals):
            return arrivals
        new, num_outside = sequences.add(arrivals.channel, arrivals.sequences, mark)
        if new.all():
            return arrivals
        self.counters.dropped["unannounced"] += num_outside
        self.counters.dropped["duplicate"] += len(new) - int(np.count_nonzero(new)) - num_outside
        return arrivals.select(new)

    # -- late datagrams ---------------------------------------------------------------------

    def _keep_late(
        self, arrivals: ParsedDatagrams, sequences: SequenceSet | None, age: int
    ) -> None:
        """Count late datagrams once, and store them until a later push closes their slices.

        With --dgt_reception=drop, late UDP datagrams are not stored. If `sequences` is None, the
        reassembler drops all late datagrams, because their step was never closed, or is forgotten.
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
            weight = self._rules.dgt_late_decay**age
            for slot, part in new.by_slot():
                late = self._late.setdefault(slot, LateValues(self._sizes[slot]))
                late.add(part, age, weight)

    # -- the reliable part ------------------------------------------------------------------

    def add_reliable(
        self, step: int, blocks: Sequence[Block], manifest: Manifest, now: float
    ) -> None:
        """Add a gRPC part of a pushed gradient, for all variable slices or for one tensor.

        The reassembler ignores a repeated gRPC part of a gradient. The reassembler forgets older
        steps whose gRPC parts are incomplete.

        Args:
            step: Full number of the training step whose gradient is pushed.
            blocks: Gradient blocks that arrived over gRPC; a variable slice may be in only one gRPC
                part of a step.
            manifest: Announcement of the UDP datagrams for the variable slices in `blocks`.
            now: Current time by the caller's clock, in seconds.

        Raises:
            ValueError: The step is closed (its wait is over), or blocks and manifest do not fit the
                shard's variables or the step's earlier gRPC parts.
        """
        self._advance(now)
        number = step % _MODULUS
        if self._closed is not None and ahead(number, self._closed) <= 0:
            raise ValueError(f"entries arrived for the closed step {step}; expected a later step")
        for announced in manifest.channels:
            if not 1 <= announced.channel <= self._rules.dgt_channels:
                raise ValueError(
                    f"DGT channel {announced.channel}: expected 1 to {self._rules.dgt_channels}"
                )
        partial = self._window.find(number) or self._window.begin(number)
        if partial.is_repeated(blocks):
            return
        partial.add_reliable(blocks, manifest, now, self._rules.dgt_wait_ms / 1000)
        partial.step = step
        self._window.forget_before(partial)
        self._advance(now)

    def end_step(self, step: int, now: float) -> None:
        """Mark a step as ended, because all gRPC parts of its gradient have been added.

        Raises:
            ValueError: No gRPC part of the step was added, or the announced sequence numbers of
                datagrams have gaps.
        """
        partial = self._window.find(step % _MODULUS)
        if partial is None or partial.step is None:
            raise ValueError(f"a worker's step {step} ends, but no reliable entries of it arrived")
        if not partial.ended:
            partial.sequences.finish()
            partial.ended = True
        self._advance(now)

    def on_refused(self, step: int) -> None:
        """Drop further datagrams of a closed step, because the shard server refused the gradient.

        The worker keeps all values of a refused gradient and sends them later, so a late datagram
        of the refused gradient would count twice.
        """
        self._past.pop(step % _MODULUS, None)

    # -- closing ----------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Return the time in seconds when `close` must be called; None if no step waits."""
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
        """Close slices of the oldest step that are complete, or whose wait is over."""
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
        """Return the next gradient that is complete or has waited long enough, or None."""
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
        """Return the newest closed step again; None if its step number is not `step`."""
        newest = self._newest
        return newest if newest is not None and newest.step == step else None

    def _assembled(self, step: PartialStep) -> ReassembledStep:
        """Return the reassembled gradient of a step whose wait is over, and count the step."""
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
        # The number of arrived gradient blocks is estimated from the number of arrived datagrams: a
        # block may need several datagrams, and a sparse datagram may have entries of several
        # blocks.
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
    """Return the quotient part / whole, limited to the range 0 to 1; 1 if `whole` is 0."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 1.0


class StepWindow:
    """A worker's open steps (pushed gradients that are not complete): at most two.

    In UDP datagrams, the numbers of training steps are modulo 2**32. A worker is at most one pushed
    gradient ahead of the shard server's replies, because it begins training step n only after the
    reply to step n - 2. If datagrams of step n + 2 arrive, and no gRPC message of the worker's step
    n has arrived, then no gRPC message of step n will arrive.
    """

    def __init__(self, offsets: Sequence[int], counters: ReassemblyCounters) -> None:
        """Start without steps; `offsets` has each variable slice's start, and the total size."""
        self._offsets, self._counters = offsets, counters
        # steps that are being received, in the order of their numbers
        self._open: list[PartialStep] = []

    @property
    def first(self) -> PartialStep | None:
        """The oldest step being received, or None; no other step may be closed."""
        return self._open[0] if self._open else None

    def find(self, number: int) -> PartialStep | None:
        """Return the step being received with the given number, or None."""
        return next((step for step in self._open if step.number == number), None)

    def step_for(self, number: int) -> PartialStep | str:
        """Return the step (pushed gradient) of received datagrams; begin the step if it is new.

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
        # gRPC messages arrive in order of steps. A newer step has received a gRPC message, so the
        # message of this step will never arrive.
        if any(step.groups for step in newer):
            return "abandoned"
        if len(self._open) > 1:
            if not older:
                return "abandoned"
            # A step with a received gRPC message will be closed later, so the window of open steps
            # cannot move past it.
            if older[0].groups:
                return "too_new"
            self._forget(older[0])
        return self.begin(number)

    def begin(self, number: int) -> PartialStep:
        """Begin to receive a step (pushed gradient) of the worker, and return the step.

        Raises:
            ValueError: Too many earlier steps of the worker are not closed yet.
        """
        if sum(step.ended for step in self._open) >= _MOST_ENDED:
            raise ValueError(
                f"a worker begins step {number}, but {_MOST_ENDED} earlier steps are still open"
            )
        step = PartialStep(number, self._offsets)
        older = [partial for partial in self._open if ahead(partial.number, number) < 0]
        self._open.insert(len(older), step)
        return step

    def forget_before(self, step: PartialStep) -> None:
        """Forget the steps before `step` of which some gRPC parts never arrived."""
        for older in self._open[: self._open.index(step)]:
            if not older.ended:
                self._forget(older)

    def remove_first(self) -> None:
        """Remove the oldest step being received, because it is closed."""
        del self._open[0]

    def _forget(self, step: PartialStep) -> None:
        self._counters.dropped["abandoned"] += step.num_placed
        self._open.remove(step)
