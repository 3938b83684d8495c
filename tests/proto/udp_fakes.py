"""A receiver's owner, addresses of this machine, and other helpers of the UDP tests."""

import contextlib
import queue
import socket
import time

import pytest

from thinwire.proto.udp.receiver import UdpReceiver
from thinwire.proto.udp.sockets import ON_LINUX

WAIT_SECONDS = 20.0
LINUX_ONLY = pytest.mark.skipif(not ON_LINUX, reason="options of Linux")


def flush(sender, seconds=WAIT_SECONDS):
    """Wait until the sender has nothing to send and its thread waits for more, or has ended."""
    deadline = time.monotonic() + seconds
    while True:
        with sender._changed:
            idle = sender._changed._waiters or not sender._thread.is_alive()
            if idle and not sender._outbox:
                return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.001)


class Notes:
    """An owner that copies everything it receives."""

    def __init__(self):
        self.datagrams = queue.SimpleQueue()
        self.ticks = queue.SimpleQueue()
        self.deadline = None
        self.share = 1

    def deliver(self, channel, data, size):
        count = -(-len(data) // size)
        for start in range(0, len(data), size):
            self.datagrams.put((channel, bytes(data[start : start + size])))
        return count * self.share

    def next_deadline(self):
        return self.deadline

    def tick(self, now):
        self.deadline = None
        self.ticks.put(now)

    def take(self, count):
        return [self.datagrams.get(timeout=WAIT_SECONDS) for _ in range(count)]


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


HOSTS = [
    "127.0.0.1",
    pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")),
]


@contextlib.contextmanager
def receiving(channels=3, host="127.0.0.1", **options):
    owner = Notes()
    receiver = UdpReceiver(host, channels, owner, **options)
    try:
        receiver.start()
        yield receiver, owner
    finally:
        receiver.close()


def poured(receiver, count):
    """Put datagrams into the first channel's buffer, as a flood does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
        each.connect(("127.0.0.1", receiver.ports[0]))
        for _ in range(count):
            each.send(b"x" * 80)
