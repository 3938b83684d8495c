"""An echo server for tests of streams, and its clients."""

import contextlib

from thinwire.proto import grpc

WAIT_SECONDS = 20.0


def echo(stream):
    """Send every received frame back."""
    for data in stream.incoming():
        stream.send((data,))


@contextlib.contextmanager
def serving(handler, guard=None):
    """A server, while it is needed."""
    server = grpc.GrpcServer("127.0.0.1", 0, handler, guard=guard)
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def connected(server, link=None):
    """A stream to it, open."""
    stream = grpc.ClientStream(f"127.0.0.1:{server.port}", link)
    try:
        stream.open(WAIT_SECONDS)
        yield stream
    finally:
        stream.close()
