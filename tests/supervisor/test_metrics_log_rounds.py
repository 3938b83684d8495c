"""The files of rounds hold each round once, despite repeats, torn ends and invalid lines."""

import pytest

from tests.thinwire.runtime.telemetry.test_round_trace import row
from thinwire.runtime.run.directory import rounds_of
from thinwire.runtime.telemetry.round_trace import MeasuredBy, pack
from thinwire.supervisor.metrics_log import RoundsLog, read_rounds

LIFE = MeasuredBy("alpha", "cpu", 0, "00000001")
NEXT_LIFE = MeasuredBy("alpha", "cpu", 0, "00000002")


def batch(*numbers, life=LIFE):
    return pack(life, [row(number) for number in numbers])[0]


def numbers(run_dir, worker=1):
    return [(each.life[-1], each.num_iters) for each in read_rounds(rounds_of(run_dir, worker))]


def test_rounds_that_come_twice_are_written_once(tmp_path):
    log = RoundsLog(tmp_path)
    log.add(1, batch(1, 2))
    log.add(1, batch(1, 2))
    log.add(1, batch(2, 3))
    log.close()
    assert numbers(tmp_path) == [("1", 1), ("1", 2), ("1", 3)]


def test_a_supervisor_that_returns_goes_on(tmp_path):
    log = RoundsLog(tmp_path)
    log.add(1, batch(1, 2))
    log.close()
    path = rounds_of(tmp_path, 1)
    path.write_text(path.read_text() + '{"num_iters":3,"num_sam')
    log = RoundsLog(tmp_path)
    for text in (batch(1, 2), batch(3, 4), batch(6)):  # round 5 arrived without a listener
        log.add(1, text)
    log.close()
    assert [number for _, number in numbers(tmp_path)] == [1, 2, 3, 4, 6]


def test_a_new_life_may_repeat_numbers(tmp_path):
    log = RoundsLog(tmp_path)
    log.add(1, batch(1, 2, 3))
    log.add(1, batch(3, 4, life=NEXT_LIFE))  # the server was set back to round 2
    log.close()
    assert numbers(tmp_path) == [("1", 1), ("1", 2), ("1", 3), ("2", 3), ("2", 4)]


def test_workers_have_files_of_their_own_and_none_without_rounds(tmp_path):
    log = RoundsLog(tmp_path)
    log.add(3, batch(1))
    log.close()
    assert [path.name for path in (tmp_path / "measure").iterdir()] == ["worker-3.jsonl"]


@pytest.mark.parametrize("text", ["", "{}", batch(1)[:-5]])
def test_nonsense_is_left_out(tmp_path, text):
    log = RoundsLog(tmp_path)
    log.add(1, text)
    log.add(1, batch(1))
    log.close()
    assert numbers(tmp_path) == [("1", 1)]
