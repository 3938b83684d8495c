"""metrics.jsonl and TensorBoard scalars: their content, also after a kill."""

import json
import math

import pytest

from tests.supervisor.samples import make_evaluation, make_status, make_worker
from thinwire.ops.types import ConfigurationError
from thinwire.supervisor.metrics_log import MetricsLog, status_scalars


class FakeScalars:
    """Scalars in a list."""

    def __init__(self):
        self.written = []

    def write(self, values, step):
        self.written.append((step, dict(values)))

    def close(self):
        pass


def open_log(run_dir, resume=False):
    return MetricsLog(run_dir, resume, scalars=FakeScalars())


def lines_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_every_line_is_an_object_of_its_kind(tmp_path):
    with open_log(tmp_path) as log:
        log.add_evaluation(make_evaluation(100))
        log.add_status(make_status(120))
        assert [line["kind"] for line in lines_of(tmp_path)] == ["eval", "status"]
    log.close()
    assert lines_of(tmp_path)[1]["workers"][3]["id"] == 4


def test_resume_reloads_and_cuts_a_torn_line(tmp_path):
    with open_log(tmp_path) as log:
        log.add_evaluation(make_evaluation(100))
        log.add_evaluation(make_evaluation(200))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind":"eval","version":3')
    with open_log(tmp_path, resume=True) as log:
        assert log.evaluations == [make_evaluation(100), make_evaluation(200)]
        log.add_evaluation(make_evaluation(300))
    assert [line["version"] for line in lines_of(tmp_path)] == [100, 200, 300]


def test_starting_anew_forgets(tmp_path):
    with open_log(tmp_path) as log:
        log.add_evaluation(make_evaluation(100))
    (tmp_path / "tb" / "supervisor-0").mkdir(parents=True)
    with open_log(tmp_path) as log:
        assert log.evaluations == []
    assert lines_of(tmp_path) == [] and not (tmp_path / "tb" / "supervisor-0").exists()


def test_resume_without_a_file_is_a_start(tmp_path):
    with open_log(tmp_path / "new", resume=True) as log:
        assert log.evaluations == []


def test_a_strange_file_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind":"eval","accuracy":"high"}\n')
    with pytest.raises(ConfigurationError, match="--overwrite"):
        open_log(tmp_path, resume=True)


def test_scalars_carry_the_agreed_tags(tmp_path):
    log = open_log(tmp_path)
    log.add_evaluation(make_evaluation(100, loss=math.nan))
    log.add_status(make_status(120))
    (step, evaluated), (_, status) = log._scalars.written
    assert step == 100 and list(evaluated) == ["eval/accuracy", "eval/loss"]
    agreed = {"train/loss", "net/bytes_up", "net/bytes_down", "sync/staleness", "sync/wait_ms"}
    assert agreed | {"worker/4/loss", "worker/1/steps_per_second"} <= set(status)
    log.close()


def test_sync_scalars_speak_of_the_interval():
    before = make_status(100, workers=[make_worker(1, 0, wait_seconds=1.0)])
    after = make_status(200, workers=[make_worker(1, 0, wait_seconds=1.5)])
    assert status_scalars(after, before)["sync/wait_ms"] == pytest.approx(5.0)
    assert status_scalars(before, after)["sync/wait_ms"] == pytest.approx(10.0)
    idle = make_status(0, staleness=make_status(0).staleness)
    assert status_scalars(idle, None)["sync/staleness"] is None
