"""Compare the datagram path with 1 Gbit/s Ethernet, and its processor time with raw sockets.

A sending and a receiving process use loopback, with blocks of 4,176 bytes on three channels. The
whole gradient except its end is sent in datagrams. Thinwire's path has all work of a worker and a
shard: cut and sign; receive, authenticate and reassemble. Contenders run alternately; the figures
are medians.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from bench.table import Row
from bench.transport.datagram_end import (
    BLOCK_BYTES,
    CHANNELS,
    DATAGRAMS_PER_STEP,
    MTU,
    NUM_BLOCKS,
    NUM_ENTRIES,
    SESSION,
    STEPS,
    gradient,
)
from thinwire.ops.routing.base import UnreliableBlocks, ValueEncoding
from thinwire.ops.routing.packetizer import Packetizer
from thinwire.proto.udp import sockets as udp_sockets
from thinwire.proto.udp.sender import UdpSettings, connect, pacing
from thinwire.runtime.malloc import keep_freed_memory

#: Rate of values in full datagrams on 1 Gbit/s Ethernet: 1,392 of every 1,538 bytes on the wire.
GOAL_MB_PER_SECOND = 113.0
_PACE_MBPS = 1100.0
_PACE_BYTES = 44 * MTU  # the most that the kernel splits in one call
_PAYLOAD_MB = STEPS * NUM_ENTRIES * 4 / 1e6
_ROUNDS = 3
_MOST_OPEN = 2  # maximum number of incomplete steps, as in a reassembler


def _part(step: int) -> UnreliableBlocks:
    unreliable = NUM_BLOCKS - 1
    return UnreliableBlocks(
        slot=0,
        size=NUM_ENTRIES,
        block_entries=BLOCK_BYTES // 4,
        blocks=np.arange(unreliable),
        channels=(1 + np.arange(unreliable) * CHANNELS // unreliable).astype(np.uint8),
        encoding=ValueEncoding.FLOAT32,
        indices=None,
        data=gradient(step),
        scales=np.ones(NUM_BLOCKS, np.float32),
        lows=np.zeros(NUM_BLOCKS, np.float32),
    )


@contextlib.contextmanager
def _far_end(how: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    command = [sys.executable, "-m", "bench.transport.datagram_end", how]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as receiver:
        try:
            yield receiver, json.loads(_pipes(receiver)[1].readline())["ports"]
        finally:
            receiver.kill()


def _pipes(receiver: subprocess.Popen[str]) -> tuple[Any, Any]:
    if receiver.stdin is None or receiver.stdout is None:
        raise RuntimeError("the receiving process has no pipes")
    return receiver.stdin, receiver.stdout


def _stack(mbps: float, plain: bool = False) -> dict[str, float]:
    """Send `STEPS` gradients as a worker does, with up to `_MOST_OPEN` incomplete steps."""
    with _far_end("stack_plain" if plain else "stack") as (receiver, ports):
        stdin, stdout = _pipes(receiver)
        parts = [_part(step) for step in range(STEPS)]
        sending = UdpSettings(SESSION.key, mtu=MTU, segmentation=not plain)
        sender = connect("127.0.0.1", ports, sending, pacing(mbps))
        sealer = Packetizer(SESSION, MTU, CHANNELS)
        start, cpu = time.monotonic(), time.process_time()
        for step, part in enumerate(parts):
            sealed = sealer.seal(step, [part])
            if step >= _MOST_OPEN:
                stdout.readline()
            sender.send(sealed.batches, step)
            announced = [[batch.channel, batch.first, batch.count] for batch in sealed.announced]
            stdin.write(json.dumps({"step": step, "announced": announced}) + "\n")
            stdin.flush()
        for _ in range(_MOST_OPEN):
            stdout.readline()
        cpu = time.process_time() - cpu
        stdin.close()
        report = json.loads(stdout.readline())
        sender.close()
    return {"seconds": report["end"] - start, "sender_cpu": cpu, **report}


def _raw(joined: bool, mbps: float) -> dict[str, float]:
    """Send equally many prepared datagrams through one raw socket, with the same pacing."""
    with _far_end("joined" if joined else "raw") as (receiver, ports):
        _, stdout = _pipes(receiver)
        (sender,) = udp_sockets.connect("127.0.0.1", ports, "off")
        sender.setblocking(True)
        data = memoryview(bytearray(_PACE_BYTES))
        pieces = [data[at : at + MTU] for at in range(0, len(data), MTU)]
        cut = [(udp_sockets.SOL_UDP, udp_sockets.UDP_SEGMENT, MTU.to_bytes(2, sys.byteorder))]
        bucket = pacing(mbps)
        start, cpu = time.monotonic(), time.process_time()
        for _ in range(-(-STEPS * DATAGRAMS_PER_STEP // len(pieces))):
            while bucket and (wait := bucket.wait_seconds(time.monotonic())) > 0:
                time.sleep(max(wait, 5e-5))
            if joined:
                sender.sendmsg([data], cut)
            else:
                for piece in pieces:
                    sender.send(piece)
            if bucket:
                bucket.take(time.monotonic(), len(data) + 28 * len(pieces))
        cpu = time.process_time() - cpu
        report = json.loads(stdout.readline())
        sender.close()
    return {"seconds": report["end"] - start, "sender_cpu": cpu, **report}


def _medians(calls: Sequence[Callable[[], dict[str, float]]]) -> list[dict[str, float]]:
    results_of: list[list[dict[str, float]]] = [[] for _ in calls]
    for _ in range(_ROUNDS):
        for call, results in zip(calls, results_of, strict=True):
            results.append(call())
    return [
        {name: statistics.median(result[name] for result in results) for name in results[0]}
        for results in results_of
    ]


def _speed(work: str, result: dict[str, float], goal: float | None) -> Row:
    speed = _PAYLOAD_MB / result["seconds"]
    total = result["num_datagrams"] + result["lost"]
    note = f"{result['lost']:.0f} of {total:.0f} datagrams lost"
    note += "" if result["right"] else "; WRONG VALUES"
    return Row(
        work, speed, "MB/s", GOAL_MB_PER_SECOND, speed / GOAL_MB_PER_SECOND, goal, "higher", note
    )


def _cost(end: str, ours: float, peer: float, whose: str) -> Row:
    scale = 1e3 / _PAYLOAD_MB
    return Row(
        f"processor time {end}, against {whose}",
        ours * scale,
        "ms/MB",
        peer * scale,
        ours / peer,
        None,
        "lower",
        "for comparison",
    )


def rows() -> list[Row]:
    """Measure the contenders, and return the rows of the table."""
    keep_freed_memory()
    ours, unpaced, one_by_one, plain, joined = _medians(
        [
            lambda: _stack(_PACE_MBPS),
            lambda: _stack(0.0),
            lambda: _stack(_PACE_MBPS, plain=True),
            lambda: _raw(False, _PACE_MBPS),
            lambda: _raw(True, _PACE_MBPS),
        ]
    )
    result = [
        _speed(f"end to end, paced at {_PACE_MBPS:g} Mbit/s", ours, 1.0),
        _speed("end to end, unpaced", unpaced, None),
        _speed("end to end, paced, without GSO/GRO", one_by_one, None),
    ]
    for peer, whose in ((plain, "raw sockets"), (joined, "raw GSO/GRO")):
        result += [
            _cost("sending", ours["sender_cpu"], peer["sender_cpu"], whose),
            _cost("receiving", ours["cpu"], peer["cpu"], whose),
        ]
    return result
