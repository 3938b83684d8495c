"""One worker's trainer without shards: its resumed position, and its counts."""

import time
from types import SimpleNamespace

from thinwire.proto import thinwire_pb2 as pb
from thinwire.runtime.telemetry.run_status import WorkerMetrics
from thinwire.worker.trainer import WorkerSession


def test_a_worker_goes_on_behind_the_newest_step_of_any_shard():
    """A shard that was restored from an older snapshot has seen less than the others."""
    welcomes = [pb.Welcome(last_applied_step=step) for step in (3, 5, 4)]
    session = SimpleNamespace(
        exchange=SimpleNamespace(join=lambda: welcomes), core=SimpleNamespace(step=0)
    )
    assert WorkerSession.join(session) == 5
    assert (session.core.step, session.joined_at_step) == (5, 5)


def test_figures_are_those_of_all_lives():
    before = WorkerMetrics(
        id=2,
        bytes_up=100,
        compute_seconds=1.0,
        encode_seconds=2.0,
        send_seconds=3.0,
        wait_seconds=4.0,
        non_finite=5,
        restarts=1,
    )
    session = SimpleNamespace(
        before=before,
        exchange=SimpleNamespace(bytes_up=7, send_seconds=0.5, datagrams=None),
        stopwatch=SimpleNamespace(seconds={"compute": 10.0, "encode": 20.0, "wait": 30.5}),
        core=SimpleNamespace(step=9),
        own=SimpleNamespace(id_worker=2, num_restarts=2),
        started_at=time.monotonic(),
        steps=SimpleNamespace(num_non_finite=1, num_steps=4),
        labels={},
    )
    found = WorkerSession.metrics(session)
    assert (found.bytes_up, found.clock, found.non_finite, found.restarts) == (107, 9, 6, 2)
    assert (found.compute_seconds, found.encode_seconds) == (11.0, 22.0)
    assert (found.send_seconds, found.wait_seconds) == (3.5, 34.0)
