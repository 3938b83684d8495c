"""What one client can make a shard keep: as much as docs/SECURITY.md promises, and no more."""

import re
import threading
import time

from tests.documents import ROOT, rows
from tests.ps.service.test_strangers import WAIT_SECONDS, opened
from tests.ps.streams import HONEST, Shard, Stream, frame
from thinwire.ops.run.credentials import NO_CREDENTIALS
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import MAX_MESSAGE_BYTES
from thinwire.proto.grpc.send_queue import MOST_CONTROL_BYTES, MOST_REPORT_BYTES, SendQueue
from thinwire.proto.security.connection_guard import Limits
from thinwire.ps.service import backlog
from thinwire.ps.service.connections import KEPT_PER_WORKER

REPORT = "r" * (250 << 10)


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
            before, unchanged_at = -1, time.monotonic()
            while time.monotonic() < unchanged_at + 0.3:  # nothing more is read
                if stream.bytes_received != before:
                    before, unchanged_at = stream.bytes_received, time.monotonic()
            assert before < backlog.MOST_QUEUED_BYTES + 3 * len(REPORT)
            free.set()
            deadline = time.monotonic() + WAIT_SECONDS
            while stream.bytes_received < num_reports * len(REPORT):
                assert time.monotonic() < deadline
    finally:
        free.set()
        over.set()
        writer.join(WAIT_SECONDS)
        shard.server.server.stop()


def test_a_supervisor_that_stands_still_misses_reports_which_are_counted():
    shard, waiting = Shard("asgd"), SendQueue()
    supervisor = Stream(shard.server)
    supervisor.send_report = waiting.put_report
    sent = []

    def frames():
        yield frame(hello=shard.hello(role=pb.ROLE_SUPERVISOR, id=0, fingerprint=[]))
        for _ in range(100):
            sent.append(shard.server.observers.pass_on_rounds(HONEST, REPORT))
        assert waiting.num_bytes <= MOST_REPORT_BYTES

    supervisor.frames = frames()
    supervisor.read()
    assert shard.server.observers.num_dropped >= 100 - MOST_REPORT_BYTES // len(REPORT)


def test_the_page_promises_what_the_code_keeps():
    page = (ROOT / "docs" / "SECURITY.md").read_text()
    found = rows(page, "of one client", "at most", "what is beyond")
    promised = {row[0]: row[1] for row in found}
    mebi = re.compile(r"([\d,]+) (K|M)iB")
    sizes = {
        name: int(match[1].replace(",", "")) << (10 if match[2] == "K" else 20)
        for name, text in promised.items()
        if (match := mebi.search(text))
    }
    assert sizes == {
        "a message that arrives": MAX_MESSAGE_BYTES,
        "messages that the writer thread has not come to": backlog.MOST_QUEUED_BYTES,
        "control messages that it does not read": MOST_CONTROL_BYTES,
        "reports that a Supervisor does not read": MOST_REPORT_BYTES,
        "a worker's newest rounds, for a Supervisor that comes back": KEPT_PER_WORKER,
    }
    assert f"{Limits().waiting_replies} replies" in promised["replies that it does not read"]
