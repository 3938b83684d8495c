"""A real shard server without sockets and threads: tests feed its streams."""

import functools
import math
import types

import numpy as np

from tests.virtual.run import MiniRun
from tests.virtual.toy import SPEC, method
from thinwire.ops.types import Block, CodedValues, Kind
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import messages as proto_messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import MessageAssembler
from thinwire.proto.grpc.common import ChunkPace
from thinwire.ps.service.handshake import Identity
from thinwire.ps.service.served_model import ServedModel
from thinwire.ps.service.server import ShardServer
from thinwire.ps.telemetry.status import StatusReporter, StatusSources

HONEST, ROGUE = 1, 2


class Stream:
    """A reader's view of a client: `frames` may be a generator that looks at the sent frames."""

    def __init__(self, server, frames=()):
        self.server, self.frames = server, frames
        self.peer, self.lost, self.bytes_sent, self.num_read = "fuzz", False, 0, 0
        self.closed, self.num_waiting = False, 0
        self.chunks = ChunkPace()
        self._assembler = MessageAssembler(pb.ToClient, lambda message: 1 << 20)
        self.received = []

    def incoming(self):
        for frame in self.frames:
            if self.closed:
                return
            self.num_read += 1
            yield frame
            self.server.run_until(self.server.queue.empty)

    def send(self, frames, counted=True):
        for frame in frames() if callable(frames) else frames:
            complete = self._assembler.feed(frame)
            if complete is not None:
                self.received.append(complete)

    def send_report(self, message):
        self.send((message,))
        return 0

    num_replies = 0

    def pace(self, link, share, seed):
        assert math.isfinite(link.mbps) and math.isfinite(link.delay_ms)

    def close(self):
        self.closed = True

    def read(self):
        self.server.reader_of(self).read()
        self.server.run_until(self.server.queue.empty)
        return self

    def last(self, body):
        found = [pair for pair in self.received if pair[0].WhichOneof("body") == body]
        return (getattr(found[-1][0], body), found[-1][1]) if found else (None, None)


class Shard:
    """A real server around a real core, two workers."""

    def __init__(self, name="adacomp", **choices):
        self.run = MiniRun(method(name, nb_workers=2, **choices), iter_max=10**6)
        self.core = self.run.shards[0]
        self.kind = int(self.run.method.kind is Kind.DELTA)  # as on the wire
        self.core.membership.lease_seconds = 1e9
        self.server = ShardServer(ServedModel.of(self.core, SPEC, self.run.layouts[0]), 1e9)
        self.fingerprint = self.run.method.fingerprint()
        mine = Identity("run", 0, 1, 0, self.fingerprint, SPEC, [])
        about = types.SimpleNamespace(
            method=self.run.method,
            policy=None,
            nb_workers=2,
            nb_ps=1,
            seed=1,
            iter_max=10**6,
            dp_delta=1e-5,
        )
        self.sources = StatusSources(
            core=lambda: self.core,
            num_parameters=lambda: SPEC.num_parameters,
            run_id=lambda: self.server.identity.run_id,
            bytes_down=self.server.connections.bytes_down,
            reports=lambda: self.server.reports,
            refused_peers=lambda: self.server.guard.refused,
            journal=self.server.journaled.summary,
        )
        self.board = StatusReporter(about, self.sources)
        self.server.observers.on_status = self.board.document
        self.server.open_for(mine, "{}")

    def hello(self, **fields):
        return pb.Hello(
            **{
                "protocol_version": proto_messages.PROTOCOL_VERSION,
                "role": pb.ROLE_WORKER,
                "id": ROGUE,
                "fingerprint": proto_messages.settings_of(self.fingerprint),
                "model": proto_messages.tensors_of(SPEC),
                "num_shards": 1,
                **fields,
            }
        )

    def say(self, *messages, **fields):
        """Send a worker's Hello, then these frames; return its stream, read to its end."""
        first = frame(hello=self.hello(**fields))
        rest = [one if isinstance(one, bytes) else frame(**one) for one in messages]
        return Stream(self.server, [first, *rest]).read()

    def picture(self):
        """The state that only a valid push may change."""
        return self.core.model.theta.tobytes(), self.core.version, self.core.samples


def frame(**body):
    return pb.ToServer(**body).SerializeToString()


@functools.cache
def _usual_update():
    """Blocks and payload of two entries; coded once, for liars push by the million."""
    block = Block(0, 24, np.array([1, 7]), CodedValues("float32", np.float32([0.1, -0.2])))
    message = pb.ToServer()
    pieces = proto_messages.blocks_to_message([IndexChooser().encode(block)], message.push.blocks)
    return tuple(message.push.blocks), b"".join(pieces)


def push_frame(blocks=None, values=b"", **fields):
    """A valid push, except for the defects that the arguments request."""
    if blocks is None:
        blocks, values = _usual_update()
    push = pb.Push(
        **{
            "step": 1,
            "samples": 8,
            "local_steps": 1,
            "loss": 0.5,
            "blocks": blocks,
            "payload": values,
            "payload_bytes": len(values),
            "epoch": 1,
            **fields,
        }
    )
    return frame(push=push)
