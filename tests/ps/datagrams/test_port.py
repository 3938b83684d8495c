"""A shard's UDP ports on loopback: admission, counters, and a dead receiver."""

import contextlib
import socket

import numpy as np
import pytest

from tests.proto.grpc.test_dscp import connections
from tests.proto.udp_fakes import HOSTS
from tests.ps.port import LocalPort
from tests.ps.streams import Shard
from tests.waiting import wait_until
from thinwire.ops.routing.base import Transport
from thinwire.proto.grpc import ClientStream
from thinwire.proto.udp.sockets import ON_LINUX
from thinwire.ps.core import events
from thinwire.ps.datagrams.counters import BY_THE_KERNEL

LINUX_ONLY = pytest.mark.skipif(not ON_LINUX, reason="a filter of Linux")
WAIT_SECONDS = 20.0


@contextlib.contextmanager
def opened(host="127.0.0.1", choices=None, **transport):
    port = LocalPort(nb_workers=1, **{"dgt_wait_ms": WAIT_SECONDS * 1000} | (choices or {}))
    port.port.open(Transport(**transport), host)
    try:
        yield port
    finally:
        port.port.close()


def sent(port, host, channel, *datagrams):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as each:
        for data in datagrams:
            each.sendto(data, (host, port.port.ports[channel]))


@pytest.mark.parametrize("host", HOSTS)
def test_datagrams_come_in_by_udp(host):
    with opened(host) as port:
        worker = port.join(1)
        assert list(worker.welcome.datagrams.ports) == list(port.port.ports)
        assert len(set(port.port.ports)) == port.run.method.router.channels
        outgoing = worker.begin(np.ones(28, np.float32))
        for data, size in worker.datagrams(outgoing):
            each = [data[at : at + size] for at in range(0, len(data), size)]
            sent(port, host, 0, *each)
        worker.mark(outgoing)
        wait_until(lambda: port.turn().pushed, WAIT_SECONDS)
        np.testing.assert_array_equal(port.pushed[0].update.values, np.ones(28, np.float32))


@LINUX_ONLY
@pytest.mark.parametrize("host", HOSTS)
def test_what_is_not_ours_ends_in_the_kernel_and_is_counted(host):
    with opened(host) as port:
        worker = port.join(1)
        (data, size), *_ = worker.datagrams(worker.begin())
        foreign = bytearray(data[:size])
        foreign[8:16] = b"another!"
        rng = np.random.default_rng(2)
        noise = [rng.bytes(int(length)) for length in rng.integers(0, 1400, 50)]
        sent(port, host, 0, *noise, bytes(foreign), b"")
        found = port.port.counts()
        assert found.dropped == {BY_THE_KERNEL: 52}
        sent(port, host, 0, data[:size])  # the genuine one passes
        wait_until(lambda: sum(port.counters(1)[0].num_datagrams), WAIT_SECONDS)


def test_a_receiver_that_fails_is_told_once_and_workers_change_to_the_stream(caplog):
    with opened() as port:
        worker = port.join(1)
        waiting = worker.begin()
        worker.mark(waiting)  # waits for datagrams that never arrive
        receiver = port.port._udp
        receiver._owner = None
        receiver.wake()
        wait_until(lambda: receiver.failure is not None, WAIT_SECONDS)
        for _ in range(3):
            port.tick()
        assert caplog.text.count("UDP sockets") == 1
        assert port.port.ports == () and port.receiver.session_ids() == []
        assert [(each.reason, each.step) for each in port.refusals] == [("NOT_MEMBER", 1)]
        again = port.join(1, worker.incarnation, reconnects=True)
        assert not again.welcome.datagrams.ports
        for data, size in again.datagrams(waiting):
            port.receiver.receive_from_stream(memoryview(data), size)
        again.mark(waiting)
        assert port.core.version == 1
        assert port.port.counts().workers[1].num_closed == 1


def test_in_the_stream_alone_there_are_no_ports():
    with opened(dgt_transport="grpc") as port:
        worker = port.join(1)
        assert not worker.welcome.datagrams.ports and worker.welcome.datagrams.key


@pytest.mark.parametrize(
    ("choices", "useless"),
    [
        ({"dgt_reception": "drop", "dgt_wait_ms": 0.0}, True),
        ({"dgt_reception": "drop", "dgt_wait_ms": 5.0}, False),
        ({"dgt_reception": "diff", "dgt_wait_ms": 0.0}, False),
    ],
)
def test_what_comes_behind_the_push_and_is_never_waited_for_is_warned_of(choices, useless, caplog):
    with opened(choices=choices, dgt_transport="grpc"):
        assert ("--dgt_wait_ms=0" in caplog.text) == useless


@LINUX_ONLY
@pytest.mark.parametrize(
    ("method", "marks", "tos"),
    [("dgt", "cs", 96), ("dgt", "compact", 160), ("dgt", "off", 0), ("asgd", "cs", 0)],
)
def test_replies_have_the_mark_of_the_reliable_stream(method, marks, tos):
    server = Shard(method).server
    port = server.listen("127.0.0.1", 0, marks)
    stream = ClientStream(f"127.0.0.1:{port}")
    try:
        stream.open(WAIT_SECONDS)
        assert connections(port) == {True: tos, False: 0}
    finally:
        stream.close(0.0)
        server.server.stop()


@pytest.mark.parametrize(
    ("reason", "given_up"),
    [("STALE_GENERATION", True), ("OUTLIER", True), ("STALE_EPOCH", False), ("NOT_MEMBER", False)],
)
def test_what_comes_late_of_a_push_that_was_given_up_is_not_used(reason, given_up):
    """The worker has all of it back, or forgets it; a push that comes again has not been."""
    server, dropped = Shard("dgt").server, []
    server.datagrams.receiver.on_push_refused = lambda *push: dropped.append(push)
    server.writer.reject(events.Reject(2, 2000, reason, "made here", 7, 1))
    assert dropped == ([(2, 7)] if given_up else [])


def test_datagrams_without_a_byte_are_counted():
    with opened() as port:
        port.port._udp.admit = lambda start, offset, numbers: False  # no filter here
        port.join(1)
        sent(port, "127.0.0.1", 1, b"", b"", b"x")
        wait_until(lambda: port.port.counts().dropped.get("truncated") == 1, WAIT_SECONDS)
        assert port.port.counts().dropped == {"empty": 2, "truncated": 1}
