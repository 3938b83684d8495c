"""The port at which Prometheus, or any reader of its text format, collects a node's instruments."""

from __future__ import annotations

import importlib
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from thinwire.ops.run.settings import Run
from thinwire.ops.telemetry.instruments import Instrument, since
from thinwire.ops.types import ConfigurationError
from thinwire.proto import messages
from thinwire.proto.grpc.common import host_and_port, is_loopback

#: Begins every name of ours; those of the process itself (memory, CPU, files) begin otherwise.
PREFIX = "thinwire_"
#: Upper bounds of a histogram of whole numbers.
BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_MOST_READERS = 8  # at a time; further connections are closed
_POLL_SECONDS = 0.1  # between two checks whether to go on; closing waits for one
_READ_SECONDS = 10.0  # for a reader's request

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
    return MetricsPort(run.metrics_host, run.metrics_port, about, read)


class MetricsPort:
    """Answers every GET with the instruments' present values, in threads of its own.

    Args:
        host: The address to bind.
        port: 0 takes a free one.
        about: Labels of `thinwire_node_info`, which identify the node.
        read: Reads the instruments.

    Raises:
        ConfigurationError: The port is taken, or the library is missing.
    """

    def __init__(self, host: str, port: int, about: Mapping[str, str], read: Reader) -> None:
        self._library = _library()
        registry = self._library.CollectorRegistry()
        registry.register(_Collector(self._library, about, read))
        self._library.ProcessCollector(registry=registry)
        exposition = importlib.import_module("prometheus_client.exposition")
        handler = type(
            "Handler", (exposition.MetricsHandler.factory(registry),), {"timeout": _READ_SECONDS}
        )
        try:
            self._server = _server_class(host)((host, port), handler)
        except OSError as error:
            raise ConfigurationError(
                f"--metrics_port={port}: cannot listen on {host_and_port(host, port)} "
                f"({error.strerror or error}); stop the process that has it, or choose another "
                "--metrics_port or --metrics_host. A Cluster takes one port for each of its nodes, "
                "from this one on."
            ) from error
        self.port: int = self._server.server_address[1]
        if not is_loopback(host):
            logging.warning(
                "metrics on %s are for whoever reaches this address: losses and traffic, no "
                "weights and no keys",
                host,
            )
        logging.info("metrics on http://%s/metrics", host_and_port(host, self.port))
        name = f"metrics {self.port}"
        threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name=name, daemon=True
        ).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def _server_class(host: str) -> type[socketserver.TCPServer]:
    """Return a server of a few threads for an address of its family."""
    import socket

    class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
        allow_reuse_address = True
        daemon_threads = True
        block_on_close = False
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def process_request(self, request: Any, client_address: Any) -> None:
            if not free_readers.acquire(blocking=False):
                self.shutdown_request(request)
                return
            super().process_request(request, client_address)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                free_readers.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            logging.log_every_n_seconds(
                logging.WARNING,
                "metrics: a reader at %s was not served",
                10,
                client_address[0],
                exc_info=True,
            )

    free_readers = threading.Semaphore(_MOST_READERS)
    return Server


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
