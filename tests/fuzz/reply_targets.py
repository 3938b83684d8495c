"""Fuzz targets: workers, following shards and the Supervisor decode messages to them."""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import threading
import types
from typing import Any

import numpy as np

from tests.command_line import given
from tests.fuzz.target import Reader, Target, joined, parsed
from tests.fuzz.wire_targets import golden, mend_lengths
from tests.proto.samples import samples
from tests.supervisor.samples import make_status, make_worker
from tests.virtual.toy import KERNELS, SPEC, method
from thinwire.flags.run import read_run
from thinwire.ops.methods.method import Method
from thinwire.ops.routing.base import Routed, UnreliableBlocks, ValueEncoding
from thinwire.ops.routing.counters import SentCounts
from thinwire.ops.types import ConfigurationError, Link
from thinwire.proto import peers_pb2 as peers
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.proto.grpc import StreamLost
from thinwire.ps.wire import reports
from thinwire.ps.wire.epochs import decode_epoch
from thinwire.runtime.persistence.documents import from_dict, parse_json, to_dict
from thinwire.runtime.telemetry import round_trace, run_status
from thinwire.supervisor.evaluator import ModelFetcher
from thinwire.worker.client.exchange import Exchange
from thinwire.worker.client.protocol import Replied
from thinwire.worker.collective.mailbox import CollectiveMember, Mailbox, RoundId
from thinwire.worker.collective.peers import PeerLost, _PeerConnection
from thinwire.worker.collective.replica import Replica
from thinwire.worker.collective.service import PeerServer
from thinwire.worker.core.core import WorkerCore

#: Flags of a worker, and the number of auxiliary values that shard 0 averages.
WORKERS = (
    (("--method=asgd",), 0),
    (("--method=adacomp", "--compression_rate=0.25"), 3),
    (("--method=dgt", "--dgt_transport=grpc", "--dgt_error_feedback", "--dgt_reception=drop"), 0),
)


@functools.cache
def _exchange(chosen: int) -> Exchange:
    flags, aux_size = WORKERS[chosen]
    with given("--nb_workers=1", *flags):
        run = read_run()
    layouts = run.method.place(SPEC, 1)
    made = Exchange(run, 1, SPEC, layouts, Link(), threading.Event(), aux_size)
    channel = made.channels[0]
    if channel is not None:
        said = pb.DatagramSession(session=7, key=bytes(range(32)), ports=[40_001])
        channel.open("127.0.0.1:1", pb.Welcome(datagrams=said))
        channel.seal(3, _routed())
    return made


def _routed() -> Routed:
    """Return an update with two blocks that were sent in datagrams."""
    part = UnreliableBlocks(
        slot=0,
        size=16,
        block_entries=8,
        blocks=np.array([0, 1]),
        channels=np.array([1, 1], np.uint8),
        encoding=ValueEncoding.FLOAT32,
        indices=None,
        data=np.ones(16, np.float32),
        scales=np.ones(2, np.float32),
        lows=np.zeros(2, np.float32),
    )
    return Routed((), (part,), 0.5, 2)


# -- replies of shards -------------------------------------------------------------------------


def reply(data: bytes) -> None:
    """Hand a worker a reply, and let it take what decodes."""
    source = Reader(data)
    chosen, mends = source.number() % len(WORKERS), source.number()
    message = pb.Reply()
    if not parsed(message, source.rest()):
        return
    aux_size = WORKERS[chosen][1]
    if mends & 1:
        message.aux_count = aux_size
    if mends & 2:
        for slot, each in enumerate(message.blocks):
            each.slot = slot
    if mends & 4:
        mend_lengths(message)
    exchange = _exchange(chosen)
    shard, (flags, _) = exchange.shards[0], WORKERS[chosen]
    payload = memoryview(message.payload)
    shard.pull = lambda: None  # type: ignore[method-assign]
    shard.wait_for_reply = lambda: (Replied(message), payload)  # type: ignore[method-assign]
    with contextlib.suppress(ConfigurationError):
        _core(flags[0], aux_size, exchange).finish(exchange.pull())
    _look(message)


@functools.cache
def _method(name: str) -> Method:
    return method(name, 1, **({"compression_rate": 0.25} if name == "adacomp" else {}))


def _core(flag: str, aux_size: int, exchange: Exchange) -> WorkerCore:
    chosen = _method(flag.removeprefix("--method="))
    core = WorkerCore(SPEC, exchange.layouts, chosen, KERNELS, [1, 1], np.zeros(aux_size, "f4"))
    core.learning_rate = 0.1
    core.begin(np.ones(28, np.float32), 8, 0.5, np.zeros(aux_size, "f4") if aux_size else None)
    return core


def _look(message: pb.Reply) -> None:
    """Let a Supervisor have it, too."""
    viewer = ModelFetcher(SPEC, _exchange(0).layouts, 3, in_step=False)
    replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
    answer = message, memoryview(message.payload)
    session = types.SimpleNamespace(
        send_control=lambda sent: replies.put(answer), address="127.0.0.1:1"
    )
    with contextlib.suppress(ConfigurationError):
        viewer.fetch([types.SimpleNamespace(replies=replies, session=session)])  # type: ignore[list-item]


def _reply_seeds() -> list[bytes]:
    dense = [pb.Block(slot=slot, count=size) for slot, size in enumerate((16, 8, 4))]
    full = pb.Reply(blocks=dense, operation=pb.OPERATION_FULL, step=3)
    full.payload = np.arange(31, dtype="<f4").tobytes()
    lost = pb.Reply(step=3, outcome=pb.DatagramOutcome(announced=2, arrived=1, bitmap=b"\1"))
    found = [full, lost, *(one.reply for one in samples().values() if _is_reply(one))]
    return [
        bytes([chosen, mends]) + one.SerializeToString()
        for chosen in range(len(WORKERS))
        for mends in (0, 7)
        for one in found
    ]


def _is_reply(message: Any) -> bool:
    return isinstance(message, pb.ToClient) and message.WhichOneof("body") == "reply"


def membership(data: bytes) -> None:
    """Read an epoch, as a following shard does."""
    message = pb.Membership()
    if parsed(message, data):
        with contextlib.suppress(Malformed):
            decode_epoch(message)


def _membership_seeds() -> list[bytes]:
    names = ("to_client_membership", "to_client_membership_formed")
    return [samples()[name].membership.SerializeToString() for name in names]


# -- documents ---------------------------------------------------------------------------------

_DOCUMENTS = (
    run_status.RunStatus.from_json,
    run_status.WorkerMetrics.from_json,
    round_trace.unpack,
    lambda text: from_dict(SentCounts, parse_json(text)),
    reports.own_counters,
    reports.sent,
    reports.received,
    lambda text: reports.counts(text, "rejected"),
    lambda text: reports.tables(text, "guards"),
    lambda text: reports.by_worker(text, "bytes_down"),
    reports.check_worker,
    reports.check_shard,
)


def documents(data: bytes) -> None:
    """Read a document of the metrics; ill-formed is a ValueError, or nothing."""
    source = Reader(data)
    read = source.choice(_DOCUMENTS)
    text = source.rest().decode(errors="replace")
    with contextlib.suppress(ValueError, Malformed):
        read(text)


def _document_seeds() -> list[bytes]:
    origin = round_trace.MeasuredBy("host", "cpu", 0, "life")
    row = round_trace.Round(
        num_iters=1,
        num_samples=8,
        total_time=0.5,
        version=1,
        loss=0.25,
        bytes_sent=100,
        bytes_received=100,
        transfer=0.1,
        time={round_trace.ENCODE: 0.1},
    )
    whole = make_status(40)
    texts = {
        0: [whole.to_json()],
        1: [make_worker(1, 8).to_json()],
        2: round_trace.pack(origin, [row]),
        3: [json.dumps(to_dict(SentCounts(pushes=1, blocks=[1, 2])))],
        4: [make_worker(1, 8).to_json()],
        6: [json.dumps({"datagrams": {"workers": {}, "dropped": {"tag": 1}}})],
        7: [json.dumps({"rejected": {"malformed": 1}})],
        8: [json.dumps({"guards": {"norm": {"1": 2}}})],
    }
    return [bytes([kind]) + text.encode() for kind, each in texts.items() for text in each]


# -- peers -------------------------------------------------------------------------------------


class _Wire:
    """A stream of one peer, accepted or dialed, without a network."""

    def __init__(self, frames: list[bytes]) -> None:
        self._frames = frames
        self.peer, self.evidence = "ipv4:127.0.0.1:1", None
        self.bytes_sent = self.bytes_received = self.num_waiting = 0

    def incoming(self) -> list[bytes]:
        return self._frames

    def receive(self, seconds: float) -> bytes:
        if not self._frames:
            raise StreamLost("over")
        return self._frames.pop(0)

    def send(self, frames: Any, counted: bool = True) -> None:
        for _ in frames:
            pass


def _replica() -> Replica:
    made = Replica(np.zeros(28, np.float32), _method("ssgd"), KERNELS)
    made.fetched(RoundId(0, 3), np.ones(28, np.float32))
    return made


def peers_of(data: bytes) -> None:
    """Let a peer send any bytes to this worker; the worker stores no more than the limit."""
    mailbox = Mailbox(1 << 12)
    server = PeerServer(mailbox, _replica().answer, 1 << 10)
    server.run_id = "run-1"
    server._read(_Wire(list(Reader(data).pieces())))  # type: ignore[arg-type]
    assert mailbox._num_bytes <= 1 << 12
    assert not server._authenticated and not server._streams


def _peer_seeds() -> list[bytes]:
    greeting, *_ = (one for one in golden("to_peer") if b"run-1" in one)
    return [joined([greeting, one, one]) for one in golden("to_peer")]


def holding(data: bytes) -> None:
    """Request a peer's model, and load the model that the peer sends."""
    source = Reader(data)
    stream: Any = _Wire(list(source.pieces()))
    conversation = _PeerConnection(CollectiveMember(2, 7, "127.0.0.1:1"), stream, _assembler())
    with contextlib.suppress(PeerLost):
        answer = conversation.receive(1.0)
        assert answer is not None
        with contextlib.suppress(ValueError):  # Neighbours calls it a mistake of configuration
            _replica().adopt(answer[1], RoundId(0, 4))


def _assembler() -> Any:
    from thinwire.proto.framing import MessageAssembler

    return MessageAssembler(peers.FromPeer, lambda message: 1 << 12)


def _holding_seeds() -> list[bytes]:
    whole = peers.Holding(
        standing=peers.STANDING_STEPPED, version=4, payload=bytes(112), payload_bytes=112
    )
    frames = [*golden("from_peer"), peers.FromPeer(holding=whole).SerializeToString()]
    return [joined([one]) for one in frames]


TARGETS = {
    "reply": Target(
        "replies, as workers and the Supervisor take them",
        reply,
        _reply_seeds,
        message=pb.Reply,
        head=2,
    ),
    "membership": Target(
        "epochs, as following shards take them",
        membership,
        _membership_seeds,
        message=pb.Membership,
    ),
    "documents": Target("documents of metrics and rounds", documents, _document_seeds),
    "peers": Target("what peers tell a worker", peers_of, _peer_seeds),
    "holding": Target("what a peer hands out", holding, _holding_seeds),
}
