"""A worker's metrics cover this process only, and add up."""

import math
import types

from thinwire.ops.routing.counters import SentCounts
from thinwire.worker.telemetry.instruments import collect


def part(**changes):
    exchange = types.SimpleNamespace(
        send_seconds=0.5,
        bytes_up=900,
        bytes_down=4000,
        refused_peers={"token": 1},
        shards=[types.SimpleNamespace(connected=True), types.SimpleNamespace(connected=False)],
        datagrams=None,
    )
    core = types.SimpleNamespace(step=12, learning_rate=0.1, versions=[40, 39])
    stopwatch = types.SimpleNamespace(seconds={"compute": 2.0, "encode": 0.25, "wait": 1.5})
    made = types.SimpleNamespace(
        exchange=exchange,
        core=core,
        stopwatch=stopwatch,
        joined_at_step=10,
        steps=types.SimpleNamespace(num_steps=2, num_non_finite=0, loss=None),
        step_seconds=0.02,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def values(told):
    return {m.name: {" ".join(labels): v for labels, v in m.values.items()} for m in told}


def test_it_tells_of_this_life_only():
    found = values(collect(part()))
    assert found["exchanges"] == {"": 2}  # ten were of an earlier life
    assert found["steps"] == {"": 2}
    assert found["seconds"] == {"compute": 2.0, "encode": 0.25, "send": 0.5, "wait": 1.0}
    assert found["bytes_sent"] == {"up": 900} and found["bytes_received"] == {"down": 4000}
    assert found["shards_connected"] == {"": 1}
    assert found["refused_peers"] == {"token": 1}
    assert math.isnan(found["loss"][""])
    assert "datagrams_sent" not in found


def test_it_tells_of_datagrams_where_there_are_any():
    made = part()
    made.steps.loss = 0.25
    made.exchange.datagrams = SentCounts(datagrams=[0, 7, 9], unsent={"refused": 2})
    found = values(collect(made))
    assert found["datagrams_sent"] == {"0": 0, "1": 7, "2": 9}
    assert found["datagrams_unsent"] == {"refused": 2}
    assert found["loss"] == {"": 0.25}
