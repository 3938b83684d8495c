"""Fuzz targets: datagram sessions with a real core and a worker that abuses its permission."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from tests.fuzz.datagram_targets import MOST_CALLS
from tests.fuzz.target import Reader, Target
from tests.fuzz.wire_targets import mend_lengths
from tests.ps.port import LocalPort
from thinwire.ops.routing import datagram_format as form
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.core import events
from thinwire.ps.wire.push_decoder import NonFinite


class _Talk:
    """A real port and core; the program abuses the sending permission of two workers."""

    def __init__(self, source: Reader) -> None:
        self.source = source
        choices: dict[str, Any] = {"overrides": {"sync": "asp"}, "dgt_wait_ms": 50.0}
        if source.number() % 2:
            choices["dgt_marker"] = "tensor"
        self.port = LocalPort(nb_workers=2, **choices)
        self.honest, self.rogue = self.port.join(1), self.port.join(2)
        self.sent: list[tuple[bytes, int]] = []

    def run(self) -> None:
        """Run the operations that the bytes encode; the honest worker's pushes must be applied."""
        verbs = (self._take, self._take, self._mark, self._mark, self._wait, self._join, self._send)
        for _ in range(MOST_CALLS):
            if not self.source:
                break
            self.source.choice(verbs)()
            self.port.tick()
        before = len(self._replies())
        self.honest.push(self.honest.begin())
        self.port.now += 1.0
        self.port.tick()
        assert len(self._replies()) == before + 1
        assert np.isfinite(self.port.theta).all()

    def _replies(self) -> list[events.Reply]:
        return [each for each in self.port.replies if each.worker == self.honest.number]

    def _send(self) -> None:
        outgoing = self.rogue.begin(step=1 + self.source.number() % 8)
        found = self.rogue.datagrams(outgoing)
        self.sent += found
        for data, size in found[self.source.number() % 4 :]:
            self.port.receiver.receive(memoryview(data), size)

    def _take(self) -> None:
        source = self.source
        if source.number() % 4 == 0 or not self.sent:
            data = bytearray(source.piece())
            size = source.number(2)
        else:
            one, size = source.choice(self.sent)
            data = bytearray(one)
            for _ in range(source.number() % 4):
                data[source.number() % len(data)] = source.number()
            if source.number() % 2:
                size = min(size, len(data))
                form.sign(memoryview(data)[:size], size, self.rogue.welcome.datagrams.key)
        before = sum(self.port.dropped().values()) + self._num_taken()
        num_fed = -(-len(data) // size) if size else 0
        if size:
            self.port.receiver.receive(memoryview(bytes(data)), size)
            after = sum(self.port.dropped().values()) + self._num_taken()
            assert after >= before + (num_fed > 0)

    def _num_taken(self) -> int:
        return sum(sum(counters.num_datagrams) for _, counters in self.port.receiver.counters())

    def _mark(self) -> None:
        source = self.source
        outgoing = self.rogue.begin(step=1 + source.number() % 8)
        for push, payload in self.rogue.messages(outgoing):
            spoilt = source.number()
            if spoilt & 1:
                _spoil(push, source)
                payload = memoryview(push.payload or bytes(payload))
            if spoilt & 2:
                push.more = not push.more
            with contextlib.suppress(Malformed, NonFinite):
                self.port.receiver.on_push(self.rogue.number, push, payload)
            if spoilt & 4:
                break

    def _wait(self) -> None:
        self.port.now += self.source.number() / 100

    def _join(self) -> None:
        if self.source.number() % 4:
            self.port.receiver.retain_members([1])
        else:
            self.port.queue.append(events.WorkerDisconnected(2, self.rogue.incarnation))
            self.rogue = self.port.join(2, self.rogue.incarnation + 1)


def _spoil(push: pb.Push, source: Reader) -> None:
    """Change one thing about a push."""
    match source.number() % 7:
        case 0:
            push.incarnation = source.interesting() % 2**64
        case 1:
            for each in push.manifest.channels:
                each.count, each.first = source.interesting() % 2**32, source.number()
        case 2:
            push.loss = source.real()
        case 3:
            push.manifest.channels.add(channel=source.number() % 9, count=source.number())
        case 4 if push.blocks:
            block = push.blocks[source.number() % len(push.blocks)]
            block.coding, block.index_bytes = source.number() % 9, source.number()
            push.payload = source.piece()
            mend_lengths(push)
        case 5:
            push.step = source.interesting() % 2**64
        case _:
            push.epoch, push.base_version = source.number(), source.interesting() % 2**64


def reception(data: bytes) -> None:
    """Streams and datagrams of a worker that abuses its session, before a real core."""
    _Talk(Reader(data)).run()


TARGETS = {
    "reception": Target(
        "sessions, marks and datagrams before a core",
        reception,
        lambda: [bytes([0, 6, 1, 0, 2, 1, 0]), bytes(range(64))],
        longest=512,
    ),
}
