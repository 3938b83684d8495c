"""Run the servers of the transport benchmark: ``python -m bench.transport.far_end``."""

from __future__ import annotations

import json
import queue
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import numpy as np

from thinwire.proto import framing
from thinwire.proto import grpc as proto_grpc
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.security.connection_guard import ConnectionGuard, Limits
from thinwire.runtime.malloc import keep_freed_memory

SMALL_BYTES = 1024
LARGEST_BYTES = 400_000_000
_BARE_OPTIONS = [("grpc.max_receive_message_length", 2 * framing.MAX_MESSAGE_BYTES)]


def limit(_: object) -> int:
    """Return the largest payload of the benchmark as the limit of any message."""
    return LARGEST_BYTES


def _answer_raw(listener: socket.socket) -> None:
    """Serve raw clients: read an order of 9 bytes (kind, size), and execute it.

    ``<`` sends `size` bytes. ``>`` receives `size` bytes and answers one byte. ``=`` receives and
    returns `size` bytes, at most 1 KB.
    """
    data = memoryview(bytearray(LARGEST_BYTES))
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            while order := connection.recv(9, socket.MSG_WAITALL):
                view = data[: int.from_bytes(order[1:], "little")]
                if order[:1] == b"<":
                    connection.sendall(view)
                else:
                    receive(connection, view)
                    connection.sendall(view[:SMALL_BYTES] if order[:1] == b"=" else b"!")


def receive(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        view = view[connection.recv_into(view) :]


def _answer_bare(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
    """Answer each message that ends a transfer with its first 1 KB; store nothing."""
    for data in requests:
        if len(data) < framing.MAX_MESSAGE_BYTES:
            yield data[:SMALL_BYTES]


class _BareService(grpc.GenericRpcHandler):
    """A gRPC stream without any Thinwire code."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Return the handler of `_answer_bare` for every method."""
        return grpc.stream_stream_rpc_method_handler(_answer_bare)


def _serve_bare() -> tuple[grpc.Server, int]:
    server = grpc.server(futures.ThreadPoolExecutor(2), options=_BARE_OPTIONS)
    server.add_generic_rpc_handlers((_BareService(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


def _serve_stack() -> proto_grpc.Server:
    """Serve a shard without a core: streams assemble messages, one writer thread answers them."""
    model = np.random.default_rng(0).integers(0, 255, LARGEST_BYTES, dtype=np.uint8)
    model_view = model.data
    pending: queue.SimpleQueue[tuple[proto_grpc.ServerStream, pb.ToServer, memoryview]]
    pending = queue.SimpleQueue()

    def write() -> None:
        while True:
            stream, message, payload = pending.get()
            reply = pb.ToClient()
            reply.reply.version = message.push.step
            size = message.pull.base_version
            if message.WhichOneof("body") == "push":
                size = len(payload) if len(payload) <= SMALL_BYTES else 0
            reply.reply.blocks.add(count=size // 4)
            stream.send(framing.frames(reply, [model_view[:size]]))

    def handle(stream: proto_grpc.ServerStream) -> None:
        welcome = pb.ToClient(welcome=pb.Welcome(bulk=stream.offer_bulk()))
        stream.send((framing.frame(welcome),))
        assembler = framing.MessageAssembler(pb.ToServer, limit)
        for data in stream.incoming():
            assembled = assembler.feed(data)
            if assembled is not None:
                pending.put((stream, *assembled))

    threading.Thread(target=write, daemon=True).start()
    guard = ConnectionGuard(limits=Limits(hello_seconds=3600.0))  # these clients send no Hello
    return proto_grpc.GrpcServer("127.0.0.1", 0, handle, guard=guard)


def serve() -> None:
    """Run all servers until standard input ends; print their ports as one line of JSON."""
    keep_freed_memory()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_answer_raw, args=(listener,), daemon=True).start()
    bare, bare_port = _serve_bare()
    stack = _serve_stack()
    ports = {"raw": listener.getsockname()[1], "bare": bare_port, "stack": stack.port}
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    stack.stop()
    bare.stop(0)


if __name__ == "__main__":
    serve()
