"""Network namespaces with queues limit rates, count bytes and are removed. Needs root."""

import subprocess
import sys
import time

import pytest

from bench.peers import lab

BYTES = 500_000
RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("ready", flush=True)
    stream, _ = server.accept()
    while stream.recv(1 << 16): pass
    stream.sendall(bytes(1))
"""
SEND = """
import socket, sys
stream = socket.create_connection((sys.argv[1], int(sys.argv[2])))
stream.sendall(bytes(int(sys.argv[3])))
stream.shutdown(socket.SHUT_WR)
stream.recv(1)
"""


def test_without_root_it_says_why(monkeypatch):
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    assert lab.why_not() == "not root"


def test_without_namespaces_all_are_on_loopback():
    with lab.this_machine(2) as made, made.counting():
        assert {place.address for place in made.places.values()} == {"127.0.0.1"}
        assert len(set(made.ports)) == 4
    assert made.bytes() is None


def _python(place, script, *arguments):
    command = [*place.prefix, sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_link_keeps_its_rate_and_counts_its_bytes():
    if obstacle := lab.why_not():
        pytest.skip(obstacle)
    with lab.namespaces(2, 40.0) as made, made.counting():
        server, first = made.places[lab.SERVER], made.places[lab.worker(0)]
        to = (server.address, made.ports[0])
        with _python(server, RECEIVE, *to) as receiver:
            assert receiver.stdout.readline() == "ready\n"
            began = time.monotonic()
            with _python(first, SEND, *to, BYTES):
                pass
            ended = time.monotonic()
    # The first burst is sent without delay.
    assert ended - began > 0.8 * BYTES * 8 / 40e6
    up, down = made.bytes().at(ended + 1000)
    assert BYTES < up < 1.25 * BYTES and 0 < down < 0.1 * BYTES
    spaces = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert not any(first.prefix[-1] == line.split()[0] for line in spaces.splitlines())
