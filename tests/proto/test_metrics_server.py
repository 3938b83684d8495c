"""A node's metrics port serves metrics that the scraper's own library can parse."""

import base64
import contextlib
import http.client
import logging
import logging.handlers
import math
import queue
import socket
import ssl
import struct
import threading
import time
import types
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.certificates import Papers
from thinwire.ops.types import ConfigurationError
from thinwire.proto import metrics_server
from thinwire.proto.metrics_server import BUCKETS, MetricsPort, open_port
from thinwire.runtime.telemetry.instruments import counter, gauge, histogram

ABOUT = {"node": "ps-0", "role": "PS", "method": "bsp", "protocol_version": "1"}


@contextlib.contextmanager
def listening(read, host="127.0.0.1"):
    port = MetricsPort(host, 0, ABOUT, read)
    try:
        yield port
    finally:
        port.close()


def scraped(port, host="127.0.0.1"):
    with urllib.request.urlopen(f"http://{host}:{port.port}/metrics", timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    return {(each.name, *sorted(each.labels.items())): each.value for each in samples}


def test_a_scraper_understands_every_kind():
    told = [
        counter("updates", "Updates.", 0),
        counter("refused_peers", "Refused.", {}, "reason"),
        gauge("loss", "Loss.", math.nan),
        histogram("staleness", "Staleness.", {}),
    ]
    with listening(lambda: told) as port:
        told[:] = [
            counter("updates", "Updates.", 7),
            counter("refused_peers", "Refused.", {"token": 2, 'odd "\n': 1}, "reason"),
            gauge("loss", "Loss.", math.nan),
            histogram("staleness", "Staleness.", {0: 3, 2: 1, 5: 2, 10**6: 1}),
        ]
        found = scraped(port)
    assert found[("thinwire_node_info", *sorted(ABOUT.items()))] == 1
    assert found["thinwire_updates_total",] == 7
    assert found["thinwire_refused_peers_total", ("reason", "token")] == 2
    assert found["thinwire_refused_peers_total", ("reason", 'odd "\n')] == 1
    assert math.isnan(found["thinwire_loss",])
    buckets = [found["thinwire_staleness_bucket", ("le", f"{most:.1f}")] for most in BUCKETS]
    assert buckets == [3, 3, 4, 4, *[6] * (len(BUCKETS) - 4)]
    assert found["thinwire_staleness_bucket", ("le", "+Inf")] == 7
    assert found["thinwire_staleness_count",] == 7
    assert found["thinwire_staleness_sum",] == 2 + 10 + 10**6
    assert found["process_resident_memory_bytes",] > 1 << 20
    assert found["process_open_fds",] > 3


def test_totals_begin_with_the_process_and_gauges_do_not():
    version = [1000]

    def read():
        return [
            counter("updates", "", version[0]),
            gauge("model_version", "", version[0]),
            counter("rejected", "", {"stale": version[0]}, "reason"),
            histogram("staleness", "", {1: version[0]}),
        ]

    with listening(read) as port:  # restored from a snapshot
        version[0] = 1003
        found = scraped(port)
    assert found["thinwire_updates_total",] == 3
    assert found["thinwire_rejected_total", ("reason", "stale")] == 3
    assert found["thinwire_staleness_count",] == 3
    assert found["thinwire_model_version",] == 1003


def test_a_taken_port_is_an_error_that_says_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"--metrics_port={number}: .*in use.*stop"):
            MetricsPort("127.0.0.1", number, ABOUT, list)
    with pytest.raises(ConfigurationError, match="--metrics_host"):
        MetricsPort("203.0.113.77", 0, ABOUT, list)


def test_without_the_flag_nothing_listens():
    assert open_port(types.SimpleNamespace(metrics_port=0), "ps-0", list) is None


HALF_A_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: me\r\nX-Slow: "


def test_readers_that_trickle_do_not_lock_others_out():
    with listening(list) as port, contextlib.ExitStack() as slow:
        for _ in range(20):
            reader = slow.enter_context(socket.create_connection(("127.0.0.1", port.port)))
            reader.sendall(HALF_A_REQUEST)
        assert scraped(port)
    # The end of the block closes the server without waiting for a client.


def test_a_request_has_one_time_limit_however_often_it_goes_on(monkeypatch):
    monkeypatch.setattr(metrics_server, "_REQUEST_SECONDS", 0.3)
    with (
        listening(list) as port,
        socket.create_connection(("127.0.0.1", port.port), timeout=0.02) as reader,
    ):
        reader.sendall(HALF_A_REQUEST)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                reader.sendall(b"x")
                assert reader.recv(100) == b""
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert time.monotonic() < deadline


LOGIN = b"prometheus:correct horse battery"


def status(port, login=None, scheme="http", context=None):
    """Return the status of the reply to a request with this login."""
    request = urllib.request.Request(f"{scheme}://127.0.0.1:{port.port}/metrics")
    if login is not None:
        request.add_header("Authorization", "Basic " + base64.b64encode(login).decode())
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        assert not error.read()
        return error.code


def test_who_does_not_know_the_password_reads_nothing(tmp_path):
    (tmp_path / "login").write_bytes(LOGIN + b"\n")
    login = metrics_server.read_login(str(tmp_path / "login"))
    port = MetricsPort("127.0.0.1", 0, ABOUT, list, login)
    try:
        assert [status(port, given) for given in (None, b"prometheus:wrong", b"")] == [401] * 3
        assert status(port, LOGIN) == 200
    finally:
        port.close()


@pytest.mark.parametrize("content", [b"", b"name", b"name:short", b":" + b"x" * 20, b"x" * 5000])
def test_a_file_that_is_no_login_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "login").write_bytes(content)
    with pytest.raises(ConfigurationError, match="--metrics_login=.*name:password"):
        metrics_server.read_login(str(tmp_path / "login"))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        metrics_server.read_login(str(tmp_path / "missing"))


def test_beyond_this_machine_figures_are_encrypted(monkeypatch):
    monkeypatch.setattr(metrics_server, "is_loopback", lambda host: False)
    papers = Papers()
    port = MetricsPort("127.0.0.1", 0, ABOUT, list, LOGIN, papers.of("ps-0"))
    try:
        context = ssl.create_default_context(cadata=papers.authority.decode())
        with socket.create_connection(("127.0.0.1", port.port)):  # no handshake yet
            assert status(port, LOGIN, "https", context) == 200
        with pytest.raises(OSError):
            status(port, LOGIN)
    finally:
        port.close()


@pytest.fixture
def logged():
    """Return the records of absl's log as they come, tracebacks and all."""
    records = queue.SimpleQueue()
    handler = logging.handlers.QueueHandler(records)
    handler.prepare = lambda record: record
    absl = logging.getLogger("absl")
    level = absl.level
    absl.addHandler(handler)
    absl.setLevel(logging.INFO)
    yield records
    absl.removeHandler(handler)
    absl.setLevel(level)


def test_a_reader_that_disconnects_is_one_line(logged, monkeypatch):
    """It has sent its request, and resets the connection while the instruments are read."""
    monkeypatch.setattr(metrics_server.logging, "log_every_n_seconds", at_once)
    has_left = threading.Event()
    asked = threading.Event()

    def read():
        if asked.is_set():
            assert has_left.wait(20)
        return [counter("updates", "Updates. " + "x" * (1 << 22), 1)]  # beyond a socket's buffers

    with listening(read) as port:
        logged.get(timeout=20)  # until the server listens
        reader = socket.create_connection(("127.0.0.1", port.port))
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        asked.set()
        reader.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
        reader.close()  # the client ends by a reset
        has_left.set()
        record = logged.get(timeout=20)
    assert "reader at 127.0.0.1" in record.getMessage()
    assert record.exc_info is None and "\n" not in record.getMessage()


def test_a_fault_of_the_instruments_keeps_its_traceback(logged, monkeypatch):
    monkeypatch.setattr(metrics_server.logging, "log_every_n_seconds", at_once)
    asked = threading.Event()

    def read():
        if asked.is_set():
            raise ValueError("no such figure")
        return []

    with listening(read) as port:
        logged.get(timeout=20)
        asked.set()
        with pytest.raises((http.client.HTTPException, OSError)):
            scraped(port)
        assert logged.get(timeout=20).exc_info[0] is ValueError


def at_once(level, message, seconds, *values, **more):
    """Log without the limit of a line in some seconds, which other tests use up."""
    del seconds
    metrics_server.logging.log(level, message, *values, **more)
