"""Hostile datagrams over real sockets, from senders that know the ports and more.

Some datagrams belong to no session. Some carry the honest worker's session number, which an
eavesdropper knows: with another tag, cut short, changed, or repeated byte for byte. Some are signed
by a worker of the run with its own key, and have impossible content.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable

import numpy as np

from tests.fuzz.hostile import Outcome, resident_bytes
from tests.fuzz.target import watched
from tests.ps.port import LocalPort, Talker
from thinwire.ops.routing import datagram_format as form
from thinwire.ops.routing.base import Transport
from thinwire.worker.core.messages import PushRequest

_HOST = "127.0.0.1"
_CHOICES = {"overrides": {"sync": "asp"}, "dgt_wait_ms": 3_600_000.0, "dgt_block_size": 8}
#: Datagrams between two exchanges of the honest worker, and among its own ones.
_A_ROUND, _AMONG = 4000, 40
#: Datagrams in one batch; wanted datagrams still fit into the sockets' buffers.
_BURST = 500
_BATCH_SECONDS = 300.0  # processor time
_PAUSE_SECONDS = 5e-4
#: Reasons found before a datagram is entered as one that fits; see `thinwire.ops.routing.parser`.
_EARLY = (
    *("short", "magic", "version", "session", "tag", "encoding", "channel", "bounds", "block"),
    *("gaps", "not_finite"),
)


class _Sender:
    """Makes up datagrams and sends them."""

    def __init__(self, ports: tuple[int, ...], seed: int, rogue: Talker) -> None:
        self._dice = random.Random(seed)
        self._ports, self._rogue = ports, rogue
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._seen: list[bytes] = []  # datagrams of the honest worker
        self._own: list[bytes] = []
        self.sent = 0
        self._kinds: list[Callable[[], bytes]] = [
            self._noise,
            self._noise,
            self._stranger,
            self._repeated,
            self._changed,
            self._cut,
            self._forged,
            self._nonsense,
            self._nonsense,
        ]

    def close(self) -> None:
        """Send no more."""
        self._socket.close()

    def watch(self, genuine: list[bytes]) -> None:
        """Listen in to the honest worker."""
        self._seen = [*self._seen[-40:], *genuine]

    def abuse(self, own: list[bytes]) -> None:
        """Have genuine datagrams of the rogue's own session to change."""
        self._own = own

    def send(self, count: int) -> None:
        """Send this many hostile datagrams."""
        for _ in range(count):
            self.put(self._dice.choice(self._kinds)(), self._dice.choice(self._ports))

    def put(self, data: bytes, port: int) -> None:
        """Send one datagram of any kind."""
        self._socket.sendto(data, (_HOST, port))
        self.sent += 1

    def _noise(self) -> bytes:
        return self._dice.randbytes(self._dice.choice((0, 1, 7, 40, 79, 80, 200, 1400)))

    def _stranger(self) -> bytes:
        header = np.zeros(1, form.HEADER)
        header["magic"], header["version"] = form.MAGIC, form.VERSION
        header["session"] = self._dice.getrandbits(64)
        return header.tobytes() + self._dice.randbytes(self._dice.randrange(60))

    def _repeated(self) -> bytes:
        return self._dice.choice(self._seen)

    def _changed(self) -> bytes:
        data = bytearray(self._repeated())
        data[self._dice.randrange(len(data))] ^= 1 << self._dice.randrange(8)
        return bytes(data)

    def _cut(self) -> bytes:
        data = self._repeated()
        return data[: self._dice.randrange(len(data))]

    def _forged(self) -> bytes:
        """A datagram of the honest worker's session, of a step to come, without its key."""
        data = bytearray(self._repeated())
        header = np.frombuffer(data, form.HEADER, 1)
        header["step"] += self._dice.randrange(1, 3)
        form.sign(memoryview(data), len(data), bytes(form.KEY_BYTES))
        return bytes(data)

    def _nonsense(self) -> bytes:
        """Datagrams that the rogue worker signs with its key: changed words, and NaN values."""
        dice = self._dice
        data = bytearray(dice.choice(self._own))
        words = np.frombuffer(data, "<u4", len(data) // 4)
        for _ in range(dice.randrange(1, 4)):
            place = dice.choice((1, *range(5, len(words) - 4)))
            words[place] = dice.choice((0, 1, 28, 0x7FC00000, 2**32 - 1, dice.getrandbits(32)))
        form.sign(memoryview(data), len(data), self._rogue.welcome.datagrams.key)
        return bytes(data)


class _Flooded:
    """A port with real sockets, its honest worker, and hostile senders."""

    def __init__(self, seed: int, filtered: bool) -> None:
        self.port = LocalPort(nb_workers=2, **_CHOICES)
        self.port.port.open(Transport(), _HOST)
        self._receiver = self.port.port._udp
        assert self._receiver is not None
        if not filtered:
            self._receiver.admit = lambda start, offset, numbers: False  # type: ignore[method-assign]
        self.honest, self.rogue = self.port.join(1), self.port.join(2)
        self.sender = _Sender(self.port.port.ports, seed, self.rogue)
        self.genuine = 0
        self.sender.abuse(_split(self.rogue, self.rogue.begin(_gradient(0))))
        self.exchange(0)

    @property
    def num_hostile(self) -> int:
        """Number of datagrams sent, without the honest worker's datagrams."""
        return self.sender.sent - self.genuine

    def close(self) -> None:
        """Close all sockets."""
        self.sender.close()
        self.port.port.close()

    def flood(self, count: int) -> None:
        """Send hostile datagrams, and wait until each is received or dropped."""
        before = self.port.theta.tobytes(), self.port.core.version
        for start in range(0, count, _BURST):
            self.sender.send(min(_BURST, count - start))
            self.drain()
        assert (self.port.theta.tobytes(), self.port.core.version) == before

    def drain(self) -> None:
        """Wait until the receiving thread has had everything."""
        while sum(self.arrived()) < self.sender.sent:
            assert self._receiver is not None and self._receiver.failure is None
            time.sleep(_PAUSE_SECONDS)
        self.port.tick()

    def arrived(self) -> tuple[int, int]:
        """Return how many datagrams were received, and how many the kernel has dropped."""
        assert self._receiver is not None
        counts = self._receiver.counts()
        return sum(c.datagrams for c in counts), sum(c.kernel_drops or 0 for c in counts)

    def exchange(self, number: int) -> None:
        """Let the honest worker push, its datagrams among hostile ones that repeat them."""
        version = self.port.core.version
        outgoing = self.honest.begin(_gradient(number))
        genuine = _split(self.honest, outgoing)
        self.sender.watch(genuine)
        ports = self.port.port.ports
        for data in genuine:
            self.sender.put(data, ports[data[6] - 1])
            self.sender.send(_AMONG // len(genuine))
            self.drain()
        self.genuine += len(genuine)
        self.honest.mark(outgoing)
        self.port.tick()
        assert self.port.core.version == version + 1, "the honest push did not come through"

    def settled(self) -> Outcome:
        """Return the outcome once the last datagram is counted, which has arrived before."""
        until = time.monotonic() + _BATCH_SECONDS
        outcome = self.outcome()
        while outcome.num_counted < outcome.sent and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)
            self.port.tick()
            outcome = self.outcome()
        return outcome

    def outcome(self) -> Outcome:
        """Return what became of everything, the honest worker's own datagrams left out."""
        outcome = Outcome(self.num_hostile)
        received, kept_out = self.arrived()
        known = self.port.port.counts()
        outcome.refused.update(known.dropped)
        counters = known.total()
        outcome.refused.update({why: counters.dropped.get(why, 0) for why in _EARLY})
        late = {why: count for why, count in counters.dropped.items() if why not in _EARLY}
        outcome.refused.update(late)
        # The rest fits: the honest worker's own, and the rogue's for pushes that it never makes.
        outcome.taken["for pushes never made"] = (
            sum(counters.num_datagrams) - sum(late.values()) - self.genuine
        )
        outcome.refused += type(outcome.refused)()  # without zeros
        assert received == outcome.sent + self.genuine - kept_out
        return outcome


def _gradient(number: int) -> np.ndarray:
    return np.random.default_rng(number).normal(size=28).astype(np.float32)


def _split(worker: Talker, outgoing: PushRequest) -> list[bytes]:
    """Return the genuine datagrams of an exchange, one by one."""
    return [
        data[start : start + size]
        for data, size in worker.datagrams(outgoing)
        for start in range(0, len(data), size)
    ]


def flood(num_datagrams: int, seed: int, filtered: bool) -> Outcome:
    """Send this many hostile datagrams, mixed with exchanges of an honest worker.

    Args:
        num_datagrams: At least.
        seed: Seed of the hostile datagrams.
        filtered: True if the kernel's filter drops datagrams that belong to no session.

    Raises:
        AssertionError: The model differs from the model of an honest worker alone, or a datagram is
            not counted.
    """
    flooded, rounds = _Flooded(seed, filtered), 0
    try:
        flooded.flood(min(_A_ROUND, num_datagrams // 4))  # first allocations
        started, before = time.monotonic(), resident_bytes()
        while (left := num_datagrams - flooded.num_hostile) > 0:
            with watched(_BATCH_SECONDS):
                flooded.flood(min(_A_ROUND, left))
                rounds += 1
                flooded.exchange(rounds)
        outcome = flooded.settled()
        outcome.rounds, outcome.seconds = rounds, time.monotonic() - started
        outcome.growth = resident_bytes() - before
        theta = flooded.port.theta.tobytes()
    finally:
        flooded.close()
    assert theta == _alone(rounds), "the model is not the honest worker's alone"
    outcome.check()
    return outcome


def _alone(rounds: int) -> bytes:
    """Return the weights after the honest worker's exchanges without hostile senders."""
    port = LocalPort(nb_workers=2, **_CHOICES)
    honest = port.join(1)
    for number in range(rounds + 1):
        honest.push(honest.begin(_gradient(number)))
        port.tick()
    return port.theta.tobytes()
