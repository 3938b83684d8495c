"""Flood ports with datagrams at the full rate of loopback.

``python -m bench.transport.flood HOST PORTS`` floods the ports from one process on one core. The
kinds of datagrams, from the cheapest for the receiver to the most expensive:

- ``foreign``: random bytes.
- ``unknown``: well-formed datagrams of a session that does not exist.
- ``garbled``: well-formed datagrams with a wrong tag, of an existing session (``--session``,
  ``--worker``), or datagrams of the sample with one flipped bit each.
- ``replayed``: the unchanged datagrams of the sample.

A sample is a file of genuine datagrams of one size, one after the other.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
from pathlib import Path

import numpy as np

from thinwire.ops.routing.datagram_format import HEADER, MAGIC, VERSION
from thinwire.proto.udp import sockets as udp_sockets
from thinwire.proto.udp.sender import MAX_SEGMENTS, MAX_SEND_BYTES

KINDS = ("foreign", "unknown", "garbled", "replayed")
_PAUSE_SECONDS = 1e-4
_CALLS_BETWEEN_LOOKS = 64


def _well_formed(random: np.random.Generator, count: int, size: int, ids: tuple[int, int]) -> bytes:
    """Return datagrams with valid headers, random values and random tags."""
    rows = random.integers(0, 256, (count, size), np.uint8)
    headers = np.zeros(count, HEADER)
    headers["magic"], headers["version"], headers["channel"] = MAGIC, VERSION, 1
    headers["session"], headers["worker"] = ids
    headers["payload_bytes"] = size - HEADER.itemsize - 16
    headers["count"] = headers["entries"] = headers["payload_bytes"] // 4
    headers["num_blocks"], headers["scale"] = 1, 1.0
    headers["sequence"] = np.arange(count)
    rows[:, : HEADER.itemsize] = headers.view(np.uint8).reshape(count, -1)
    return rows.tobytes()


def datagrams(
    kind: str, size: int, sample: bytes | None = None, session: int | None = None, worker: int = 0
) -> bytes:
    """Return one buffer with as many datagrams of a kind as fit one send.

    Raises:
        ValueError: The kind needs a sample or a session, and neither is given.
    """
    random = np.random.default_rng(0)
    count = min(MAX_SEGMENTS, MAX_SEND_BYTES // size)
    if kind == "foreign":
        return random.integers(0, 256, count * size, np.uint8).tobytes()
    if kind == "unknown":
        return _well_formed(random, count, size, (int(random.integers(1 << 62)), worker))
    if sample is not None:
        rows = np.frombuffer(sample, np.uint8)[: count * size].copy()
        rows = rows[: len(rows) // size * size].reshape(-1, size)
        if kind == "garbled":
            bits = random.integers(0, size * 8, len(rows))
            rows[np.arange(len(rows)), bits // 8] ^= (1 << bits % 8).astype(np.uint8)
        return rows.tobytes()
    if kind == "garbled" and session is not None:
        return _well_formed(random, count, size, (session, worker))
    raise ValueError(f"{kind} datagrams need --sample" + " or --session" * (kind == "garbled"))


def flood(host: str, ports: list[int], seconds: float, data: bytes, size: int) -> int:
    """Send the buffer repeatedly, to one port after the other; return the number of datagrams."""
    sockets = udp_sockets.connect(host, ports, "off")
    cut = [(udp_sockets.SOL_UDP, udp_sockets.UDP_SEGMENT, struct.pack("=H", size))]
    cuts = all(map(udp_sockets.splits_sent, sockets)) and len(data) > size
    pieces = [data] if cuts else [data[at : at + size] for at in range(0, len(data), size)]
    num_sent = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for number in range(_CALLS_BETWEEN_LOOKS):
            try:
                for piece in pieces:
                    sockets[number % len(sockets)].sendmsg([piece], cut if cuts else [])
                    num_sent += len(piece) // size
            except BlockingIOError:
                time.sleep(_PAUSE_SECONDS)
            except ConnectionRefusedError:
                continue  # no process listens on the port, or not yet
    for connection in sockets:
        connection.close()
    return num_sent


def main() -> int:
    options = argparse.ArgumentParser(
        prog="python -m bench.transport.flood",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("host")
    options.add_argument("ports", type=lambda text: [int(port) for port in text.split(",")])
    options.add_argument("--seconds", type=float, default=10.0)
    options.add_argument("--kind", choices=KINDS, default="foreign")
    options.add_argument("--size", type=int, default=1472, help="size of each datagram in bytes")
    options.add_argument("--sample", type=Path, help="file of genuine datagrams of this size")
    options.add_argument("--session", type=int, help="id of an existing session")
    options.add_argument("--worker", type=int, default=0, help="id of the session's worker")
    arguments = options.parse_args()
    sample = arguments.sample.read_bytes() if arguments.sample else None
    try:
        data = datagrams(
            arguments.kind, arguments.size, sample, arguments.session, arguments.worker
        )
    except ValueError as error:
        options.error(str(error))
    start = time.monotonic()
    num_sent = flood(arguments.host, arguments.ports, arguments.seconds, data, arguments.size)
    took = time.monotonic() - start
    report = {"kind": arguments.kind, "datagrams": num_sent, "per_second": round(num_sent / took)}
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
