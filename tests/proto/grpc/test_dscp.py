"""gRPC's TCP sockets have the configured class of service (DSCP) on both ends."""

import os
import socket
import sys

import pytest

from thinwire.proto import grpc
from thinwire.proto.grpc.common import channel_options

WAIT_SECONDS = 20.0


def connections(port):
    """Return {is the server's end: TOS} of this process's TCP connections with a port."""
    found = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(number)) as each:
                ends = each.getsockname()[1], each.getpeername()[1]
                six = each.family == socket.AF_INET6
                level = socket.IPPROTO_IPV6 if six else socket.IPPROTO_IP
                option = socket.IPV6_TCLASS if six else socket.IP_TOS
                if port in ends:
                    found[ends[0] == port] = each.getsockopt(level, option)
        except (OSError, IndexError, TypeError):
            continue  # no connected socket
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for sockets in /proc")
@pytest.mark.parametrize(("client", "server"), [(None, None), (24, 40)])
def test_each_end_marks_what_it_sends(client, server):
    def handler(stream):
        for data in stream.incoming():
            stream.send((data,))

    serving = grpc.GrpcServer("127.0.0.1", 0, handler, dscp=server)
    stream = grpc.ClientStream(f"127.0.0.1:{serving.port}", dscp=client)
    try:
        stream.open(WAIT_SECONDS)
        stream.send((b"marked",))
        assert stream.receive(WAIT_SECONDS) == b"marked"
        ends = connections(serving.port)
        assert {mine: byte >> 2 for mine, byte in ends.items()} == {
            True: server or 0,
            False: client or 0,
        }
    finally:
        stream.close()
        serving.stop()


def test_without_a_class_the_options_are_as_ever():
    assert "grpc.dscp" not in dict(channel_options(20.0))
    assert dict(channel_options(20.0, 0))["grpc.dscp"] == 0
    assert channel_options(20.0, 8)[1:] == channel_options(20.0)
