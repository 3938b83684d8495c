"""Run the receiver of the datagram benchmark: ``python -m bench.transport.datagram_end HOW``.

HOW selects the receiver. ``stack`` authenticates and reassembles the datagrams as a shard does, and
``stack_plain`` does so without joined datagrams (GRO). ``raw`` and ``joined`` only receive
datagrams, without and with GRO. The process prints a line of JSON with its ports, and at the end a
line with its figures. ``stack`` also prints a line for each complete step; it reads a line for each
step from standard input, which announces the step's datagrams. The end of standard input ends the
process.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
import threading
import time

import numpy as np

from thinwire.ops.routing.base import AnnouncedDatagrams, Manifest
from thinwire.ops.routing.datagram_format import FRAME_BYTES, DatagramSession
from thinwire.ops.routing.dgt_choices import DgtChoices
from thinwire.ops.routing.reassembler import ReassembledStep, Reassembler
from thinwire.ops.types import CodedValues, RangedBlock
from thinwire.proto.udp import sockets as udp_sockets
from thinwire.proto.udp.receiver import UdpReceiver
from thinwire.runtime.malloc import keep_freed_memory

NUM_ENTRIES = 1_200_000
BLOCK_BYTES = 4176  # three datagrams of 1,392 bytes of values
NUM_BLOCKS = -(-NUM_ENTRIES * 4 // BLOCK_BYTES)
CHANNELS = 3
STEPS = 30
MTU = 1472
SESSION = DatagramSession(0x0123456789ABCDEF, bytes(range(32)), worker=0)
DATAGRAMS_PER_STEP = -(-NUM_ENTRIES * 4 // (MTU - FRAME_BYTES))
_SILENCE_SECONDS = 1.0


def gradient(step: int) -> np.ndarray:
    """Return the gradient of a step, [NUM_ENTRIES] float32."""
    return np.arange(step, step + NUM_ENTRIES, dtype=np.float32)


def last_block(step: int) -> RangedBlock:
    """Return the block of a step that is sent reliably: the end of the tensor."""
    present = np.zeros(NUM_BLOCKS, bool)
    present[-1] = True
    entries = BLOCK_BYTES // 4
    values = gradient(step)[(NUM_BLOCKS - 1) * entries :]
    return RangedBlock(0, NUM_ENTRIES, None, CodedValues("float32", values), entries, present)


#: The wait of 10 s makes the reassembler wait for all datagrams.
RULES = DgtChoices(dgt_channels=CHANNELS, dgt_block_size=BLOCK_BYTES, dgt_wait_ms=10_000.0)


class Stack:
    """A shard without a core: receives, authenticates and reassembles datagrams."""

    def __init__(self, joining: bool) -> None:
        self._assembler = Reassembler(SESSION, [NUM_ENTRIES], RULES)
        self._lock = threading.Lock()
        self.receiver = UdpReceiver("127.0.0.1", CHANNELS, self, joining)
        self.first_at = self.first_cpu = 0.0
        self.closed: list[ReassembledStep] = []
        self.done = threading.Event()
        self.report: dict[str, float] = {}

    def deliver(self, channel: int, data: memoryview, size: int) -> int:
        if not self.first_at:
            self.first_at, self.first_cpu = time.monotonic(), time.process_time()
        with self._lock:
            before = sum(self._assembler.counters.num_datagrams)
            self._assembler.feed(data, size, time.monotonic())
            self._close()
            return sum(self._assembler.counters.num_datagrams) - before

    def next_deadline(self) -> float | None:
        with self._lock:
            return self._assembler.next_deadline()

    def tick(self, now: float) -> None:
        with self._lock:
            self._close(now)

    def marked(self, step: int, announced: list[AnnouncedDatagrams]) -> None:
        """Add a step's reliable block and the announcement of its datagrams."""
        manifest = Manifest(tuple(announced), 0.0, NUM_BLOCKS, 0, 1, 0)
        block = last_block(step)
        with self._lock:
            self._assembler.add_reliable(step, (block,), manifest, time.monotonic())
            self._assembler.end_step(step, time.monotonic())
            self._close()
        self.receiver.wake()

    def _close(self, now: float | None = None) -> None:
        done = self._assembler.close(time.monotonic() if now is None else now)
        if done is None:
            return
        self.closed.append(dataclasses.replace(done, blocks=(), flat=None))
        _answer({"step": done.step})
        if len(self.closed) == STEPS:
            self.report = {
                "end": time.monotonic(),
                "cpu": time.process_time() - self.first_cpu,
                "num_datagrams": sum(step.arrived for step in self.closed),
                "lost": sum(step.announced - step.arrived for step in self.closed),
                "right": bool(done.flat is not None and (done.flat == gradient(done.step)).all()),
            }
            self.done.set()


def _answer(line: dict) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _run_stack(joining: bool) -> None:
    stack = Stack(joining)
    stack.receiver.start()
    _answer({"ports": stack.receiver.ports})
    for line in sys.stdin:
        sent = json.loads(line)
        stack.marked(sent["step"], [AnnouncedDatagrams(*fields) for fields in sent["announced"]])
    stack.done.wait(15.0)
    _answer(stack.report)
    stack.receiver.close()


def _run_raw(joined: bool) -> None:
    """Receive into one buffer until almost all bytes have arrived or a second passes without any.

    The processor time of this loop is the limit that the stack is compared with.
    """
    (receiver,) = udp_sockets.bind("127.0.0.1", 1)
    if joined:
        udp_sockets.join_received(receiver)
    _answer({"ports": [receiver.getsockname()[1]]})
    receiver.settimeout(None)
    buffer = memoryview(bytearray(1 << 16))
    num_bytes, expected = receiver.recv_into(buffer), STEPS * DATAGRAMS_PER_STEP * MTU
    first_cpu, end = time.process_time(), time.monotonic()
    # Set the time-out in the kernel: a Python time-out costs an additional poll per datagram.
    receiver.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, np.array([int(_SILENCE_SECONDS), 0]).tobytes()
    )
    while num_bytes < 0.999 * expected:
        try:
            if joined:
                num_bytes += receiver.recvmsg_into([buffer], 64)[0]
            else:
                num_bytes += receiver.recv_into(buffer)
        except BlockingIOError:
            break
    end, cpu = time.monotonic(), time.process_time() - first_cpu
    _answer({"end": end, "cpu": cpu, "num_datagrams": num_bytes / MTU})
    sys.stdin.read()


if __name__ == "__main__":
    keep_freed_memory()
    how = sys.argv[1]
    if how.startswith("stack"):
        _run_stack(joining=how == "stack")
    else:
        _run_raw(how == "joined")
