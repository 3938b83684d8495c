"""Datagrams over loopback: IPv4 and IPv6, with and without the kernel's batching, timers."""

import contextlib
import dataclasses
import socket

import pytest

from tests.proto.udp_fakes import HOSTS, LINUX_ONLY, WAIT_SECONDS, Notes, flush, poured, receiving
from thinwire.ops.types import ConfigurationError
from thinwire.proto.udp import sockets as udp_sockets
from thinwire.proto.udp.receiver import UdpReceiver
from thinwire.proto.udp.sender import UdpSettings, connect
from thinwire.proto.udp.sockets import queue_priority, tos

KEY = bytes(range(32))
TOO_MANY = [number.to_bytes(8, "big") for number in range(1000)]  # for a filter of the kernel


@dataclasses.dataclass
class FilledBatch:
    channel: int
    size: int
    count: int
    mark: int = 0

    def __post_init__(self):
        self.data = memoryview(bytearray(self.size * self.count))
        for number in range(self.count):
            self.data[number * self.size] = number
            self.data[number * self.size + 1] = self.mark

    def sign(self, key):
        assert key == KEY


@contextlib.contextmanager
def sending(receiver, host="127.0.0.1", bucket=None, **options):
    sender = connect(host, receiver.ports, UdpSettings(KEY, **options), bucket)
    try:
        yield sender
    finally:
        sender.close()


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("segmentation", [False, True])
@pytest.mark.parametrize("joining", [False, True])
def test_datagrams_arrive_as_they_were_cut(host, segmentation, joining):
    with (
        receiving(host=host, joining=joining) as (receiver, owner),
        sending(receiver, host=host, segmentation=segmentation) as sender,
    ):
        batches = [FilledBatch(2, 1000, 40, 7), FilledBatch(2, 36, 3, 8), FilledBatch(2, 80, 1, 9)]
        sender.send(batches, 0)
        assert flush(sender)
        whole = b"".join(bytes(batch.data) for batch in batches)
        arrived = owner.take(44)
        assert {channel for channel, _ in arrived} == {2}
        assert [len(data) for _, data in arrived] == [1000] * 40 + [36] * 3 + [80]
        assert b"".join(data for _, data in arrived) == whole
        sent, received = sender.counts()[1], receiver.counts()[1]
        header = 28 if host == "127.0.0.1" else 48
        assert sent.datagrams == received.datagrams == 44
        assert sent.bytes_on_wire == received.num_bytes + 44 * header
        assert received.num_bytes == len(whole)
        receiver.close()
        assert receiver.counts()[1].taken == 44
        assert [counts.datagrams for counts in receiver.counts()] == [0, 44, 0]


@pytest.mark.parametrize("host", HOSTS)
def test_each_channel_has_its_port_and_class(host):
    receiver = UdpReceiver(host, 3, Notes())
    assert len(set(receiver.ports)) == 3 and 0 not in receiver.ports
    six = host == "::1"
    level = socket.IPPROTO_IPV6 if six else socket.IPPROTO_IP
    option = socket.IPV6_TCLASS if six else socket.IP_TOS
    for scheme in ("cs", "compact"):
        sockets = udp_sockets.connect(host, receiver.ports, scheme)
        for channel, each in enumerate(sockets, 1):
            assert each.getsockopt(level, option) == tos(scheme, channel, 3)
            assert each.getpeername()[1] == receiver.ports[channel - 1]
            if udp_sockets.ON_LINUX:
                found = each.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)
                assert found == queue_priority(channel, 3)
                discover = 23 if six else 10
                assert each.getsockopt(level, discover) == 2
            each.close()
    receiver.close()


def test_unmarked_sockets_keep_the_system_s_class():
    receiver = UdpReceiver("127.0.0.1", 1, Notes())
    (each,) = udp_sockets.connect("127.0.0.1", receiver.ports, "off")
    assert each.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 0
    each.close()
    receiver.close()


def test_a_refused_option_is_one_warning_and_no_error(monkeypatch):
    warnings = []
    monkeypatch.setattr(udp_sockets.logging, "warning", lambda *words: warnings.append(words))
    monkeypatch.setattr(udp_sockets, "_allows", lambda *_: False)
    for each in udp_sockets.connect("127.0.0.1", (9, 10, 11), "cs"):
        each.close()
    ((text, names),) = warnings
    assert "rejects" in text and "IP_TOS" in names


def test_unknown_hosts_are_named():
    with pytest.raises(ConfigurationError, match="no-such-host.invalid"):
        udp_sockets.connect("no-such-host.invalid", (9,), "cs")
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1.*--ip_PS"):
        UdpReceiver("192.0.2.1", 1, Notes())


@LINUX_ONLY
@pytest.mark.parametrize("host", HOSTS)
def test_the_usual_mtu_fits_an_ethernet_of_either_family(host, monkeypatch):
    """1,500 bytes less the headers: 1,472 over IPv4, 1,452 over IPv6."""
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    limit = 1500 - udp_sockets.overhead_bytes(family)
    monkeypatch.setattr(udp_sockets, "path_limit", lambda _: limit)
    with receiving(1, host=host) as (receiver, _):
        sender = connect(host, receiver.ports, UdpSettings(KEY))
        assert sender.mtu == {28: 1472, 48: 1452}[1500 - limit]
        sender.close()


def test_an_mtu_that_the_route_does_not_carry_is_lowered_or_refused(monkeypatch):
    monkeypatch.setattr(udp_sockets, "path_limit", lambda _: 800)
    with receiving(1) as (receiver, _), sending(receiver, mtu=1472) as sender:
        assert sender.mtu == 800
    with pytest.raises(ConfigurationError, match="--dgt_mtu=800 or less"):
        connect("127.0.0.1", (9,), UdpSettings(KEY, mtu=1602))


@LINUX_ONLY
def test_the_kernel_knows_what_loopback_carries():
    (each,) = udp_sockets.connect("127.0.0.1", (9,), "cs")
    assert 1472 <= udp_sockets.path_limit(each) <= 1 << 17
    each.close()


def test_nobody_listening_is_counted():
    receiver = UdpReceiver("127.0.0.1", 1, Notes())
    with sending(receiver) as sender:
        receiver.close()
        for step in range(10):
            sender.send([FilledBatch(1, 80, 1)], step)
            assert flush(sender)
        assert sender.counts()[0].datagrams == 10
        assert sender.counts()[0].unreachable > 0 and sender.failure is None


def test_the_timer_runs_when_due_and_after_a_wake():
    with receiving(1) as (receiver, owner):
        owner.deadline = 0.0  # long past
        receiver.wake()
        assert owner.ticks.get(timeout=WAIT_SECONDS) > 0
        assert owner.ticks.empty()
        owner.deadline = receiver._clock() + 0.02
        due = owner.deadline
        receiver.wake()
        assert owner.ticks.get(timeout=WAIT_SECONDS) >= due


def test_empty_datagrams_are_counted_but_not_handed_over():
    with receiving(1) as (receiver, owner):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
            each.connect(("127.0.0.1", receiver.ports[0]))
            each.send(b"")
            each.send(b"something")
        assert owner.take(1) == [(1, b"something")]
        receiver.close()
        assert (receiver.counts()[0].datagrams, receiver.counts()[0].taken) == (2, 1)


@pytest.mark.parametrize("started", [False, True])
def test_close_joins_and_may_be_called_twice(started):
    receiver = UdpReceiver("127.0.0.1", 2, Notes())
    if started:
        receiver.start()
    ports = receiver.ports
    receiver.close()
    receiver.close()
    receiver.wake()
    assert not receiver._thread.is_alive()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
        each.bind(("127.0.0.1", ports[0]))  # is free again


def test_an_owner_that_fails_ends_the_thread_and_is_kept():
    with receiving(1) as (receiver, owner):
        owner.tick = None  # not callable
        owner.deadline = 0.0
        receiver.wake()
        receiver._thread.join(WAIT_SECONDS)
        assert isinstance(receiver.failure, TypeError)


@LINUX_ONLY
def test_what_the_kernel_dropped_is_known():
    receiver = UdpReceiver("127.0.0.1", 1, Notes())
    receiver._channels[0].socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    poured(receiver, 200)
    assert receiver.counts()[0].kernel_drops > 0
    receiver.close()
    assert receiver.counts()[0].kernel_drops > 0


@LINUX_ONLY
@pytest.mark.parametrize("host", HOSTS)
def test_the_kernel_keeps_out_what_is_for_nobody(host):
    known = [bytes([number]) * 8 for number in range(200)]
    good = b"DGT1" + b"...." + known[150] + b"rest"
    bad = [
        b"",
        b"DGT",
        b"DGT1" + b"...." + known[150][:7],  # ends within the number
        b"DGT2" + b"...." + known[150],
        b"DGT1" + b"...." + known[150][:7] + b"!",
        b"DGT1" + b"...." + b"!" + known[150][1:],
        b"DGT1" + b"...." + bytes([200]) * 8,
        known[150] * 3,
    ]
    with receiving(1, host=host) as (receiver, owner):
        family = socket.AF_INET6 if host == "::1" else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as each:
            each.connect((host, receiver.ports[0]))
            assert receiver.admit(b"DGT1", 8, known)
            for data in (*bad, good):
                each.send(data)
            assert owner.take(1) == [(1, good)]
            assert receiver.counts()[0].kernel_drops == len(bad)
            assert receiver.admit(b"DGT1", 8, known[:150])
            each.send(good)
            assert not receiver.admit(b"DGT1", 8, TOO_MANY)
            each.send(b"all come in")
            assert owner.take(1) == [(1, b"all come in")]


@LINUX_ONLY
@pytest.mark.parametrize("num_workers", [300, 400, 600, 800])
def test_new_workers_are_heard_where_the_kernel_takes_no_longer_filter(num_workers):
    """Its memory for filters may be spent long before the longest program it knows."""
    numbers = [number.to_bytes(8, "little") for number in range(num_workers)]
    one_more = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with receiving(1) as (receiver, owner), one_more as each:
        each.connect(("127.0.0.1", receiver.ports[0]))
        assert receiver.admit(b"DGT1", 8, numbers[:200])
        receiver.admit(b"DGT1", 8, numbers)
        newest = b"DGT1" + b"...." + numbers[-1] + b"rest"
        each.send(newest)
        assert owner.take(1) == [(1, newest)]
