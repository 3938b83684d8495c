"""The port at which Prometheus, or any reader of its text format, collects a node's instruments.

A request has one time limit for all of it, from the connection to the end of the answer, and where
all places are taken a newcomer gets that of another (`thinwire.proto.security.fair_places`): those
who send their requests byte by byte keep nobody out.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import importlib
import pathlib
import socket
import socketserver
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.proto import messages
from thinwire.proto.grpc.common import host_and_port, is_loopback
from thinwire.proto.security.fair_places import FairPlaces, address_of
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials
from thinwire.runtime.run.files import read_bounded
from thinwire.runtime.run.settings import Run
from thinwire.runtime.telemetry.instruments import Instrument, since

#: Begins every name of ours; those of the process itself (memory, CPU, files) begin otherwise.
PREFIX = "thinwire_"
#: Upper bounds of a histogram of whole numbers.
BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_MOST_READERS = 8  # at a time; whoever comes then takes the place of another
_MOST_THREADS = 32  # with those of readers that have lost their place and are about to end
_POLL_SECONDS = 0.1  # between two checks whether to go on; closing waits for one
_REQUEST_SECONDS = 10.0  # for a whole request, with the TLS handshake and the answer
#: Of a file with the name and the password of readers.
_MOST_LOGIN_BYTES, _SHORTEST_PASSWORD_BYTES = 4096, 16

#: Reads a node's instruments; called in the port's threads, several at a time.
Reader = Callable[[], Sequence[Instrument]]


def open_port(run: Run, node: str, read: Reader) -> MetricsPort | None:
    """Open a node's port if the run has one; see `MetricsPort`.

    Args:
        run: The run's settings.
        node: Its name, such as worker-3.
        read: Reads its instruments.
    """
    if not run.metrics_port:
        return None
    about = {
        "node": node,
        "role": run.type_node,
        "method": run.method.name,
        "protocol_version": str(messages.PROTOCOL_VERSION),
    }
    login = read_login(run.metrics_login) if run.metrics_login else b""
    host, credentials = run.metrics_host, run.credentials
    return MetricsPort(host, run.metrics_port, about, read, login, credentials)


def read_login(path: str) -> bytes:
    """Return what readers have to know, as ``name:password``.

    Raises:
        ConfigurationError: The file cannot be read, or holds no such line.
    """
    try:
        login = read_bounded(path, _MOST_LOGIN_BYTES).strip()
    except OSError as error:
        raise ConfigurationError(
            f"--metrics_login={path} cannot be read ({error.strerror}); expected a file of "
            "one line, name:password, that this user may read."
        ) from error
    name, _, password = login.partition(b":")
    is_line = len(login.splitlines()) == 1
    if not (is_line and name and len(password) >= _SHORTEST_PASSWORD_BYTES):
        raise ConfigurationError(
            f"--metrics_login={path} has {len(login)} bytes that are no login; expected one line, "
            f"name:password, with a password of {_SHORTEST_PASSWORD_BYTES} bytes at least, such as "
            "`openssl rand -hex 32` makes."
        )
    return login


class MetricsPort:
    """Answers every GET with the instruments' present values, in threads of its own.

    Args:
        host: The address to bind.
        port: 0 takes a free one.
        about: Labels of `thinwire_node_info`, which identify the node.
        read: Reads the instruments.
        login: ``name:password`` that readers must send; empty: none.
        credentials: Of the node; beyond this machine its certificate encrypts what is read.

    Raises:
        ConfigurationError: The port is taken, or the library is missing.
    """

    def __init__(
        self,
        host: str,
        port: int,
        about: Mapping[str, str],
        read: Reader,
        login: bytes = b"",
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self._library = _library()
        registry = self._library.CollectorRegistry()
        registry.register(_Collector(self._library, about, read))
        self._library.ProcessCollector(registry=registry)
        encrypts = bool(credentials.certificate) and not is_loopback(host)
        try:
            self._server = _Server(
                (host, port), _handler(registry, login), _tls(credentials) if encrypts else None
            )
        except OSError as error:
            raise ConfigurationError(
                f"--metrics_port={port}: cannot listen on {host_and_port(host, port)} "
                f"({error.strerror or error}); stop the process that has it, or choose another "
                "--metrics_port or --metrics_host. A Cluster takes one port for each of its nodes, "
                "from this one on."
            ) from error
        self.port: int = self._server.server_address[1]
        if not is_loopback(host) and not (login and encrypts):
            lack = "no password (--metrics_login)" if encrypts else "no TLS (--tls_cert)"
            logging.warning(
                "metrics on %s have %s: others on the network may read losses and traffic, no "
                "weights and no keys",
                host,
                lack,
            )
        scheme = "https" if encrypts else "http"
        logging.info("metrics on %s://%s/metrics", scheme, host_and_port(host, self.port))
        name = f"metrics {self.port}"
        threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name=name, daemon=True
        ).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def _handler(registry: Any, login: bytes) -> type[Any]:
    """Return the library's handler of requests, which answers those with the login alone."""
    exposition = importlib.import_module("prometheus_client.exposition")
    library: type[Any] = exposition.MetricsHandler.factory(registry)
    expected = b"Basic " + base64.b64encode(login)

    class Handler(library):  # type: ignore[misc]  # made by the library as it runs
        timeout = _REQUEST_SECONDS

        def do_GET(self) -> None:  # noqa: N802 - the name of the library
            given = self.headers.get("Authorization", "").encode()
            if login and not hmac.compare_digest(given, expected):
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="metrics"')
                self.end_headers()
                return
            super().do_GET()

    return Handler


def _tls(credentials: Credentials) -> ssl.SSLContext:
    """Return the settings of a server with a node's certificate; ssl reads it of files alone."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:  # of this user alone
        certificate, key = pathlib.Path(folder, "certificate"), pathlib.Path(folder, "key")
        certificate.write_bytes(credentials.certificate)
        key.write_bytes(credentials.key)
        context.load_cert_chain(certificate, key)
    return context


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A few readers at a time, each for a bounded time."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(
        self, address: tuple[str, int], handler: type[Any], tls: ssl.SSLContext | None
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._tls = tls
        # Of each reader a duplicate of its socket, by which another thread may end it.
        self._readers: FairPlaces[socket.socket] = FairPlaces()
        self._lock = threading.Lock()
        self._free_threads = threading.Semaphore(_MOST_THREADS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free_threads.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            with self._placed(request, client_address[0]):
                if self._tls is not None:
                    request = self._tls.wrap_socket(request, server_side=True)
                super().process_request_thread(request, client_address)
        except OSError:  # of the handshake; all others go to handle_error
            self.shutdown_request(request)
        finally:
            self._free_threads.release()

    @contextlib.contextmanager
    def _placed(self, request: socket.socket, host: str) -> Iterator[None]:
        """Give a reader a place, be it that of another."""
        reader = request.dup()
        with self._lock:
            self._end(self._readers.take(reader, address_of(host), time.monotonic(), _MOST_READERS))
        try:
            yield
        finally:
            with self._lock:
                self._readers.leave(reader)
                reader.close()

    def service_actions(self) -> None:
        """End those whose time is over (listening thread, now and then)."""
        with self._lock:
            self._end(self._readers.overdue(time.monotonic() - _REQUEST_SECONDS))

    def _end(self, readers: Sequence[socket.socket]) -> None:
        for reader in readers:
            with contextlib.suppress(OSError):  # it has left by itself
                reader.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if isinstance(error, OSError):  # of its socket: it has disconnected, or was too slow
            logging.log_every_n_seconds(
                logging.INFO,
                "metrics: a reader at %s left before it had its answer (%s)",
                10,
                client_address[0],
                error.strerror or error,
            )
            return
        logging.log_every_n_seconds(
            logging.WARNING,
            "metrics: a reader at %s was not served",
            10,
            client_address[0],
            exc_info=True,
        )


class _Collector:
    """Turns instruments into families of the library, counting from the start of this process."""

    def __init__(self, library: Any, about: Mapping[str, str], read: Reader) -> None:
        self._core, self._about, self._read = library.metrics_core, dict(about), read
        self._at_start = {instrument.name: instrument for instrument in read()}

    def collect(self) -> Iterator[Any]:
        """Yield families."""
        info = self._core.InfoMetricFamily(f"{PREFIX}node", "What this process is.")
        info.add_metric([], self._about)
        yield info
        for instrument in self._read():
            yield self._family(since(instrument, self._at_start.get(instrument.name)))

    def _family(self, instrument: Instrument) -> Any:
        name = PREFIX + instrument.name
        if instrument.kind == "histogram":
            family = self._core.HistogramMetricFamily(name, instrument.text)
            family.add_metric([], *_buckets(instrument))
            return family
        kind = {"counter": "CounterMetricFamily", "gauge": "GaugeMetricFamily"}[instrument.kind]
        family = getattr(self._core, kind)(name, instrument.text, labels=instrument.labels)
        for labels, value in instrument.values.items():
            family.add_metric(labels, value)
        return family


def _buckets(instrument: Instrument) -> tuple[list[tuple[str, float]], float]:
    """Return (upper bound, how many do not exceed it) of each bucket, and the sum of all."""
    counts = {int(labels[0]): count for labels, count in instrument.values.items()}
    within = [sum(count for value, count in counts.items() if value <= most) for most in BUCKETS]
    bounds = [f"{most:.1f}" for most in BUCKETS]
    buckets = [*zip(bounds, within, strict=True), ("+Inf", sum(counts.values()))]
    return buckets, sum(value * count for value, count in counts.items())


def _library() -> Any:
    """Return prometheus_client; raises ConfigurationError where it is not installed."""
    try:
        return importlib.import_module("prometheus_client")
    except ImportError as error:
        raise ConfigurationError(
            "--metrics_port needs the package prometheus-client, which is not installed here; "
            "install it (it is among this project's dependencies), or leave the flag out."
        ) from error
