"""A million invalid messages and a million hostile datagrams against a real shard.

``python -m tests.fuzz.hostile --messages 1000000 --datagrams 1000000``

Messages go through the real reader, server and core, datagrams through real sockets, the kernel's
filter and the real receivers; an honest worker trains at the same time. The worker's model must be
bit for bit the model of a run without hostile clients; every message and datagram is counted,
either by its rejection reason or by its kind; memory does not grow. Exit code 1: one of these
conditions does not hold.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Iterator

from absl import logging

from tests.fuzz.target import parsed, watched
from tests.fuzz.world import METHODS, World
from tests.ps.hostile_client import Liar
from tests.ps.streams import Stream
from thinwire.proto import thinwire_pb2 as pb

#: How much a process may grow during an attack, in bytes.
MOST_GROWTH = 64 << 20
#: Frames between two exchanges of the honest worker.
FRAMES_A_ROUND = 2000
_BATCH_SECONDS = 300.0  # processor time; independent of other load


@dataclasses.dataclass
class Outcome:
    """Counts of the sent messages or datagrams by outcome.

    Attributes:
        sent: Messages or datagrams.
        refused: Number of rejected messages by reason.
        taken: Number of accepted messages by kind: harmless, or incomplete.
        rounds: Exchanges of the honest worker meanwhile.
        seconds: By the wall clock.
        growth: Bytes that the process has grown by.
    """

    sent: int = 0
    refused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    taken: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    rounds: int = 0
    seconds: float = 0.0
    growth: int = 0

    @property
    def num_counted(self) -> int:
        """Number of rejected or accepted messages."""
        return self.refused.total() + self.taken.total()

    def check(self) -> None:
        """Raise AssertionError unless everything is counted once, and memory has not grown."""
        assert self.num_counted == self.sent, f"{self.sent} sent, {self.num_counted} counted"
        assert self.growth < MOST_GROWTH, f"the process has grown by {self.growth} bytes"

    def told(self, what: str) -> str:
        """Return the counts as text."""
        rate = self.sent / max(self.seconds, 1e-9)
        lines = [
            f"{what}: {self.sent} in {self.seconds:.1f} s ({rate:.0f} a second), "
            f"{self.rounds} honest exchanges between, grown by {self.growth / 2**20:.1f} MiB"
        ]
        for name, counts in (("refused", self.refused), ("taken", self.taken)):
            each = ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
            lines.append(f"  {name} {counts.total()}: {each}")
        return "\n".join(lines) + "\n"


def resident_bytes() -> int:
    """Return how much memory the process holds; where that cannot be known, its peak."""
    statm = pathlib.Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class _Audited(Stream):
    """A stream of invalid frames that records, for each frame, how the shard handled the frame."""

    def __init__(self, world: World, frames: Iterator[bytes], outcome: Outcome) -> None:
        super().__init__(world.server)
        self._world, self._lies, self._outcome = world, frames, outcome
        self._before, self._num_before = world.refused(), world.num_refused()
        self._frame, self._counted = b"", 0

    def incoming(self) -> Iterator[bytes]:
        """Yield frames until the shard wants no more."""
        for lie in self._lies:
            if self.closed:
                return
            self.num_read, self._frame = self.num_read + 1, lie
            yield lie
            self.server.run_until(self.server.queue.empty)
            self._note()
            del self.received[:]

    def audit(self) -> None:
        """Read to the end, and record which frame ended the stream."""
        self.read()
        if self._counted < self.num_read:
            self._note()
        assert self._counted == self.num_read

    def _note(self) -> None:
        """Enter the newest frame into the outcome: by the one reason for it, or by its kind."""
        self._counted += 1
        self._outcome.sent += 1
        total = self._world.num_refused()
        if total > self._num_before:
            assert total == self._num_before + 1, f"one frame counted {total - self._num_before}x"
            after = self._world.refused()
            self._outcome.refused.update(after - self._before)
            self._num_before, self._before = total, after
            return
        self._outcome.taken[_kind_of(self._frame)] += 1


def _kind_of(data: bytes) -> str:
    message = pb.ToServer()
    body = message.WhichOneof("body") if parsed(message, data) else None
    if body == "push" and message.push.payload_bytes and not message.push.payload:
        return "push, its payload to come"
    return str(body)


class _AuditedLiar(Liar):
    """A hostile client; the outcome of every frame is recorded."""

    def __init__(self, world: World, seed: int, outcome: Outcome) -> None:
        super().__init__(world.shard, seed)
        self._world, self._outcome = world, outcome

    def streams(self, num_messages: int) -> None:
        """Send at least this many frames over many streams; the model must not change."""
        goal, before = self.sent + num_messages, self._world.picture()
        while self.sent < goal:
            kind = self.dice.choices(("worker", "stranger", "supervisor"), (8, 1, 1))[0]
            stream = _Audited(self._world, getattr(self, f"_{kind}")(), self._outcome)
            stream.audit()
            self.sent += stream.num_read
            assert self._world.picture() == before


def lie(name: str, num_messages: int, seed: int) -> Outcome:
    """Send this many invalid messages to a shard, mixed with exchanges of an honest worker.

    Raises:
        AssertionError: The model differs from the model of the honest worker alone, or a message is
            counted twice or never.
    """
    outcome = Outcome()
    lied_to, alone = (_real_time(name) for _ in range(2))
    liar = _AuditedLiar(lied_to, seed, outcome)
    liar.streams(min(FRAMES_A_ROUND, num_messages // 4))  # first allocations
    started, before = time.monotonic(), resident_bytes()
    while outcome.sent < num_messages:
        with watched(_BATCH_SECONDS):
            liar.streams(min(FRAMES_A_ROUND, num_messages - outcome.sent))
            lied_to.shard.board.document()
        lied_to.honest.exchange()
        outcome.rounds += 1
    outcome.seconds, outcome.growth = time.monotonic() - started, resident_bytes() - before
    for _ in range(outcome.rounds):
        alone.honest.exchange()
    assert lied_to.picture() == alone.picture(), "the model is not the honest worker's alone"
    outcome.check()
    return outcome


def _real_time(name: str) -> World:
    made = World(name, time)
    made.server.lease_seconds = made.core.membership.lease_seconds = 1e9
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.hostile", description=__doc__)
    add = parser.add_argument
    add("--messages", type=int, default=1_000_000, help="over the methods together")
    add("--datagrams", type=int, default=1_000_000, help="half of them past the kernel's filter")
    add("--method", action="append", choices=list(METHODS), help="may be repeated; default: all")
    add("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    logging.set_verbosity(logging.FATAL)
    from tests.fuzz import hostile_datagrams

    chosen = given.method or list(METHODS)
    share, parts = -(-given.messages // len(chosen)), {}
    runs: dict[str, Callable[[], Outcome]] = {}
    for number, name in enumerate(chosen):
        runs[f"messages, {name}"] = lambda name=name, number=number: lie(  # type: ignore[misc]
            name, share, given.seed + number
        )
    for filtered in (True, False):
        how = "with" if filtered else "without"
        runs[f"datagrams, {how} the kernel's filter"] = lambda filtered=filtered: (  # type: ignore[misc]
            hostile_datagrams.flood(given.datagrams // 2, given.seed, filtered)
        )
    for what, run in runs.items():
        if "messages" in what and not given.messages:
            continue
        if "datagrams" in what and not given.datagrams:
            continue
        parts[what] = run()
        sys.stdout.write(parts[what].told(what))
        sys.stdout.flush()
    total = sum(each.sent for each in parts.values())
    sys.stdout.write(f"{total} in all; every one is counted, and the models are untouched\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
