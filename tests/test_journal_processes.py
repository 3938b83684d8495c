"""A PS that is killed comes back with everything it had acknowledged (real processes)."""

import random

import pytest

from ops.run_dir import checkpoints_of
from ps.journal import numbers

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("method", "journal", "pushes"),
    [("adacomp", "auto", 1), pytest.param("bsp", "on", 2, marks=pytest.mark.product)],
)
def test_a_killed_ps_has_lost_nothing_that_it_acknowledged(nodes, method, journal, pushes):
    flags = [f"--method={method}", "--iter_max=1000000", "--checkpoint_interval_seconds=3"]
    nodes.cluster(2, *flags, f"--journal={journal}")
    least = random.Random(method).randrange(40, 90)
    nodes.watch(lambda status: status.version >= least, 100)
    nodes.kill("ps")
    nodes.start("ps", "--type_node=PS", "--linger_seconds=4")
    nodes.watch(lambda status: status.version >= least + 40, 100, halt="max_seconds")
    assert [nodes.wait(name, 60) for name in ("worker-1", "worker-2", "ps")] == [0, 0, 0]
    summary = nodes.summary()
    assert summary["membership"]["lost_updates"] == 0
    assert summary["journal"]["on"] and summary["journal"]["replayed"] > 0
    assert sum(each["pushes"] for each in summary["workers"]) == pushes * summary["updates"]
    assert len(numbers(checkpoints_of(nodes.run_dir, "ps-0"))) <= 2
