"""A worker's TensorBoard scalars: limited in rate; write errors never end the run."""

import pytest

from tests.thinwire.runtime.telemetry.test_tensorboard import read
from thinwire.runtime.telemetry.run_status import WorkerMetrics
from thinwire.worker.telemetry.tensorboard import WorkerScalars


class FakeClock:
    now = 100.0

    def __call__(self):
        return self.now


def test_written_at_most_every_two_seconds(tmp_path):
    clock = FakeClock()
    scalars = WorkerScalars(tmp_path, clock)
    counted = WorkerMetrics(id=1, bytes_up=10, compute_seconds=1.5, wait_seconds=0.25)
    for number in range(1, 9):  # every second
        clock.now += 1.0
        scalars.record(counted, 0.5, num_steps=30 * number, version=number)
    seen = read(tmp_path)
    assert [step for step, _ in seen["train/loss"]] == [2, 4, 6, 8]
    assert [value for _, value in seen["train/steps_per_second"]] == [30.0] * 4
    assert seen["time/compute_seconds"][0] == (2, 1.5)
    assert seen["net/bytes_up"][-1] == (8, 10.0)


def test_no_loss_yet(tmp_path):
    clock = FakeClock()
    scalars = WorkerScalars(tmp_path, clock)
    clock.now += 5.0
    scalars.record(WorkerMetrics(id=1), None, num_steps=0, version=0)
    assert "train/loss" not in read(tmp_path)


def test_a_bad_disk_is_told_once(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(
        "thinwire.worker.telemetry.tensorboard.logging.warning",
        lambda *words: warnings.append(words),
    )
    (tmp_path / "tb").write_text("in the way")
    clock = FakeClock()
    scalars = WorkerScalars(tmp_path / "tb" / "worker-1", clock)
    for _ in range(3):
        clock.now += 5.0
        scalars.record(WorkerMetrics(id=1), 1.0, num_steps=1, version=1)
    assert len(warnings) == 1


@pytest.mark.parametrize("elapsed", [0.0, 1.9])
def test_no_file_before_it_is_time(tmp_path, elapsed):
    clock = FakeClock()
    scalars = WorkerScalars(tmp_path / "tb", clock)
    clock.now += elapsed
    scalars.record(WorkerMetrics(id=1), 1.0, num_steps=1, version=1)
    assert not (tmp_path / "tb").exists()
