"""Real nodes behind a firewall that drops the ports of bulk connections."""

import contextlib

import pytest

from tests.chaos.process_cast import Cast
from tests.firewall import dropping

pytestmark = [pytest.mark.timeout(180), pytest.mark.processes]
NUM_UPDATES = 400


@pytest.mark.parametrize("blocked", [{0, 1}, {1}])
def test_behind_a_firewall_a_worker_with_a_short_lease_joins_once(tmp_path, blocked):
    flags = (
        *("--method=asgd", "--dataset=synthetic", "--lease_seconds=6"),
        f"--iter_max={NUM_UPDATES}",
    )
    cast = Cast(tmp_path, flags, nb_workers=1, nb_ps=2)
    pass_on = cast.hearing.on_bulk
    with contextlib.ExitStack() as firewall:

        def before_welcome(worker, shard, port):
            if shard in blocked:
                firewall.enter_context(dropping(cast.wires["worker-1", shard]._listen[0], port))
            else:
                pass_on(worker, shard, port)

        cast.hearing.on_bulk = before_welcome
        try:
            cast.start_all(supervisor=False)
            codes = cast.wait(["worker-1", "ps-0", "ps-1"])
        finally:
            cast.close()
    worker = cast.nodes.output("worker-1")
    assert set(codes.values()) == {0}, worker[-3000:]
    assert worker.count("stay on gRPC") == len(blocked)
    assert worker.count("cannot be reached (nothing answers there within 1.5 s)") == len(blocked)
    assert "ip_local_port_range" in worker and "lost" not in worker
    for shard in range(2):
        assert cast.nodes.output(f"ps-{shard}").count("worker 1 joined") == 1
    assert cast.nodes.summary()["workers"][0]["pushes"] >= NUM_UPDATES
