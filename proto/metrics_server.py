"""HTTP port where Prometheus or another client of its text format reads a node's metrics.

One time limit covers a whole HTTP request to the metrics port, from the connection to the end of
the answer. If too many clients are connected to the metrics port, the port disconnects one of them
for a new client (`thinwire.proto.security.fair_places`). Clients that send their HTTP requests byte
by byte cannot block the metrics port for other clients.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import importlib
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.proto import messages
from thinwire.proto.bulk.tls import context_of
from thinwire.proto.grpc.common import host_and_port, is_loopback
from thinwire.proto.security.fair_places import FairPlaces, address_of
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials
from thinwire.runtime.run.files import read_bounded
from thinwire.runtime.run.settings import Run
from thinwire.runtime.telemetry.instruments import Instrument, since

#: Prefix of every Thinwire metric. Metrics of the process (memory, CPU, files) have no prefix.
PREFIX = "thinwire_"
#: Upper bounds of the buckets in a Prometheus histogram of whole numbers.
BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
# Largest number of clients that the metrics port serves together; a further client displaces
# another client.
_MOST_READERS = 8
# Largest number of threads, including those of displaced clients that are about to end.
_MOST_THREADS = 32
# Seconds between two checks whether the server must stop; `close` waits for one check.
_POLL_SECONDS = 0.1
# Seconds that a whole HTTP request may take, including TLS handshake and answer.
_REQUEST_SECONDS = 10.0
#: Largest size of the file with the readers' login, and shortest legal password, in bytes.
_MOST_LOGIN_BYTES, _SHORTEST_PASSWORD_BYTES = 4096, 16

#: Function that returns a node's instruments (metrics), which several threads may call together.
Reader = Callable[[], Sequence[Instrument]]


def open_port(run: Run, node: str, read: Reader) -> MetricsPort | None:
    """Open the metrics port of a node; return None if the run has no metrics port.

    Args:
        run: Settings of the training run.
        node: Name of the node, for example worker-3.
        read: Function that returns the node's instruments (counters, gauges, histograms).
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
    """Return the login (``name:password``) that readers of the metrics must send.

    Args:
        path: Path of the file with the login, one line ``name:password``.

    Raises:
        ConfigurationError: The login file cannot be read, or is not one line ``name:password``.
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
            f"--metrics_login={path} contains {len(login)} bytes that are not a login; expected "
            f"one line, name:password, with a password of at least {_SHORTEST_PASSWORD_BYTES} "
            "bytes, for example from `openssl rand -hex 32`."
        )
    return login


class MetricsPort(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """HTTP server that answers every GET with the instruments' current values.

    Background threads of the server answer the HTTP requests. The number of clients is bounded, and
    each client has a time limit.

    Attributes:
        port: TCP port at which the server listens.

    Args:
        host: IP address or host name at which the server listens.
        port: TCP port to listen on; 0 for any free port.
        about: Labels of `thinwire_node_info`, which identify the node.
        read: Function that returns the node's instruments (counters, gauges, histograms).
        login: Login ``name:password`` that readers must send; empty if no login is required.
        credentials: Certificate, key and token of the node. At an address other than loopback, the
            server encrypts its answers if there is a certificate.

    Raises:
        ConfigurationError: The port is in use, or prometheus_client is not installed.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        host: str,
        port: int,
        about: Mapping[str, str],
        read: Reader,
        login: bytes = b"",
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        library = _library()
        registry = library.CollectorRegistry()
        registry.register(_Collector(library, about, read))
        library.ProcessCollector(registry=registry)
        encrypts = bool(credentials.certificate) and not is_loopback(host)
        # Readers need no certificate: the context has no authority.
        own = Credentials(credentials.certificate, credentials.key)
        self._tls = context_of(own, serves=True) if encrypts else None
        # Duplicates of the sockets of clients that read metrics. A duplicate stays valid while
        # another thread shuts the reader down, even if the reader's thread closes its own
        # descriptor at that time.
        self._readers: FairPlaces[socket.socket] = FairPlaces()
        self._lock = threading.Lock()
        self._free_threads = threading.Semaphore(_MOST_THREADS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _handler(registry, login))
        except OSError as error:
            raise ConfigurationError(
                f"--metrics_port={port}: cannot listen on {host_and_port(host, port)} "
                f"({error.strerror or error}); stop the process that uses the port, or choose "
                "another --metrics_port or --metrics_host. A Cluster uses consecutive ports, one "
                "for each of its nodes."
            ) from error
        self.port: int = self.server_address[1]
        if not is_loopback(host) and not (login and encrypts):
            lack = "no password (--metrics_login)" if encrypts else "no TLS (--tls_cert)"
            logging.warning(
                "the metrics port on %s has %s: anyone on the network may read losses and traffic "
                "figures, but no weights and no keys",
                host,
                lack,
            )
        scheme = "https" if encrypts else "http"
        logging.info("metrics on %s://%s/metrics", scheme, host_and_port(host, self.port))
        name = f"metrics {self.port}"
        threading.Thread(
            target=self.serve_forever, args=(_POLL_SECONDS,), name=name, daemon=True
        ).start()

    def close(self) -> None:
        """Stop the metrics server and close its port."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a client in a new thread; disconnect it if there are too many threads."""
        if not self._free_threads.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a client, over TLS if the port encrypts."""
        try:
            with self._placed(request, client_address[0]):
                if self._tls is not None:
                    request = self._tls.wrap_socket(request, server_side=True)
                super().process_request_thread(request, client_address)
        except OSError:  # The TLS handshake failed. The method handle_error handles other errors.
            self.shutdown_request(request)
        finally:
            self._free_threads.release()

    @contextlib.contextmanager
    def _placed(self, request: socket.socket, host: str) -> Iterator[None]:
        """Register a client of the metrics port; disconnect another client if there are too
        many.
        """
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
        """Disconnect clients of the metrics port that have exceeded their time limit. The listening
        thread calls `service_actions` at each poll.
        """
        with self._lock:
            self._end(self._readers.overdue(time.monotonic() - _REQUEST_SECONDS))

    def _end(self, readers: Sequence[socket.socket]) -> None:
        for reader in readers:
            # The client of the metrics port has already disconnected.
            with contextlib.suppress(OSError):
                reader.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log why a client got no answer."""
        error = sys.exception()
        # The client of the metrics port has disconnected, or was too slow.
        if isinstance(error, OSError):
            logging.log_every_n_seconds(
                logging.INFO,
                "metrics: the connection to a reader at %s ended before the answer was sent (%s)",
                10,
                client_address[0],
                error.strerror or error,
            )
            return
        logging.log_every_n_seconds(
            logging.WARNING,
            "metrics: answering a reader at %s failed",
            10,
            client_address[0],
            exc_info=True,
        )


def _handler(registry: Any, login: bytes) -> type[Any]:
    """Return prometheus_client's handler of HTTP requests, extended by a check of the login."""
    exposition = importlib.import_module("prometheus_client.exposition")
    library: type[Any] = exposition.MetricsHandler.factory(registry)
    expected = b"Basic " + base64.b64encode(login)

    class Handler(library):  # type: ignore[misc]  # The library makes the class at run time.
        timeout = _REQUEST_SECONDS

        def do_GET(self) -> None:  # noqa: N802 - name in http.server
            authorization = self.headers.get("Authorization", "").encode()
            if login and not hmac.compare_digest(authorization, expected):
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="metrics"')
                self.end_headers()
                return
            super().do_GET()

    return Handler


class _Collector:
    """Converts a node's instruments (counters, gauges, histograms) to metrics of
    prometheus_client.
    """

    def __init__(self, library: Any, about: Mapping[str, str], read: Reader) -> None:
        self._core, self._about, self._read = library.metrics_core, dict(about), read
        self._at_start = {instrument.name: instrument for instrument in read()}

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of all instruments."""
        info = self._core.InfoMetricFamily(
            f"{PREFIX}node", "Identity of this process: node, role, method and protocol version."
        )
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
    """Return a histogram's [(upper bound, count of values up to the bound)] and sum of values."""
    counts = {int(labels[0]): count for labels, count in instrument.values.items()}
    within = [sum(count for value, count in counts.items() if value <= most) for most in BUCKETS]
    bounds = [f"{most:.1f}" for most in BUCKETS]
    buckets = [*zip(bounds, within, strict=True), ("+Inf", sum(counts.values()))]
    return buckets, sum(value * count for value, count in counts.items())


def _library() -> Any:
    """Return the module prometheus_client.

    Raises:
        ConfigurationError: The package prometheus_client is not installed.
    """
    try:
        return importlib.import_module("prometheus_client")
    except ImportError as error:
        raise ConfigurationError(
            "--metrics_port needs the package prometheus-client, which is not installed; install "
            "the package (Thinwire's dependencies include it), or leave --metrics_port out."
        ) from error
