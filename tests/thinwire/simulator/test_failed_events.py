"""A core that fails on one event of a worker, in whole simulated runs."""

import pytest
from absl import logging

from tests.thinwire.simulator.toy import simulated
from thinwire.ps.core import events

KINDS = {"push": events.Push, "query": events.Query}


def break_at(core, kind, number):
    """Make the core raise an error at event number `number` of a kind."""
    before, seen = type(core), []

    class Broken(before):
        def handle(self, event, now):
            if isinstance(event, kind):
                seen.append(event)
                if len(seen) == number:
                    raise ZeroDivisionError("nobody has thought of it")
            return super().handle(event, now)

    core.__class__ = Broken
    return seen


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize(
    ("name", "kind", "choices"),
    [
        ("adacomp", "push", {"compression_rate": 0.25}),
        ("bsp", "push", {}),
        ("ssp", "push", {}),
        ("esync", "push", {}),
        ("esync", "query", {}),
    ],
)
def test_a_run_goes_on_to_its_end(name, kind, choices, shard):
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    shard = 0 if kind == "query" else shard  # only shard 0 is queried
    simulation = simulated(name, 3, "0.5,0.7,0.9", choices, iter_max=60, nb_ps=2)
    core = simulation.shards[shard].core
    seen = break_at(core, KINDS[kind], 20)
    try:
        simulation.play(lambda now: None, lambda: False)
    finally:
        logging.set_verbosity(before)
    assert simulation.end == "iter_max"
    assert core.counters.rejected["fault"] >= 1
    worker = seen[19].worker
    assert [event.worker for event in seen[20:]].count(worker) > 3  # the worker returned
    assert simulation.shards[0].core.version == 60
