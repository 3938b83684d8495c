"""The bench of many light devices opens real sessions; the knee is computed from its table."""

import dataclasses

import pytest

from bench.systems import many

LOAD = many.StreamLoad("asgd", 1, 1, 10.0, 5.0, 9.0, 1.0, 7.0, 0.1, 8.0, 0.1, 600.0)


def loads(*levels):
    return [
        dataclasses.replace(
            LOAD, streams=n, updates_per_second=rate, server_cores=server, client_cores=client
        )
        for n, rate, server, client in levels
    ]


def test_fairness_is_jain_s():
    assert many.fairness([5, 5, 5]) == 1.0
    assert many.fairness([9, 0, 0]) == pytest.approx(1 / 3)
    assert many.fairness([0, 0]) == 0.0


def test_percentiles_are_of_what_was_measured():
    assert many.percentile([5.0, 1.0, 3.0], 0.99) == 5.0
    assert many.percentile(range(1000), 0.99) == 990


def test_the_knee_names_what_is_full():
    alone = (1, 5.0, 0.1, 0.1)
    assert "none up to 2 streams" in many.knee(loads(alone, (2, 10.0, 0.2, 0.2)), 2)
    shard = many.knee(loads(alone, (2, 95.0, 0.95, 0.3), (4, 100.0, 1.0, 0.3)), 8)
    assert "2 streams" in shard and "one core each" in shard
    machine = many.knee(loads(alone, (2, 95.0, 0.8, 1.1), (4, 100.0, 0.8, 1.2)), 2)
    assert "the machine's 2 cores" in machine
    assert "neither" in many.knee(loads(alone, (2, 95.0, 0.2, 0.1), (4, 100.0, 0.2, 0.1)), 2)


@pytest.mark.processes
@pytest.mark.product
def test_devices_join_exchange_and_leave():
    few, more = many.measure("dgs", 2, (1, 3), seconds=1.0, step_seconds=0.02)
    assert (few.streams, more.streams, few.shards) == (1, 3, 2)
    assert few.updates_per_second > 2 and few.fairness == 1.0 and more.fairness > 0.5
    assert few.median_ms <= few.slow_ms and few.server_mb > 100
