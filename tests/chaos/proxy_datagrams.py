"""A UDP proxy on loopback that drops, duplicates, reorders and garbles datagrams."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import socket
from typing import Any

from tests.chaos.proxy import Switchboard


@dataclasses.dataclass
class Weather:
    """Probabilities, of each datagram."""

    drops: float = 0.0
    doubles: float = 0.0
    overtaken: float = 0.0
    garbles: float = 0.0


class DatagramProxy(asyncio.DatagramProtocol):
    """Passes datagrams on, one way: shards answer none. May be made in the board's own thread.

    Args:
        board: Where it runs.
        listen: (host, port) that workers send to.
        target: (host, port) of the shard.
        weather: What becomes of them; may be changed at any time.
        seed: Seed of the random choices.
    """

    def __init__(
        self,
        board: Switchboard,
        listen: tuple[str, int],
        target: tuple[str, int],
        weather: Weather,
        seed: int = 0,
    ) -> None:
        self._board, self._target, self.weather = board, target, weather
        self._dice = random.Random(seed)
        self._held: bytes | None = None
        self._transport: Any = None
        self.num_passed = 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(listen)  # from this line on no datagram is rejected
        board.soon(lambda: asyncio.ensure_future(self._open()))

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, sock=self._socket)

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Pass one on, or do not."""
        del addr
        dice, weather = self._dice, self.weather
        if dice.random() < weather.drops:
            return
        if dice.random() < weather.garbles:
            spoilt = bytearray(data)
            spoilt[dice.randrange(len(spoilt))] ^= 1 << dice.randrange(8)
            data = bytes(spoilt)
        if self._held is None and dice.random() < weather.overtaken:
            self._held = data
            return
        for _ in range(1 + (dice.random() < weather.doubles)):
            self._send(data)
        if self._held is not None:
            held, self._held = self._held, None
            self._send(held)

    def _send(self, data: bytes) -> None:
        self.num_passed += 1
        self._transport.sendto(data, self._target)

    def close(self) -> None:
        """Listen no more."""
        self._board.soon(self._transport.close)
