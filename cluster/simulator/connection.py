"""One worker's streams to one shard on the virtual clock: opened, broken, opened again.

A stream is TCP underneath: what is sent on it arrives in order, or not at all because the stream
has broken. Nothing overtakes anything inside one stream. What was held up on an old stream may come
after a new one was opened; a shard reads the newest that it has welcomed and no other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cluster.simulator.clock import Clock
from cluster.simulator.pipes import ClassPipe, Pipe, carry

if TYPE_CHECKING:
    import numpy as np

    from cluster.simulator.messages import Arrival
    from cluster.simulator.shard import SimulatedShard

#: As a real worker's (worker.shard_client).
_FIRST_BACKOFF_SECONDS = 0.2
_LAST_BACKOFF_SECONDS = 5.0
_LEAST_PROGRESS_SECONDS = 10.0


class Connection:
    """The newest stream, what both ends know of it, and dialling until there is one.

    Attributes:
        number: Of the newest stream; no two have the same.
        stands: Whether it stands, as far as the worker knows.
        cut_until: Till then no stream can be opened, in virtual seconds.
        held_until: Till then nothing arrives, up and down.

    Args:
        worker: Whose.
        shard: Where to.
        up: The worker's way up.
        clock: Virtual time.
        delay_seconds: After which one end sees what happened at the other.
        rng: Of the pauses between attempts.
    """

    def __init__(
        self,
        worker: int,
        shard: SimulatedShard,
        up: Pipe | ClassPipe,
        clock: Clock,
        delay_seconds: float,
        rng: np.random.Generator,
    ) -> None:
        self.worker, self.shard, self._clock = worker, shard, clock
        self._hops = (up, shard.up) if shard.has_own_link else (up,)
        self._delay_seconds, self._rng = delay_seconds, rng
        self.number, self.stands, self.dials = 0, False, False
        self._broken_to = 0  # streams up to this number are no more
        self.cut_until = 0.0
        self.held_until = [0.0, 0.0]
        self.on_lost: Callable[[int], None] = lambda shard: None

    @property
    def carries(self) -> bool:
        """Whether what is sent now arrives at once, delay aside."""
        whole = self.stands and self.number > self._broken_to
        return whole and self._clock.now >= self.held_until[0]

    # -- opening ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Belong to another life of the worker: nothing is open."""
        self.stands = self.dials = False
        self._broken_to = self.number

    def dial(
        self, hello: Callable[[], None], give_up: Callable[[], None], patience_seconds: float
    ) -> None:
        """Open a stream, trying again until it stands.

        Args:
            hello: Introduces the worker on a stream that has just been opened.
            give_up: Called instead when the patience is over.
            patience_seconds: How long to try.
        """
        self.dials = True
        life, backoff = self._broken_to, _FIRST_BACKOFF_SECONDS
        deadline = self._clock.now + patience_seconds

        def attempt() -> None:
            nonlocal backoff
            if not self.dials or life != self._broken_to:
                return
            if self.shard.listens and self._clock.now >= self.cut_until:
                self.dials = False
                self.open()
                hello()
            elif self._clock.now + backoff >= deadline:
                self.dials = False
                give_up()
            else:
                pause = backoff * self._rng.uniform(0.5, 1.0)
                backoff = min(2 * backoff, _LAST_BACKOFF_SECONDS)
                self._clock.at(self._clock.now + pause, attempt)

        attempt()

    def open(self) -> None:
        """Open another stream at once."""
        self.number += 1
        self.stands = True

    # -- breaking ---------------------------------------------------------------------------

    def snap(self) -> None:
        """Break: what is on its way is lost, and both ends see it a little later."""
        number = self.number
        self._broken_to = number
        later = self._clock.now + self._delay_seconds
        self._clock.at(later, functools.partial(self.lose, number))
        self._clock.at(later, functools.partial(self.shard.lose, self.worker, number))

    def fall_silent(self) -> None:
        """Break without a word: the shard never sees it, the worker when nothing has come long."""
        self._broken_to = self.number
        self.expect_progress()

    def hold(self, up: bool, seconds: float) -> None:
        """Hold up what is sent in one direction; the worker may give the stream up meanwhile."""
        direction = 0 if up else 1
        until = self._clock.now + seconds
        self.held_until[direction] = max(self.held_until[direction], until)
        if not up:
            self.expect_progress(until)

    def expect_progress(self, until: float | None = None) -> None:
        """Have the worker give the stream up when it has heard nothing for too long.

        Args:
            until: When there will be something to hear again; None: never.
        """
        seconds = max(_LEAST_PROGRESS_SECONDS, 3 * self.shard.lease_seconds)
        when = self._clock.now + seconds
        if until is None or when < until:
            self._clock.at(when, functools.partial(self.lose, self.number))

    def lose(self, number: int) -> None:
        """Let the worker find that a stream is gone."""
        if number == self.number and self.stands:
            self.stands = False
            self.on_lost(self.shard.number)

    # -- what is said -----------------------------------------------------------------------

    def send(self, event: Arrival, sizes: Sequence[int], counted: bool) -> None:
        """Send something to the shard, if the stream stands."""
        if self.stands:
            deliver = functools.partial(self._deliver, self.number, event)
            carry(self._clock, self._hops, list(sizes), counted, deliver)

    def _deliver(self, number: int, event: Arrival) -> None:
        if self._waits(0, functools.partial(self._deliver, number, event)):
            return
        if number > self._broken_to:
            self.shard.receive(self.worker, number, event)

    def hears(self, number: int, again: Callable[[], None]) -> bool:
        """Return whether something sent on a stream is heard now; `again` is called if later."""
        if self._waits(1, again):
            return False
        return number == self.number > self._broken_to and self.stands

    def _waits(self, direction: int, again: Callable[[], Any]) -> bool:
        until = self.held_until[direction]
        if self._clock.now >= until:
            return False
        self._clock.at(until, again)
        return True
