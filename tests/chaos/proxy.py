"""A TCP proxy on loopback that can cut, stall, delay, garble or reset a connection.

A client dials the proxy's address instead of the shard's address. All proxies
share one event loop in one thread; every public function may be called from any other thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any

#: The two directions of a wire.
UP, DOWN = "up", "down"
_READ_BYTES = 1 << 16

#: Receives the bytes of one connection in one direction, in order of arrival; one listener for each
#: connection and direction. It returns False to drop all later bytes of the direction.
Listener = Callable[[bytes], bool]


class Switchboard:
    """The thread in which all proxies of a test run."""

    def __init__(self) -> None:
        """Start the thread."""
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="proxies", daemon=True)
        self._thread.start()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the thread, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def soon(self, what: Callable[..., object], *arguments: object) -> None:
        """Call this in the thread."""
        self.loop.call_soon_threadsafe(what, *arguments)

    def later(self, seconds: float, what: Callable[..., object]) -> None:
        """Call a function in the thread after this many seconds."""
        self.soon(lambda: self.loop.call_later(seconds, what))

    def close(self) -> None:
        """End the thread; pending work is dropped."""
        self.do(self._cancel_all())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    async def _cancel_all(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@dataclasses.dataclass
class Way:
    """The present treatment of one direction."""

    open: asyncio.Event
    vanishes: bool = False
    delay_seconds: float = 0.0
    garbles: float = 0.0  # probability, of each piece that passes


class Proxy:
    """Forwards the bytes between one client and one shard.

    Args:
        board: Where it runs.
        listen: (host, port) that the client dials.
        target: (host, port) of the shard.
        seed: Seed of the garbled bytes.
        listener: Makes the listeners of a connection, given the direction.
    """

    def __init__(
        self,
        board: Switchboard,
        listen: tuple[str, int],
        target: tuple[str, int],
        seed: int = 0,
        listener: Callable[[str], Listener] | None = None,
    ) -> None:
        self._board, self._listen, self._target = board, listen, target
        self._dice = random.Random(seed)
        self._listener = listener
        self._writers: set[asyncio.StreamWriter] = set()
        self._beyond: set[asyncio.StreamWriter] = set()  # of them, to the shard
        self._server: asyncio.Server | None = None
        self._beside: dict[int, asyncio.Future[asyncio.Server]] = {}  # by port
        self.ways: dict[str, Way] = {}
        self.num_connections = 0
        self.num_garbled = 0
        board.do(self._start())

    @property
    def reaches_target(self) -> bool:
        """True if a connection to the shard exists."""
        return bool(self._beyond)

    def cut(self, seconds: float) -> None:
        """Reset every connection; reject new connections for a while."""
        self._board.do(self._hang_up())
        self._board.later(seconds, lambda: asyncio.ensure_future(self._serve()))

    def reset(self) -> None:
        """Reset every connection; the client may dial again at once."""
        self._board.soon(self._reset)

    def stall(self, seconds: float, way: str) -> None:
        """Hold the bytes of one direction for a while; forward the bytes afterwards."""
        self._board.soon(self.ways[way].open.clear)
        self._board.later(seconds, self.ways[way].open.set)

    def vanish(self, seconds: float, *ways: str) -> None:
        """Drop the bytes of one or both directions for a while, silently; then reset."""
        for name in ways or self.ways:
            self.ways[name].vanishes = True
        self._board.later(seconds, self._reappear)

    def delay(self, seconds: float, lag_seconds: float) -> None:
        """Delay all bytes by this time for a while; the order stays the same."""
        for way in self.ways.values():
            way.delay_seconds = lag_seconds
        self._board.later(seconds, self._hurry)

    def garble(self, seconds: float, probability: float, way: str) -> None:
        """Change a byte in some of the forwarded pieces for a while."""
        self.ways[way].garbles = probability
        self._board.later(seconds, lambda: setattr(self.ways[way], "garbles", 0.0))

    def open_beside(self, port: int, listener: Callable[[str], Listener]) -> None:
        """Pass another port of the shard on, with the same mishaps (in the board's thread).

        Args:
            port: The client dials it where it dials this proxy.
            listener: Makes the listeners of a connection.
        """
        if port in self._beside:
            return
        here, there = self._listen[0], self._target[0]
        listening = socket.create_server((here, port))  # from here on no connection is rejected
        connected = functools.partial(self._connected, (there, port), listener)
        self._beside[port] = asyncio.ensure_future(asyncio.start_server(connected, sock=listening))

    def close(self) -> None:
        """Reset every connection and listen no more."""
        self._board.do(self._hang_up())
        self._board.do(self._close_beside())

    # -- in the thread --------------------------------------------------------------------------

    async def _start(self) -> None:
        self.ways = {way: Way(asyncio.Event()) for way in (UP, DOWN)}
        for way in self.ways.values():
            way.open.set()
        await self._serve()

    async def _serve(self) -> None:
        if self._server is None:
            host, port = self._listen
            connected = functools.partial(self._connected, self._target, self._listener)
            self._server = await asyncio.start_server(connected, host, port)

    async def _hang_up(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        self._reset()

    def _reset(self) -> None:
        for writer in tuple(self._writers):
            _reset(writer)

    def _reappear(self) -> None:
        for way in self.ways.values():
            way.vanishes = False
        self._reset()

    def _hurry(self) -> None:
        for way in self.ways.values():
            way.delay_seconds = 0.0

    async def _close_beside(self) -> None:
        for server in self._beside.values():
            (await server).close()
        self._beside.clear()

    async def _connected(
        self,
        target: tuple[str, int],
        listener: Callable[[str], Listener] | None,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        beyond: asyncio.StreamWriter | None = None
        try:
            answers, beyond = await asyncio.open_connection(*target)
            self._writers.add(beyond)
            self._beyond.add(beyond)
            await asyncio.gather(
                self._pass_on(reader, beyond, UP, listener),
                self._pass_on(answers, writer, DOWN, listener),
            )
        except OSError:
            pass  # the other side is notified below
        finally:
            for each in (writer, beyond):
                if each is not None:
                    self._writers.discard(each)
                    self._beyond.discard(each)
                    _reset(each)

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        name: str,
        listeners: Callable[[str], Listener] | None,
    ) -> None:
        way = self.ways[name]
        listener = listeners(name) if listeners is not None else None
        gone = False
        while data := await reader.read(_READ_BYTES):
            if listener is not None and not gone:
                gone = not listener(data)
            await way.open.wait()
            if way.delay_seconds:
                await asyncio.sleep(way.delay_seconds)
            if gone or way.vanishes:
                continue
            if way.garbles and self._dice.random() < way.garbles:
                data = self._garbled(data)
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    def _garbled(self, data: bytes) -> bytes:
        self.num_garbled += 1
        spoilt = bytearray(data)
        spoilt[self._dice.randrange(len(spoilt))] ^= 1 << self._dice.randrange(8)
        return bytes(spoilt)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Let the other side see a reset, and not an orderly end."""
    with contextlib.suppress(OSError, AttributeError):
        wire: socket.socket = writer.get_extra_info("socket")
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
