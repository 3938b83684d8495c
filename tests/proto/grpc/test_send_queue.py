"""The queue to a client that does not read is bounded in bytes; the oldest reports are dropped."""

import queue

from tests.proto.echoes import WAIT_SECONDS, connected, serving
from thinwire.proto.grpc import send_queue
from thinwire.proto.grpc.send_queue import MOST_CONTROL_BYTES, MOST_REPORT_BYTES, SendQueue
from thinwire.proto.security.connection_guard import ConnectionGuard

REPORT_BYTES = 250 << 10


def test_reports_do_not_pile_up_and_the_newest_arrive_in_order():
    waiting = SendQueue()
    reports = [bytes([number]) * REPORT_BYTES for number in range(200)]
    dropped = sum(waiting.put_report(report) for report in reports)
    kept = MOST_REPORT_BYTES // REPORT_BYTES
    assert dropped == 200 - kept
    assert waiting.num_bytes == kept * REPORT_BYTES
    assert waiting.put((b"after",), False)
    waiting.end()
    sent = []
    while (found := waiting.get()) is not None:
        sent += found[0]
    assert sent == [*reports[-kept:], b"after"]
    assert waiting.num_bytes == 0


def test_control_messages_that_nobody_takes_are_too_many_one_day():
    waiting = SendQueue()
    message = (bytes(1 << 20),)
    number = MOST_CONTROL_BYTES >> 20
    assert all(waiting.put(message, False) for _ in range(number))
    assert not waiting.put(message, False)
    assert waiting.get() is not None
    assert waiting.num_bytes == MOST_CONTROL_BYTES


def test_replies_count_by_their_number():
    waiting = SendQueue()
    for _ in range(3):
        assert waiting.put(lambda: [bytes(10**9)], True)
    assert (waiting.num_waiting, waiting.num_bytes) == (3, 0)
    assert waiting.get() is not None
    assert waiting.num_waiting == 2


def test_a_client_that_leaves_its_messages_is_cut_off(monkeypatch):
    monkeypatch.setattr(send_queue, "MOST_CONTROL_BYTES", 1 << 16)
    guard, over = ConnectionGuard(), queue.SimpleQueue()

    def refuse(stream):
        for _ in stream.incoming():
            gate = queue.SimpleQueue()
            stream.send(lambda gate=gate: gate.get(timeout=WAIT_SECONDS))  # nothing goes out
            while not stream.lost:
                stream.send((bytes(1 << 14),))
            over.put(stream._outgoing.num_bytes)
            gate.put([])

    with serving(refuse, guard) as server, connected(server) as client:
        client.send([b"x"])
        assert over.get(timeout=WAIT_SECONDS) <= (1 << 16) + (1 << 14)
        assert guard.refused == {"unread": 1}
