"""Methods of many local steps with real processes: kill -9 of a worker and of the PS."""

import numpy as np
import pytest

from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.run.directory import checkpoints_of

pytestmark = [pytest.mark.timeout(400), pytest.mark.processes, pytest.mark.product]

ROWS = {
    "fedavg": ("--local_steps=8",),
    "fedopt": ("--local_steps=8", "--server_optimizer=yogi"),
    "fedprox": ("--local_steps=8",),
    "diloco": ("--local_steps=8", "--learning_rate=0.001"),
}


def go_on(nodes, until=lambda status: True, halt=None):
    """Wait for some rounds more than there are."""
    first = []

    def has_gone_on(status):
        if until(status):
            first.append(status.version)
        return bool(first) and status.version >= first[0] + 5

    nodes.watch(has_gone_on, 100, halt=halt)


@pytest.mark.parametrize("method", ROWS)
def test_rounds_go_on_after_the_death_of_a_worker_and_of_the_ps(nodes, method):
    flags = (f"--method={method}", *ROWS[method], "--nb_workers=2", "--journal=on")
    nodes.common = (*nodes.common, *flags, "--iter_max=1000000", "--lease_seconds=3")
    ps = ("--type_node=PS", "--linger_seconds=4")
    nodes.start("ps", *ps)
    nodes.worker(1)
    nodes.worker(2)
    go_on(nodes)
    nodes.kill("worker-2")
    go_on(nodes)
    nodes.worker(2)
    go_on(nodes, lambda status: all(each.state == "training" for each in status.workers))
    nodes.kill("ps")
    nodes.start("ps", *ps)
    go_on(nodes, halt="max_seconds")
    assert [nodes.wait(name, 60) for name in ("worker-1", "worker-2", "ps")] == [0, 0, 0]
    summary = nodes.summary()
    assert summary["membership"]["lost_updates"] == 0
    assert summary["journal"]["replayed"] > 0
    _, state = Checkpoints.in_folder(checkpoints_of(nodes.run_dir, "ps-0")).load_latest()
    model = state["core"]["model"]
    assert np.isfinite(model["theta"]).all()
    if "steps" in model["optimizer"]:
        assert model["optimizer"]["steps"] == summary["updates"]
