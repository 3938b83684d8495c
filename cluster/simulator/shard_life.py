"""A simulated shard's lives: the process dies, stands still, comes back from what is on disk."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from absl import logging

from cluster.simulator.clock import Clock
from cluster.simulator.connection import Connection
from cluster.simulator.kept import KeptShard, Killed
from cluster.simulator.pipes import Pipe
from ops import wire
from ops.types import ConfigurationError, State
from ps import events
from ps.core import PsCore
from ps.journaled import STOP_REASON, JournaledCore

_SEEK_SECONDS = 1.0  # between two attempts of a following shard to reach shard 0


@dataclasses.dataclass
class Port:
    """A shard's end of the streams to one worker."""

    ear: Callable[[int, Any], Callable[[], None]]  # (stream, message) -> what delivers it
    down: Pipe
    chunk_bytes: int
    connection: Connection
    chooser: wire.IndexChooser = dataclasses.field(default_factory=wire.IndexChooser)
    stream: int | None = None  # the one that the worker was welcomed on, while it stands
    incarnation: int = 0  # of the worker that was
    hellos: dict[int, int] = dataclasses.field(default_factory=dict)  # incarnation -> its stream


class ShardLife:
    """The process of a shard, and its streams, of which death is one end.

    Attributes:
        core: The state machine, the same as in a real run.
        journaled: Stands before it.
        ports: Worker -> its stream.
        followers: On shard 0, the other shards: they hear of each epoch at once.
        leader: Shard 0, on the others.
        kept: What it keeps on disk; None: nothing, and it never dies.
        life: Grows with every life.
        alive: Whether the process runs.
        is_open: Whether it lets anybody in.
        skew: What the shard's own clock is ahead of the virtual one, in seconds.
    """

    def __init__(self, number: int, core: PsCore, clock: Clock) -> None:
        """Live from the start, with this core."""
        self.number, self.core, self.clock = number, core, clock
        self.journaled = JournaledCore(core)
        self.journaled.on_failure = self.ask_for_end
        self.ports: dict[int, Port] = {}
        self.followers: list[Any] = []
        self.leader: Any = None
        self.kept: KeptShard | None = None
        self.life, self.alive, self.is_open, self.skew = 0, True, True, 0.0
        self._asleep_until = 0.0
        self._tick_at: float | None = None
        self._epoch: events.Epoch | None = None  # newest, which followers are told

    def handle(self, event: events.Event) -> None:
        """Let the core handle an event now; do what it says."""
        raise NotImplementedError

    def ask_for_end(self) -> None:
        """Ask shard 0 to end the run, as a following shard does whose journal has failed."""
        if self.leader is None or not self.alive:
            return
        if self.leader.alive:
            self.clock.at(self.clock.now, lambda: self.leader.arrive(events.Stop(STOP_REASON)))
        else:
            self.clock.at(self.clock.now + _SEEK_SECONDS, self.ask_for_end)

    @property
    def now(self) -> float:
        """What this shard's own clock says."""
        return self.clock.now + self.skew

    @property
    def listens(self) -> bool:
        """Whether a stream can be opened to it."""
        return self.alive and self.is_open and self.clock.now >= self._asleep_until

    def if_it_lives(self, life: int, call: Callable[[], None]) -> None:
        """Call something if the shard still is in this life."""
        if self.alive and life == self.life:
            try:
                call()
            except Killed:
                self.kill()

    def kill(self) -> None:
        """Die as by kill -9: only what is on disk is left, and every stream breaks."""
        if not self.alive:
            return
        self.alive = self.is_open = False
        self._epoch = None
        self.journaled.close()  # the system closes the file
        for port in self.ports.values():
            port.stream = None
            port.hellos.clear()
            port.connection.snap()

    def start(self) -> bool:
        """Begin another life from what is on disk; return False if the run is finished.

        Raises:
            ValueError: It lives, or keeps nothing.
        """
        if self.alive or self.kept is None:
            raise ValueError(f"shard {self.number} lives, or keeps nothing to begin from")
        self.life += 1
        self.alive, self._asleep_until = True, 0.0
        if not self.kept.begin(self):
            self.alive = False
            return False
        self._seek_leader()
        return True

    def _seek_leader(self) -> None:
        """Let workers in once shard 0 is there."""
        if self.leader is not None and not self.leader.listens:
            again = functools.partial(self.if_it_lives, self.life, self._seek_leader)
            self.clock.at(self.clock.now + _SEEK_SECONDS, again)
            return
        self.is_open = True
        try:
            self._save_at_once()  # the new generation must survive a crash
        except ConfigurationError as error:
            logging.error("shard %d cannot begin: %s", self.number, error)
            self.kill()
            return
        except Killed:
            self.kill()
            return
        if self.leader is not None and self.leader._epoch is not None:
            self.follow(self.leader._epoch)
        for shard in self.followers:  # they find shard 0 again
            shard.follow(self._epoch)

    def follow(self, epoch: events.Epoch | None) -> None:
        """Hear of an epoch from shard 0."""
        if epoch is not None and not self._waits(functools.partial(self.follow, epoch)):
            self.handle(epoch)

    def freeze(self, seconds: float) -> None:
        """Stand still for so long, as a stopped process does; what comes meanwhile waits."""
        until = self.clock.now + seconds
        self._asleep_until = until
        wake = functools.partial(self.handle, events.Stalled(seconds))
        self.clock.at(until, functools.partial(self.if_it_lives, self.life, wake))
        for port in self.ports.values():
            port.connection.expect_progress(until)

    def jump(self, seconds: float) -> None:
        """Find that so much time has passed unseen by the shard's own clock."""
        self.skew += seconds
        self._tick_at = None
        self.handle(events.Stalled(seconds))

    def finish(self) -> None:
        """Leave a last snapshot behind, if the disk takes it, and end."""
        if not self.alive:
            return
        self.journaled.close()
        try:
            self._save_at_once()
        except ConfigurationError as error:
            logging.error("what the run ended with cannot be saved: %s", error)
        except Killed:
            pass
        self.alive = self.is_open = False

    def _save_at_once(self) -> None:
        """Have a snapshot on disk when this returns.

        Raises:
            ConfigurationError: The disk refuses.
            Killed: It was the last thing to happen.
        """
        self.save(self.core.version, self.core.snapshot())
        if self.kept is not None and self.kept.saved is not None:
            self.kept.saved.flush()

    def _waits(self, again: Callable[[], None]) -> bool:
        """Return whether nothing is taken in now; `again` is called when the shard wakes up."""
        if self.alive and self.clock.now < self._asleep_until:
            self.clock.at(self._asleep_until, functools.partial(self.if_it_lives, self.life, again))
            return True
        return not self.alive

    def save(self, version: int, state: State) -> None:
        """Have a snapshot written, if this shard keeps any."""
        if self.kept is not None:
            self.kept.save(self, version, state)
