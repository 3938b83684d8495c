"""What a scraper reads at a node's metrics port, parsed by the scraper's own library."""

import contextlib
import math
import socket
import types
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from thinwire.ops.telemetry.instruments import counter, gauge, histogram
from thinwire.ops.types import ConfigurationError
from thinwire.proto.metrics_server import BUCKETS, MetricsPort, open_port

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


def test_readers_that_say_nothing_do_not_lock_others_out():
    with listening(list) as port, contextlib.ExitStack() as silent:
        for _ in range(7):
            silent.enter_context(socket.create_connection(("127.0.0.1", port.port)))
        assert scraped(port)
        for _ in range(20):  # of these the first at most is let in
            silent.enter_context(socket.create_connection(("127.0.0.1", port.port)))
    # The end of the block closes it: nobody is waited for.
