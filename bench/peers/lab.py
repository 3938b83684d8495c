"""Network namespaces for the nodes of a run: one for the server, and one for every worker.

A hub namespace with a bridge connects the nodes. A worker's link has the same rate limit both ways:
tbf queues at the worker's device and at the hub's port. The server's link has no limit. Bytes are
read from the queues, which count every segment with its Ethernet, IP and TCP headers. Without root,
all nodes run in the machine's own namespace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

SERVER = "server"
_NETWORK = "10.77.9"
_PORT = 7000
#: Size of the token bucket, about half a burst of segments, and size of a usual router's queue.
_BURST_BYTES, _QUEUE_BYTES = 32_000, 256_000
_SAMPLE_SECONDS = 0.5


def worker(number: int) -> str:
    """Return the name of a worker's place; workers are numbered from 0."""
    return f"worker{number}"


@dataclasses.dataclass(frozen=True)
class Place:
    """A place that a node runs in.

    Attributes:
        prefix: Words before the node's command, which enter the network namespace.
        address: IP address at which other nodes reach the node.
        interface: Network interface with this address.
    """

    prefix: tuple[str, ...]
    address: str
    interface: str


class Bytes:
    """Bytes that the workers' links have carried, over time.

    Args:
        samples: (monotonic seconds, bytes up, bytes down), in order of time.
    """

    def __init__(self, samples: Sequence[tuple[float, float, float]]) -> None:
        self._table = np.asarray(samples, np.float64).reshape(-1, 3)

    def at(self, moment: float) -> tuple[float, float]:
        """Return (bytes up, bytes down) of all workers until a moment, interpolated linearly."""
        times, up, down = self._table.T
        return float(np.interp(moment, times, up)), float(np.interp(moment, times, down))


def why_not() -> str:
    """Return the reason why network namespaces cannot be used; empty if they can be used."""
    if os.geteuid() != 0:
        return "not root"
    for name in ("ip", "tc"):
        if shutil.which(name) is None:
            return f"no {name}: install iproute2"
    name = f"twp{os.getpid()}try"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "name", "hub0", "type", "bridge")
        _run(
            "ip", "-n", name, "link", "add", "name", "try0", "type", "veth", "peer", "name", "try1"
        )
        _run("tc", "-n", name, *_queue("try0", 100.0))
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


class Lab:
    """Places that are connected by links of one rate.

    Args:
        places: Name -> place.
        ports: Port numbers that are free at every place.
        devices: (namespace, device) pairs: the first sequence has the queues of the workers'
            uplinks, the second sequence the queues of their downlinks.
    """

    def __init__(
        self,
        places: Mapping[str, Place],
        ports: Sequence[int],
        devices: tuple[Sequence[tuple[str, str]], Sequence[tuple[str, str]]] = ((), ()),
    ) -> None:
        self.places, self.ports, self._devices = places, ports, devices
        self._samples: list[tuple[float, float, float]] = []
        self._over = threading.Event()

    @property
    def counts(self) -> bool:
        """True if bytes are counted."""
        return bool(self._devices[0])

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Sample the queues' byte counters in a thread until the block ends."""
        thread = threading.Thread(target=self._count, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _count(self) -> None:
        while self.counts:
            over = self._over.is_set()
            up, down = (sum(_sent(*device) for device in devices) for devices in self._devices)
            self._samples.append((time.monotonic(), up, down))
            if over:
                return
            self._over.wait(_SAMPLE_SECONDS)

    def bytes(self) -> Bytes | None:
        """Return the counted bytes, or None if the lab does not count bytes."""
        return Bytes(self._samples) if self._samples else None


@contextlib.contextmanager
def namespaces(num_workers: int, mbps: float | None) -> Iterator[Lab]:
    """Create a lab of network namespaces, and delete them when the block ends.

    Args:
        num_workers: Number of workers.
        mbps: Rate of each worker's link, each way; None for no limit.
    """
    stem = f"twp{os.getpid()}"
    hub = f"{stem}hub"
    names = [SERVER, *map(worker, range(num_workers))]
    spaces, places, devices = [], {}, ([], [])
    try:
        spaces.append(hub)
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "name", "hub0", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "hub0", "up")
        for number, name in enumerate(names):
            space, port, address = f"{stem}{name}", f"port{number}", f"{_NETWORK}.{10 + number}"
            spaces.append(space)
            _join(hub, space, port, address)
            rate = None if name == SERVER else mbps
            _run("tc", "-n", space, *_queue("way0", rate))
            _run("tc", "-n", hub, *_queue(port, rate))
            places[name] = Place(("ip", "netns", "exec", space), address, "way0")
            if name != SERVER:
                devices[0].append((space, "way0"))
                devices[1].append((hub, port))
        yield Lab(places, range(_PORT, _PORT + 2 + num_workers), devices)
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


@contextlib.contextmanager
def this_machine(num_workers: int) -> Iterator[Lab]:
    """Yield a lab whose nodes all use the loopback interface; bytes are not counted."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2 + num_workers)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        ports = [listener.getsockname()[1] for listener in sockets]
    place = Place((), "127.0.0.1", "lo")
    yield Lab({name: place for name in [SERVER, *map(worker, range(num_workers))]}, ports)


def _join(hub: str, space: str, port: str, address: str) -> None:
    """Create a namespace with one device that is connected to a port of the hub's bridge."""
    _run("ip", "netns", "add", space)
    _run("ip", "-n", space, "link", "set", "lo", "up")
    _run(
        "ip",
        "-n",
        space,
        "link",
        "add",
        "name",
        "way0",
        "type",
        "veth",
        "peer",
        "name",
        port,
        "netns",
        hub,
    )
    _run("ip", "-n", space, "address", "add", f"{address}/24", "dev", "way0")
    _run("ip", "-n", space, "link", "set", "way0", "up")
    _run("ip", "-n", hub, "link", "set", port, "master", "hub0", "up")


def _queue(device: str, mbps: float | None) -> list[str]:
    """Return tc's arguments that create a device's root queue."""
    queue = ["qdisc", "add", "dev", device, "root"]
    if mbps is None:
        return [*queue, "pfifo", "limit", "10000"]
    sizes = ["burst", f"{_BURST_BYTES}", "limit", f"{_QUEUE_BYTES}"]
    return [*queue, "tbf", "rate", f"{mbps:g}mbit", *sizes]


def _sent(space: str, device: str) -> int:
    return sent_bytes(_run("tc", "-n", space, "-s", "-j", "qdisc", "show", "dev", device))


def sent_bytes(listing: str) -> int:
    """Return the number of bytes that the root queue in tc's JSON listing has sent.

    Raises:
        ValueError: The listing has no root queue.
    """
    queues: list[dict[str, Any]] = json.loads(listing)
    for queue in queues:
        if queue.get("root"):
            return int(queue["bytes"])
    raise ValueError(f"no root queue in {listing!r}")


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
