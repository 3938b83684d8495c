"""Fuzz targets: an input encodes the messages of several clients to a shard and their order."""

from __future__ import annotations

import random
from typing import Any

from absl import logging

from tests.fuzz import mutators
from tests.fuzz.target import Reader, Target, parsed
from tests.fuzz.world import LEASE_SECONDS, METHODS, Client, World, world
from tests.ps.streams import HONEST, frame, push_frame
from thinwire.proto import thinwire_pb2 as pb

_MOST_CLIENTS, _MOST_VERBS = 4, 80
_LIVES = (0, 5, 6, 2**64 - 1)
_NAMES = tuple(sorted(METHODS))
_DOCUMENTS = ('{"id": 2, "bytes_up": 7}', "[" * 3000, "NaN", '{"rows": [[1]], "columns": ["x"]}')
_HALTS = ("", "why not", "iter_max\n")


class Abuse:
    """Operations of clients on a shard, one per step; used by programs and by hypothesis.

    Args:
        world: The shard.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.clients: list[Client] = [world.connect()]
        self.held = False  # the writer thread does not get its turn
        self.said: list[bytes] = []

    def connect(self) -> None:
        """Open another stream; the oldest one breaks when there are too many."""
        if len(self.clients) == _MOST_CLIENTS:
            self.clients.pop(0).break_off()
        self.clients.append(self.world.connect())

    def say(self, who: int, data: bytes) -> None:
        """Send a frame as a client."""
        self.said = [*self.said[-7:], data]
        self.clients[who % len(self.clients)].say(data)
        if not self.held:
            self.world.turn()

    def hello(self, who: int, **fields: Any) -> None:
        """Send a Hello; only the given fields differ from a valid Hello."""
        self.say(who, frame(hello=self.world.shard.hello(**fields)))

    def push(self, who: int, life: int | None, **fields: Any) -> None:
        """Push; of the rogue's present life unless another is given."""
        fields.setdefault("kind", self.world.shard.kind)
        fields.setdefault("epoch", self.world.core.membership.epoch)
        fields.setdefault("base_version", self.world.core.version)
        life = self.world.life if life is None else life
        self.say(who, push_frame(incarnation=life, **fields))

    def chunked(self, who: int, announced: int, pieces: list[bytes]) -> None:
        """Announce a payload, and send pieces of any size."""
        push = pb.Push(incarnation=self.world.life, step=1, payload_bytes=announced)
        self.say(who, frame(push=push))
        for piece in pieces:
            self.say(who, frame(chunk=pb.Chunk(data=piece)))

    def spoilt(self, who: int, dice: random.Random) -> None:
        """Repeat an earlier message with some fields changed."""
        message = pb.ToServer()
        if self.said and not parsed(message, dice.choice(self.said)):
            return
        body = message.WhichOneof("body") or "heartbeat"
        if body == "halt":  # only a Supervisor may end the run
            return
        mutators.changed(getattr(message, body), dice)
        self.say(who, message.SerializeToString())

    def again(self, who: int, number: int) -> None:
        """Replay a frame."""
        if self.said:
            self.say(who, self.said[number % len(self.said)])

    def break_off(self, who: int) -> None:
        """End a stream."""
        self.clients[who % len(self.clients)].break_off()
        if not self.held:
            self.world.turn()

    def wait(self, seconds: float) -> None:
        """Let time pass, less than the honest worker's lease."""
        self.world.wait(min(seconds, 0.7 * LEASE_SECONDS))

    def release(self) -> None:
        """Let the writer thread continue."""
        self.held = False
        self.world.turn()

    def end(self) -> None:
        """Check the invariants that hold after any messages, and end all streams."""
        self.release()
        self.world.check()
        for client in self.clients:
            client.break_off()
        self.world.turn()
        self.world.honest.exchange()


class _Program:
    """Reads operations and their arguments from an input."""

    def __init__(self, source: Reader, abuse: Abuse) -> None:
        self.source, self.abuse = source, abuse

    def run(self) -> None:
        """Run the operations that the bytes encode."""
        verbs = (
            self._hello,
            self._push,
            self._push,
            self._odd_push,
            self._pull,
            self._query,
            self._small,
            self._chunked,
            self._raw,
            self._datagrams,
            self._spoilt,
            self._again,
            self._connection,
            self._time,
        )
        for _ in range(_MOST_VERBS):
            if not self.source:
                break
            self.source.choice(verbs)()
        self.abuse.end()

    def _who(self) -> int:
        return self.source.number() % _MOST_CLIENTS

    def _hello(self) -> None:
        source = self.source
        fields: dict[str, Any] = {"incarnation": source.choice(_LIVES)}
        match source.number() % 16:
            case 0:
                fields["id"] = source.choice((HONEST, 0, 3, 2**32 - 1))
            case 1:
                fields["role"] = source.choice((pb.ROLE_SUPERVISOR, pb.ROLE_SHARD, 0))
            case 2:
                fields["link"] = pb.EmulatedLink(mbps=source.real(), delay_ms=source.real())
            case 3:
                fields["run_id"] = "another"
            case 4:
                fields["num_shards"] = source.number()
        self.abuse.hello(self._who(), **fields)

    def _push(self) -> None:
        self.abuse.push(self._who(), None, step=1 + self.source.number())

    def _odd_push(self) -> None:
        source = self.source
        fields: dict[str, Any] = {"step": 1 + source.number()}
        life = source.choice((None, None, None, *_LIVES))
        match source.number() % 10:
            case 0:
                fields["step"] = source.interesting() % 2**64
            case 1:
                fields["loss"] = source.real()
            case 2:
                fields["base_version"] = source.interesting() % 2**64
            case 3:
                fields["generation"] = source.interesting() % 2**32
            case 4:
                fields["epoch"] = source.interesting() % 2**32
            case 5:
                fields["samples"] = source.interesting() % 2**32
            case 6:
                fields["local_steps"] = source.interesting() % 2**32
            case 7:
                fields["kind"] = source.number() % 5
            case 8:
                fields["aux_count"] = source.interesting() % 2**32
            case _:
                fields["blocks"], fields["values"] = self._blocks(), source.piece()
        self.abuse.push(self._who(), life, **fields)

    def _blocks(self) -> list[pb.Block]:
        source = self.source
        return [
            pb.Block(
                slot=source.number() % 4,
                count=source.interesting() % 2**32,
                coding=source.number() % 9,
                coding_parameter=source.number(),
                index_bytes=source.number(),
                value_dtype=source.number() % 9,
            )
            for _ in range(source.number() % 4)
        ]

    def _pull(self) -> None:
        source = self.source
        pull = pb.Pull(has_base=bool(source.number() % 2), generation=source.number() % 3)
        pull.base_version = source.interesting() % 2**64
        self.abuse.say(self._who(), frame(pull=pull))

    def _query(self) -> None:
        source = self.source
        query = pb.Query(
            incarnation=source.choice((self.abuse.world.life, *_LIVES)),
            step=source.interesting() % 2**64,
            local_steps=source.number(),
            step_seconds=source.real(),
            age_seconds=source.real(),
            query_seconds=0.0,
        )
        self.abuse.say(self._who(), frame(query=query))

    def _small(self) -> None:
        source = self.source
        message = source.choice(
            (
                {"heartbeat": pb.Heartbeat()},
                {"report": pb.Report(document=source.choice(_DOCUMENTS))},
                {"report": pb.Report(rounds=source.choice(_DOCUMENTS))},
                {"leave": pb.Leave(cause=source.choice(("done", "diverged", "")))},
                {"halt": pb.Halt(cause=source.choice(_HALTS))},
            )
        )
        self.abuse.say(self._who(), frame(**message))

    def _chunked(self) -> None:
        source = self.source
        pieces = [source.piece()[:200] for _ in range(source.number() % 4)]
        self.abuse.chunked(self._who(), source.interesting() % 2**32, pieces)

    def _raw(self) -> None:
        self.abuse.say(self._who(), self.source.piece())

    def _datagrams(self) -> None:
        size = self.source.number() % 200
        datagrams = pb.Datagrams(size=size, data=self.source.piece())
        self.abuse.say(self._who(), frame(datagrams=datagrams))

    def _spoilt(self) -> None:
        self.abuse.spoilt(self._who(), random.Random(self.source.number(2)))

    def _again(self) -> None:
        self.abuse.again(self._who(), self.source.number())

    def _connection(self) -> None:
        who, kind = self._who(), self.source.number() % 5
        if kind < 2:
            self.abuse.connect()
        elif kind == 2:
            self.abuse.break_off(who)
        elif kind == 3:
            client = self.abuse.clients[who % len(self.abuse.clients)]
            client.takes = not client.takes
        else:
            self.abuse.held = not self.abuse.held

    def _time(self) -> None:
        kind = self.source.number()
        if kind % 4 == 0:
            self.abuse.release()
            self.abuse.world.honest.exchange()
        else:
            self.abuse.wait(kind / 16)


def stream(data: bytes) -> None:
    """Run a program against the server of one method."""
    logging.set_verbosity(logging.FATAL)
    source = Reader(data)
    with world(source.choice(_NAMES)) as shard:
        _Program(source, Abuse(shard)).run()


def _stream_seeds() -> list[bytes]:
    honest = bytes([0, 1, 9, 0])  # Hello of life 5
    pushes = bytes([1, 0, 0, 1, 1, 0, 1, 1, 0])
    odd = bytes([3, 2, 0, 0, 200, 0, 3, 3, 0, 1, 5, 0, 3, 1, 2, 4, 7, 0])
    others = bytes(
        [4, 1, 0, 1, 0, 5, 0, 1, 1, 1, 1, 0, 6, 0, 0, 6, 1, 1, 0, 12, 0, 0, 13, 0, 13, 77]
    )
    return [bytes([name]) + honest + pushes + odd + others for name in range(len(_NAMES))]


TARGETS = {
    "stream": Target("conversations with a shard", stream, _stream_seeds, longest=600),
}
