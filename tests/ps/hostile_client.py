"""A hostile client: seeded random streams of frames that must not change a model."""

import math
import random
import struct

import numpy as np

from tests.ps.streams import HONEST, ROGUE, Stream, frame, push_frame
from thinwire.proto import thinwire_pb2 as pb

FOREIGN_LIFE = 0x1234  # no worker's incarnation
BIG = 2**64 - 1
_POSITIONS = struct.pack("<II", 1, 7)
_SPARSE = [pb.Block(slot=0, count=2, coding=pb.INDEX_CODING_UINT32, index_bytes=8)]


class Liar:
    """Makes up streams of frames."""

    def __init__(self, shard, seed):
        self.shard, self.dice = shard, random.Random(seed)
        self.sent = 0
        self.ends = {"worker": 0, "stranger": 0, "supervisor": 0}
        self._payload = np.float32([0.5, -0.5]).tobytes()
        self.seeds = [
            frame(hello=shard.hello()),
            frame(hello=shard.hello(id=HONEST)),
            frame(pull=pb.Pull(base_version=3, has_base=True)),
            push_frame(incarnation=FOREIGN_LIFE),
            push_frame(incarnation=FOREIGN_LIFE, payload=b""),
            frame(heartbeat=pb.Heartbeat()),
            frame(report=pb.Report(document='{"id": 2, "bytes_up": 7, "non_finite": 1}')),
            frame(leave=pb.Leave(cause="done")),
            frame(halt=pb.Halt(cause="iter_max")),
            frame(chunk=pb.Chunk(data=self._payload)),
        ]

    def streams(self, num_messages):
        """Send at least this many frames, over many streams."""
        goal = self.sent + num_messages
        while self.sent < goal:
            kind = self.dice.choices(("worker", "stranger", "supervisor"), (8, 1, 1))[0]
            stream = Stream(self.shard.server, getattr(self, f"_{kind}")()).read()
            self.sent += stream.num_read
            self.ends[kind] += 1

    def _worker(self):
        """A worker that joins, and then sends invalid messages of all kinds."""
        stream_hello = self.shard.hello(incarnation=self.dice.choice((0, 0, 5, BIG)))
        yield frame(hello=stream_hello)
        life = self.shard.core.incarnation_of(ROGUE)
        for _ in range(self.dice.randrange(200)):
            yield from self._lie(life)

    def _stranger(self):
        """A first frame that is wrong in some way."""
        yield self.dice.choice((self._noise, self._odd_hello))()
        for _ in range(5):
            yield self._noise()

    def _supervisor(self):
        yield frame(hello=pb.Hello(protocol_version=2, role=pb.ROLE_SUPERVISOR, num_shards=1))
        for _ in range(self.dice.randrange(20)):
            yield self.dice.choice(
                (
                    frame(pull=pb.Pull(observe=True, base_version=self._number())),
                    frame(heartbeat=pb.Heartbeat()),
                    self._report(),
                )
            )
        yield frame(halt=pb.Halt(cause=self.dice.choice(("", "why not", "iter_max\n"))))

    def _lie(self, life):
        choice = self.dice.randrange(20)
        if choice < 14:
            yield self._bad_push(life)
        elif choice == 14:
            yield frame(
                pull=pb.Pull(
                    base_version=self._number(),
                    has_base=True,
                    generation=self.dice.choice((0, 1, 2**32 - 1)),
                )
            )
        elif choice == 15:
            yield self._report()
        elif choice == 16:
            yield self.dice.choice((frame(heartbeat=pb.Heartbeat()), self._query(life)))
        elif choice == 17:  # announces a payload and sends other pieces than announced
            yield push_frame(incarnation=FOREIGN_LIFE, payload=b"")
            yield frame(chunk=pb.Chunk(data=self._payload))
            yield frame(chunk=pb.Chunk(data=self.dice.randbytes(self.dice.randrange(20))))
        elif self.dice.random() < 0.2:
            yield self._noise()

    def _query(self, life):
        seconds = [self.dice.choice((0.0, 0.1, -1.0, 1e300, math.nan, math.inf)) for _ in range(3)]
        return frame(
            query=pb.Query(
                incarnation=self.dice.choice((life, FOREIGN_LIFE)),
                step=self._number(),
                local_steps=self.dice.choice((0, 1, 2**32 - 1)),
                step_seconds=seconds[0],
                age_seconds=seconds[1],
                query_seconds=seconds[2],
            )
        )

    def _bad_push(self, life):
        """A push with one defect, or a push of a wrong incarnation with any content."""
        dice = self.dice
        right = {
            "incarnation": life,
            "epoch": self.shard.core.membership.epoch,
            "kind": self.shard.kind,
        }
        dense = [pb.Block(slot=0, count=24), pb.Block(slot=1, count=4)]
        finite = np.float32([0.5, -0.5]).tobytes()
        match dice.randrange(9):
            case 0:
                value = dice.choice((math.nan, math.inf, -math.inf))
                values = _POSITIONS + np.float32([value, 1]).tobytes()
                return push_frame(_SPARSE, values, **right, base_version=dice.choice((0, 1)))
            case 1:
                return push_frame(**right, loss=dice.choice((math.nan, math.inf)))
            case 2:
                return push_frame(**right | {"kind": dice.choice((1 - self.shard.kind, 2, 77))})
            case 3:
                return push_frame(**right, samples=dice.choice((2**31, 2**32 - 1)))
            case 4:
                return push_frame(**right, step=dice.choice((0, BIG, 2**63, 2**53 + 1)))
            case 5:
                return push_frame(**right, local_steps=dice.choice((0, 9, 2**32 - 1)))
            case 6:  # slots that repeat, descend or do not exist; lengths that lie
                odd = dice.choice((*dense, pb.Block(slot=9), pb.Block(slot=1, count=5)))
                blocks = dice.choice(([*dense, odd], dense[::-1], [odd, *dense]))
                return push_frame(blocks, bytes(4 * 28 + 4 * odd.count), **right)
            case 7:
                positions = dice.choice(((7, 1), (7, 7), (1, 24), (1, 2**32 - 1)))
                return push_frame(_SPARSE, struct.pack("<II", *positions) + finite, **right)
        return self._foreign_push()

    def _foreign_push(self):
        """A push of an unknown incarnation: its content may be valid or invalid."""
        dice = self.dice
        if dice.random() < 0.3:
            return push_frame(incarnation=FOREIGN_LIFE, epoch=self.shard.core.membership.epoch)
        return push_frame(
            self._any_blocks(),
            dice.randbytes(dice.randrange(150)),
            incarnation=FOREIGN_LIFE,
            step=self._number(),
            base_version=self._number(),
            epoch=dice.getrandbits(32),
            generation=dice.choice((0, 1, 2**32 - 1)),
            samples=dice.getrandbits(32),
            loss=dice.choice((0.1, math.nan)),
        )

    def _any_blocks(self):
        dice = self.dice
        return [
            pb.Block(
                slot=dice.choice((0, 1, 2, 2**32 - 1)),
                count=dice.choice((0, 1, 4, 24, 2**32 - 1)),
                coding=dice.randrange(8),
                coding_parameter=dice.choice((0, 3, 64, 2**32 - 1)),
                index_bytes=dice.choice((0, 1, 3, 4, 2**32 - 1)),
                value_dtype=dice.randrange(6),
                scale=dice.choice((1.0, 3e38, math.nan)),
            )
            for _ in range(dice.randrange(4))
        ]

    def _odd_hello(self):
        nan, dice = math.nan, self.dice
        odd = dice.choice(
            (
                {"protocol_version": 99},
                {"role": 9},
                {"role": pb.ROLE_SHARD, "id": dice.getrandbits(32)},
                {"id": dice.choice((0, 3, HONEST, 2**32 - 1))},
                {"id": HONEST, "incarnation": dice.getrandbits(63)},
                {"run_id": "x" * dice.choice((1, 10**6))},
                {
                    "fingerprint": [
                        pb.Setting(name=self.shard.fingerprint[0][0], value="\x01" * 400_000)
                    ]
                },
                {"model": [pb.Tensor(path="w", shape=[2**32 - 1] * 9, dtype="float32")]},
                {"shard": 1},
                {"num_shards": 0},
                {"link": pb.EmulatedLink(mbps=dice.choice((nan, math.inf, -1, 1e-300)))},
                {"link": pb.EmulatedLink(mbps=1, delay_ms=dice.choice((nan, math.inf, -1)))},
                {"link": pb.EmulatedLink(mbps=1, loss=dice.choice((nan, 1, -1)))},
            )
        )
        return frame(hello=self.shard.hello(**odd))

    def _report(self):
        dice = self.dice
        text = dice.choice(
            (
                "",
                "[]",
                "{}",
                "NaN",
                "[" * 50_000,
                '{"id": 2, "bytes_up": 1e999}',
                f'{{"id": 2, "bytes_up": {10**400}}}',
                '{"id": 2, "compute_seconds": -Infinity}',
                '{"id": 2, "bytes_up": 3}',
                f'{{"id": 2, "bytes_up": {2**60}}}',
                '{"id": 2, "state": "\\u001b[2J"}',
                '{"rejected": {"x": 1}, "bytes_down": {"1": 1e99}}',
            )
        )
        return frame(report=pb.Report(document=text))

    def _number(self):
        return self.dice.choice((0, 1, 2, 50, 2**31, 2**32, 2**53, 2**63, BIG))

    def _noise(self):
        """Random bytes, or a frame of a seed with bits and bytes changed."""
        dice = self.dice
        if dice.random() < 0.3:
            return dice.randbytes(dice.randrange(80))
        spoilt = bytearray(dice.choice(self.seeds))
        for _ in range(dice.randrange(4)):
            position = dice.randrange(len(spoilt) + 1)
            match dice.randrange(4):
                case 0:
                    spoilt[position : position + 1] = dice.randbytes(1)
                case 1:
                    del spoilt[position : position + dice.randrange(8)]
                case 2:
                    spoilt[position:position] = b"\xff" * dice.randrange(12)
                case _ if position < len(spoilt):
                    spoilt[position] ^= 1 << dice.randrange(8)
        return bytes(spoilt)
