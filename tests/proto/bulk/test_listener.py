"""A shard's bulk port: deadlines, one handshake per stream, strangers, the connection guard."""

import contextlib
import errno
import pathlib
import select
import socket
import threading
import time

import pytest

from tests.certificates import Papers
from tests.waiting import wait_until
from thinwire.proto.bulk import listener as module
from thinwire.proto.bulk.handshake import (
    NUMBER_BYTES,
    PROOF_BYTES,
    BulkFailure,
    NoBulkConnection,
    connect,
    number_of,
)
from thinwire.proto.bulk.listener import HANDSHAKE_SECONDS, MOST_STRANGERS, BulkListener
from thinwire.proto.bulk.switching import OFFER_SECONDS
from thinwire.runtime.run.credentials import NO_CREDENTIALS

WAIT_SECONDS = 20.0
PAPERS = Papers()


class Clock:
    """Stands still until it is set."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Client:
    """The stream of an offer."""

    peer = "ipv4:127.0.0.1:1"

    def __init__(self):
        self.lost, self.attached, self.arrived = False, [], threading.Event()

    def attach(self, connection):
        self.attached.append(connection)
        self.arrived.set()


@contextlib.contextmanager
def listening(protected=False, clock=time.monotonic):
    credentials = PAPERS.of("ps-0") if protected else NO_CREDENTIALS
    listener = BulkListener("127.0.0.1", credentials, None, clock)
    clients = []
    try:
        yield listener, clients
    finally:
        listener.stop()
        for client in clients:
            for connection in client.attached:
                connection.abort()


def offered(listener, clients):
    client = Client()
    clients.append(client)
    return client, listener.offer(client)


def dialled(offer, first=b""):
    connected = socket.create_connection(("127.0.0.1", offer.port), WAIT_SECONDS)
    connected.sendall(first)
    return connected


def is_closed(connected, seconds=WAIT_SECONDS):
    """Wait for the other end to close; False: it has not."""
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    deadline = time.monotonic() + seconds
    while poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
        try:
            if not connected.recv(1 << 16):
                return True
        except ConnectionResetError:
            return True
    return False


def accepted(port):
    """Number of connections that this machine has accepted at the port and not closed."""
    rows = [
        line.split()
        for family in ("tcp", "tcp6")
        for line in pathlib.Path(f"/proc/net/{family}").read_text().splitlines()[1:]
    ]
    # Columns 1 and 3: local address and state; 01 is established, 08 waits for a close.
    return sum(row[1].endswith(f":{port:04X}") and row[3] in ("01", "08") for row in rows)


@pytest.fixture
def started(monkeypatch):
    """Threads that a listening thread has started; others of this process start some, too."""
    threads, start = [], threading.Thread.start

    def noted(thread):
        if threading.current_thread().name == "bulk listener":
            threads.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    return threads


@pytest.mark.parametrize("protected", [False, True])
@pytest.mark.parametrize("names_offer", [False, True])
def test_bytes_that_trickle_do_not_move_a_deadline(names_offer, protected, started):
    """A byte always comes in time for a deadline that each read would begin again."""
    clock = Clock()
    with listening(protected, clock) as (listener, clients):
        client, offer = offered(listener, clients)
        first = offer.number if names_offer else b""
        with dialled(offer, first) as slow:
            # Part of a record of TLS, of a proof, or of a number: each lacks a byte at least.
            rest = b"\x16\x03\x01\x40\x00" + bytes(8) if protected else bytes(15)
            steps = len(rest) + 1
            for index in range(len(rest)):
                slow.sendall(rest[index : index + 1])
                assert not is_closed(slow, 0.01)
                clock.now += HANDSHAKE_SECONDS / steps
            assert not started  # a deadline needs no thread
            clock.now += 2 * HANDSHAKE_SECONDS / steps
            slow.sendall(b"\0" if names_offer else b"")
            assert is_closed(slow)
        assert not client.attached


def test_the_next_attempt_of_a_stream_ends_the_one_before():
    """A client therefore holds one descriptor, however often it connects."""
    with listening() as (listener, clients):
        client, offer = offered(listener, clients)
        former = dialled(offer, offer.number)
        for attempt in range(1, 6):
            newest = dialled(offer, number_of(offer.number, offer.key, attempt))
            assert is_closed(former)
            former.close()
            former = newest
        former.close()
        connect("127.0.0.1", offer, NO_CREDENTIALS, None, None, WAIT_SECONDS, 7).abort()
        assert client.arrived.wait(WAIT_SECONDS)


def test_half_a_handshake_ends_with_its_stream():
    with listening() as (listener, clients):
        others, _ = offered(listener, clients)  # the door stays open
        client, offer = offered(listener, clients)
        with dialled(offer, offer.number) as half:
            assert not is_closed(half, 0.05)
            client.lost = True
            listener.withdraw(client)
            assert is_closed(half)
        assert not others.lost


def test_a_true_number_with_a_false_proof_spends_one_attempt():
    """A neighbor has seen the number, and was faster than the client."""
    with listening() as (listener, clients):
        client, offer = offered(listener, clients)
        with dialled(offer, offer.number + bytes(PROOF_BYTES)) as neighbor:
            assert is_closed(neighbor)
        with pytest.raises(NoBulkConnection) as caught:
            connect("127.0.0.1", offer, NO_CREDENTIALS, None, None, WAIT_SECONDS)
        assert caught.value.failure is BulkFailure.TURNED_AWAY
        connect("127.0.0.1", offer, NO_CREDENTIALS, None, None, WAIT_SECONDS, 1)
        assert client.arrived.wait(WAIT_SECONDS)


def test_what_a_neighbor_has_seen_of_one_attempt_is_of_no_use(monkeypatch):
    with listening() as (listener, clients):
        client, offer = offered(listener, clients)
        sent = []

        class Recorded(socket.socket):
            def sendall(self, data, *flags):
                sent.append(bytes(data))
                super().sendall(data, *flags)

        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", Recorded)
            connect("127.0.0.1", offer, NO_CREDENTIALS, None, None, WAIT_SECONDS).abort()
        seen = b"".join(sent)
        assert seen[:NUMBER_BYTES] == offer.number and len(seen) == NUMBER_BYTES + PROOF_BYTES
        proof = seen[NUMBER_BYTES:]
        for first in (seen, number_of(offer.number, offer.key, 1) + proof):
            with dialled(offer, first) as neighbor:
                assert is_closed(neighbor)
        assert len(client.attached) == 1


def test_strangers_have_so_many_descriptors_and_no_more(started):
    with listening() as (listener, clients), contextlib.ExitStack() as stack:
        _, offer = offered(listener, clients)
        with dialled(offer, bytes(NUMBER_BYTES)) as first:
            assert is_closed(first)  # the listening thread has begun
        strangers = [stack.enter_context(dialled(offer, b"x")) for _ in range(2 * MOST_STRANGERS)]
        wait_until(
            lambda: all(is_closed(each, 0.0) for each in strangers[:MOST_STRANGERS]), WAIT_SECONDS
        )
        assert accepted(offer.port) == MOST_STRANGERS
        assert not started
        assert not any(is_closed(each, 0.0) for each in strangers[MOST_STRANGERS:])


def test_the_door_is_shut_when_the_last_offer_is_withdrawn_or_late():
    clock = Clock()
    with listening(clock=clock) as (listener, clients):
        client, offer = offered(listener, clients)
        listener.withdraw(client)
        with dialled(offer, bytes(NUMBER_BYTES)) as stranger:
            assert not is_closed(stranger, 0.1)  # the connection was not accepted
            client, offer = offered(listener, clients)
            assert is_closed(stranger)
        clock.now += OFFER_SECONDS + 1
        with dialled(offer) as knocking:  # wakes the thread, which finds the offer late
            # The thread removes the offer first and its numbers after it.
            wait_until(lambda: not listener._offers and not listener._numbers, WAIT_SECONDS)
            del knocking


def test_a_process_without_descriptors_does_not_run_in_circles(monkeypatch):
    clock, num_tries = Clock(), []
    with listening(clock=clock) as (listener, clients):
        client, offer = offered(listener, clients)
        accept = BulkListener._accept

        def exhausted(self, *arguments):
            num_tries.append(1)
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(BulkListener, "_accept", exhausted)
        with dialled(offer), dialled(offer):
            wait_until(lambda: num_tries, WAIT_SECONDS)
            time.sleep(0.1)
            assert len(num_tries) == 1
            monkeypatch.setattr(BulkListener, "_accept", accept)
            clock.now += module._REST_SECONDS
            connect("127.0.0.1", offer, NO_CREDENTIALS, None, None, WAIT_SECONDS)
        assert client.arrived.wait(WAIT_SECONDS)


@pytest.mark.parametrize("protected", [False, True])
def test_a_stop_ends_every_handshake(protected):
    with listening(protected) as (listener, clients):
        _, offer = offered(listener, clients)
        with dialled(offer, offer.number) as named, dialled(offer, b"x") as stranger:
            assert not is_closed(named, 0.05)
            listener.stop()
            assert is_closed(named) and is_closed(stranger)
        assert listener.offer(Client()) is None
