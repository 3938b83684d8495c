"""The sending thread with fake sockets, clock and sleep: order, pacing, every error."""

import errno
import threading

import pytest

from tests.proto.udp_fakes import flush
from thinwire.proto.udp import sender as udp_sender
from thinwire.proto.udp.sender import (
    MAX_SEGMENTS,
    MAX_SEND_BYTES,
    Outbox,
    UdpSender,
    UdpSettings,
    pacing,
)

WAIT_SECONDS = 20.0


class FakeBatch:
    def __init__(self, channel, count=1, size=100, mark=0):
        self.channel, self.count, self.size = channel, count, size
        self.data = memoryview(bytearray([mark]) * (count * size))
        self.keys = []

    def sign(self, key):
        self.keys.append(key)


class FakeSocket:
    """Records sent datagrams; before each, raises the next given error, one per call."""

    def __init__(self, log, channel, errors=(), gate=None):
        self.log, self.channel, self.errors, self.gate = log, channel, list(errors), gate
        self.closed = False

    def _call(self, how, data):
        if self.gate is not None:
            self.gate.wait(WAIT_SECONDS)
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise OSError(error, "made here")
        self.log.append((self.channel, how, bytes(data)))
        return len(data)

    def send(self, data):
        return self._call("one", data)

    def sendmsg(self, buffers, ancillary):
        ((level, kind, value),) = ancillary
        assert (level, kind) == (17, 103)
        return self._call(int.from_bytes(value, "little"), buffers[0])

    def close(self):
        self.closed = True


class FakeTime:
    def __init__(self):
        self.now = 0.0
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    def clock(self):
        return self.now


@pytest.fixture
def make():
    """Return a function that makes a sender over fake sockets; all are closed in the end."""
    senders = []

    def build(channels=1, errors=(), gate=None, bucket=None, **sending):
        log, time = [], FakeTime()
        sockets = [FakeSocket(log, n, errors, gate) for n in range(1, channels + 1)]
        sender = UdpSender(
            sockets, UdpSettings(b"k" * 32, **sending), bucket, clock=time.clock, sleep=time.sleep
        )
        senders.append(sender)
        return sender, log, time, sockets

    yield build
    for sender in senders:
        sender.close()


def test_the_best_channel_goes_first_and_each_keeps_its_order(make):
    gate = threading.Event()
    sender, log, _, _ = make(channels=3, gate=gate)
    sender.send([FakeBatch(3, mark=1)], 1)  # the socket holds it while the others arrive
    sender.send([FakeBatch(3, mark=2), FakeBatch(1, mark=3), FakeBatch(2, mark=4)], 1)
    sender.send([FakeBatch(1, mark=5)], 2)
    gate.set()
    assert flush(sender)
    # The first of channel 3 may or may not have been taken before the rest came.
    order = [(channel, data[0]) for channel, _, data in log]
    assert [pair for pair in order if pair != (3, 1)] == [(1, 3), (1, 5), (2, 4), (3, 2)]
    assert order.index((3, 1)) < order.index((3, 2))


def test_a_batch_is_signed_once_and_leaves_in_one_call(make):
    sender, log, _, _ = make()
    batch = FakeBatch(1, count=5, size=100)
    sender.send([batch], 0)
    assert flush(sender)
    assert batch.keys == [b"k" * 32]
    assert log == [(1, 100, bytes(500))]
    (counts,) = sender.counts()
    assert (counts.datagrams, counts.bytes_on_wire) == (5, 5 * (100 + 28))


def test_without_segmentation_each_datagram_is_sent_by_itself(make):
    sender, log, _, _ = make(segmentation=False, overhead_bytes=48)
    batch = FakeBatch(1, count=3, size=100)
    batch.data[:] = bytes(range(300 // 2)) * 2
    sender.send([batch], 0)
    assert flush(sender)
    assert [how for _, how, _ in log] == ["one"] * 3
    assert b"".join(data for _, _, data in log) == bytes(batch.data)
    assert sender.counts()[0].bytes_on_wire == 3 * 148


def test_small_datagrams_stay_within_the_kernel_s_number_of_cuts(make):
    sender, log, _, _ = make()
    sender.send([FakeBatch(1, count=150, size=8)], 0)
    assert flush(sender)
    assert [len(data) // 8 for _, _, data in log] == [MAX_SEGMENTS, MAX_SEGMENTS, 22]


def test_a_full_kernel_is_waited_for(make):
    sender, log, time, _ = make(errors=[errno.EAGAIN, errno.ENOBUFS])
    sender.send([FakeBatch(1, count=2)], 0)
    assert flush(sender)
    assert len(log) == 1 and len(time.slept) == 2
    assert sender.counts()[0].refused == 0


def test_one_by_one_goes_on_where_the_kernel_stopped(make):
    sender, log, _, _ = make(errors=[None, errno.EAGAIN], segmentation=False)
    sender.send([FakeBatch(1, count=3)], 0)
    assert flush(sender)
    assert len(log) == 3 and sender.counts()[0].datagrams == 3


def test_a_kernel_that_stays_full_costs_a_counted_piece(make):
    tries = round(udp_sender._GIVE_UP_SECONDS / udp_sender._RETRY_SECONDS)
    sender, log, time, _ = make(errors=[errno.EAGAIN] * (tries + 1))
    sender.send([FakeBatch(1, count=2), FakeBatch(1, count=1)], 0)
    assert flush(sender)
    assert sender.counts()[0].refused == 2 and len(log) == 1
    assert time.now == pytest.approx(udp_sender._GIVE_UP_SECONDS, rel=0.02)


def test_nobody_there_is_counted_and_sending_goes_on(make):
    sender, log, time, _ = make(errors=[errno.ECONNREFUSED] * 3)
    sender.send([FakeBatch(1, count=2), FakeBatch(1)], 0)
    assert flush(sender)
    (counts,) = sender.counts()
    assert (counts.unreachable, counts.datagrams, len(log)) == (3, 3, 2)
    assert not time.slept


def test_too_large_halves_the_mtu_once_and_is_counted(make):
    sender, log, _, _ = make(errors=[errno.EMSGSIZE] * 3, mtu=1472)
    assert sender.mtu == 1472
    sender.send([FakeBatch(1, count=2, size=1472)] * 2 + [FakeBatch(1, size=736)], 0)
    assert flush(sender)
    assert sender.mtu == 736
    assert sender.counts()[0].too_large == 5 and not log


def test_a_path_that_cannot_cut_gets_them_one_by_one(make):
    sender, log, _, _ = make(errors=[errno.EIO])
    sender.send([FakeBatch(1, count=2), FakeBatch(1, count=2)], 0)
    assert flush(sender)
    assert [how for _, how, _ in log] == ["one"] * 4
    assert sender.counts()[0].datagrams == 4


def test_a_cut_that_fails_because_the_path_is_narrow_is_not_blamed_on_cutting(make):
    sender, log, _, _ = make(errors=[errno.EINVAL, errno.EMSGSIZE], mtu=1472)
    sender.send([FakeBatch(1, count=2, size=1472), FakeBatch(1, count=2, size=736)], 0)
    assert flush(sender)
    assert [how for _, how, _ in log] == [736]
    assert sender.mtu == 736


def test_other_errors_drop_a_piece_and_go_on(make):
    sender, log, _, _ = make(errors=[errno.EPERM, errno.ENETUNREACH], segmentation=False)
    sender.send([FakeBatch(1, count=2), FakeBatch(1), FakeBatch(1)], 0)
    assert flush(sender)
    assert sender.counts()[0].refused == 3 and len(log) == 1


def test_pacing_keeps_the_rate_on_the_wire(make):
    bucket = pacing(8.0)  # 1,000,000 bytes a second, pieces of 1,000 bytes
    sender, log, time, _ = make(bucket=bucket)
    sender.send([FakeBatch(1, count=50, size=100)] * 10, 0)
    assert flush(sender)
    num_bytes = sender.counts()[0].bytes_on_wire
    assert num_bytes == 500 * 128
    longest = 10 * 128
    assert time.now == pytest.approx((num_bytes - bucket.burst) / 1e6, abs=longest / 1e6)
    assert max(len(data) for _, _, data in log) <= 1000
    assert pacing(0.0) is None


def test_slow_pacing_still_sends_whole_datagrams(make):
    sender, log, time, _ = make(bucket=pacing(0.08))  # 10,000 bytes a second
    sender.send([FakeBatch(1, count=3, size=1472)], 0)
    assert flush(sender)
    assert [len(data) for _, _, data in log] == [1472] * 3
    assert time.now == pytest.approx((2 * 1500 - 40) / 10_000, rel=0.01)


def test_outdated_batches_are_dropped_and_counted():
    outbox = Outbox(channels=2, max_late=1)
    outbox.put([FakeBatch(1, count=4), FakeBatch(2, count=3)], 5)
    assert outbox.take(250).count == 2
    outbox.put([FakeBatch(2, count=1, mark=6)], 6)
    assert [counts.outdated for counts in outbox.counts] == [0, 0]
    outbox.put([FakeBatch(2, count=1, mark=7)], 7)
    assert [counts.outdated for counts in outbox.counts] == [2, 3]
    assert [outbox.take(MAX_SEND_BYTES).data[0] for _ in range(2)] == [6, 7]
    assert outbox.take(MAX_SEND_BYTES) is None and not outbox


def test_a_piece_put_back_is_taken_again_before_the_rest():
    outbox = Outbox(channels=1, max_late=5)
    batch = FakeBatch(1, count=4, size=10)
    batch.data[:] = bytes(range(40))
    outbox.put([batch, FakeBatch(1, mark=99)], 0)
    outbox.put_back(outbox.take(MAX_SEND_BYTES), 1)
    outbox.put_back(outbox.take(20), 0)
    assert bytes(outbox.take(MAX_SEND_BYTES).data) == bytes(range(10, 40))
    assert outbox.take(MAX_SEND_BYTES).data[0] == 99


def test_close_drops_the_rest_and_joins(make):
    gate = threading.Event()
    sender, log, _, sockets = make(gate=gate)
    sender.send([FakeBatch(1) for _ in range(100)], 0)
    assert not flush(sender, 0.0)
    closing = threading.Thread(target=sender.close)
    closing.start()
    gate.set()
    closing.join(WAIT_SECONDS)
    assert not closing.is_alive() and sockets[0].closed and len(log) < 100
    sender.send([FakeBatch(1)], 1)  # ignored
    assert flush(sender, 0.0)
    sender.close()
    assert not sender._thread.is_alive()


def test_a_sender_that_fails_says_so_and_takes_no_more(make):
    sender, log, _, _ = make()
    batch = FakeBatch(1)
    batch.sign = None  # not callable
    sender.send([batch, FakeBatch(1)], 0)
    sender._thread.join(WAIT_SECONDS)
    assert isinstance(sender.failure, TypeError) and not log
    sender.send([FakeBatch(1)], 0)
    assert flush(sender, 0.0) or sender.failure
