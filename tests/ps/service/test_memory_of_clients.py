"""The memory that one client can make a shard use stays within the documented bounds."""

import threading
import time
import tracemalloc

import grpc
import numpy as np
import pytest

from tests.documents import ROOT, rows
from tests.ps.service.client_memory import client_memory
from tests.ps.service.test_strangers import WAIT_SECONDS, opened
from tests.ps.streams import HONEST, ROGUE, Shard, Stream, frame
from tests.virtual.toy import KERNELS, method
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.types import CodedValues, LowRankBlock, ModelSpec, TensorSpec
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import frames
from thinwire.proto.grpc.common import METHOD, SERVICE
from thinwire.proto.grpc.send_queue import MOST_REPORT_BYTES, SendQueue
from thinwire.proto.security.connection_guard import Limits
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.membership import Coordinator
from thinwire.ps.service import backlog
from thinwire.ps.service.handshake import Identity
from thinwire.ps.service.served_model import ServedModel
from thinwire.ps.service.server import ShardServer
from thinwire.runtime.run.credentials import NO_CREDENTIALS

REPORT = "r" * (250 << 10)
INCARNATION = 7
SPEC = ModelSpec((TensorSpec("w", (100, 1000)),))


def test_reports_wait_in_the_network_while_the_writer_is_busy():
    shard, num_reports = Shard("asgd"), 100
    port = shard.server.listen("127.0.0.1", 0)
    over, busy, free = threading.Event(), threading.Event(), threading.Event()
    writer = threading.Thread(target=shard.server.run_until, args=(over.is_set,), daemon=True)
    writer.start()
    try:
        with opened(shard, port, NO_CREDENTIALS, id=HONEST) as (session, _):

            def pause():
                busy.set()
                free.wait(WAIT_SECONDS)

            shard.server.queue.put(pause)
            assert busy.wait(WAIT_SECONDS)
            stream = shard.server.connections.workers[HONEST].stream
            for _ in range(num_reports):
                session.send_control(pb.ToServer(report=pb.Report(rounds=REPORT)))
            assert settled(lambda: stream.bytes_received) < (
                backlog.MOST_QUEUED_BYTES + 3 * len(REPORT)
            )
            free.set()
            deadline = time.monotonic() + WAIT_SECONDS
            while stream.bytes_received < num_reports * len(REPORT):
                assert time.monotonic() < deadline
    finally:
        free.set()
        over.set()
        writer.join(WAIT_SECONDS)
        shard.server.server.stop()


def settled(value):
    """Return a value when it has not changed for a while."""
    before, unchanged_at = None, time.monotonic()
    while time.monotonic() < unchanged_at + 0.3:
        if (now := value()) != before:
            before, unchanged_at = now, time.monotonic()
    return before


def test_a_supervisor_that_stands_still_misses_reports_which_are_counted():
    shard, waiting = Shard("asgd"), SendQueue()
    supervisor = Stream(shard.server)
    supervisor.send_report = waiting.put_report
    sent = []

    def reports():
        yield frame(hello=shard.hello(role=pb.ROLE_SUPERVISOR, id=0, fingerprint=[]))
        for _ in range(100):
            sent.append(shard.server.observers.pass_on_rounds(HONEST, REPORT))
        assert waiting.num_bytes <= MOST_REPORT_BYTES

    supervisor.frames = reports()
    supervisor.read()
    assert shard.server.observers.num_dropped >= 100 - MOST_REPORT_BYTES // len(REPORT)


# -- a hostile worker of a real server ---------------------------------------------------------


class Served:
    """A shard of 100,000 parameters on a port; the test can pause its writer thread."""

    def __init__(self):
        chosen = method("asgd", nb_workers=2)
        self.layout = chosen.place(SPEC, 1)[0]
        self.fingerprint, theta = chosen.fingerprint(), np.zeros(SPEC.num_parameters, np.float32)
        config = CoreConfig(Budget(10**6), Schedule(0.1), 2, spec=SPEC)
        self.core = PsCore(config, chosen, theta, KERNELS, Coordinator(2, 1e9))
        self.server = ShardServer(ServedModel.of(self.core, SPEC, self.layout), 1e9)
        self.server.open_for(Identity("run", 0, 1, 0, self.fingerprint, SPEC, []), "{}")
        self.port = self.server.listen("127.0.0.1", 0)
        self.over, self.free = threading.Event(), threading.Event()
        self.writer = threading.Thread(
            target=self.server.run_until, args=(self.over.is_set,), daemon=True
        )
        self.writer.start()

    def hello(self):
        return pb.Hello(
            protocol_version=messages.PROTOCOL_VERSION,
            role=pb.ROLE_WORKER,
            id=ROGUE,
            incarnation=INCARNATION,
            fingerprint=messages.settings_of(self.fingerprint),
            model=messages.tensors_of(SPEC),
            num_shards=1,
        )

    def hold(self):
        busy = threading.Event()
        self.server.queue.put(lambda: (busy.set(), self.free.wait(WAIT_SECONDS)))
        assert busy.wait(WAIT_SECONDS)

    def attack(self, attack):
        """Send the frames of `attack` to a paused writer, read no reply; return the peak."""
        sent = [*attack(self)]
        channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        welcomed, over = threading.Event(), threading.Event()

        def requests():
            yield frame(hello=self.hello())
            welcomed.wait(WAIT_SECONDS)
            yield from sent
            over.wait(WAIT_SECONDS)

        call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(requests())
        try:
            deadline = time.monotonic() + WAIT_SECONDS
            while ROGUE not in self.server.connections.workers:
                assert time.monotonic() < deadline
            stream = self.server.connections.workers[ROGUE].stream
            self.hold()
            tracemalloc.start()
            welcomed.set()
            settled(lambda: stream.bytes_received)
            self.free.set()
            settled(lambda: (stream.bytes_received, stream.num_waiting))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            over.set()
            call.cancel()
            channel.close()

    def close(self):
        self.free.set()
        self.over.set()
        self.writer.join(WAIT_SECONDS)
        self.server.server.stop()


def pulls(served):
    """Requests for the model from a client that reads no replies."""
    del served
    return [frame(pull=pb.Pull())] * 300


def thin_pushes(served):
    """Pushes that are a hundred times as large when they are decoded."""
    left, right = (CodedValues("float32", np.ones(size, np.float32)) for size in (100, 1000))
    block = LowRankBlock(0, SPEC.num_parameters, None, left, right, 1, 0)
    for step in range(1, 301):
        message = pb.ToServer(
            push=pb.Push(
                step=step,
                incarnation=INCARNATION,
                samples=8,
                local_steps=1,
                epoch=1,
                loss=0.5,
            )
        )
        coded = IndexChooser().encode(block)
        yield from frames(message, messages.blocks_to_message([coded], message.push.blocks))


@pytest.mark.parametrize("attack", [pulls, thin_pushes])
def test_a_hostile_worker_costs_no_more_than_its_share(attack):
    served = Served()
    try:
        peak = served.attack(attack)
    finally:
        served.close()
    bound = sum(client_memory(served.layout, 0, Limits()).values())
    assert peak < bound, f"{peak / (1 << 20):.0f} MiB, and {bound / (1 << 20):.0f} are promised"


# -- the pages ---------------------------------------------------------------------------------


def layout_of(size):
    return method("asgd", nb_workers=2).place(ModelSpec((TensorSpec("w", (size,)),)), 1)[0]


def as_written(small, large):
    """Return bytes for 1 and 10^6 + 1 parameters as a page writes them: (MiB, a parameter)."""
    per_parameter = (large - small) / 10**6
    fixed = (small - per_parameter) / (1 << 20)
    return f"{round(fixed, 2):g}", f"{per_parameter:g}"


def test_the_page_promises_what_the_code_keeps():
    small, large = (client_memory(layout_of(size), 0, Limits()) for size in (1, 10**6 + 1))
    expected = {name: as_written(small[name], large[name]) for name in small}
    expected["**together**"] = as_written(sum(small.values()), sum(large.values()))
    page = (ROOT / "docs" / "reference/security.md").read_text()
    found = rows(page, "of one client", "MiB", "and bytes a parameter", "what is beyond")
    assert {row[0]: (row[1], row[2]) for row in found} == expected
    fixed, per_parameter = expected["**together**"]
    sizing = " ".join((ROOT / "docs" / "reference/operations.md").read_text().split())
    assert f"at most {fixed} MiB and {per_parameter} bytes a parameter" in sizing
