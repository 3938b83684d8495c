"""The peers' curves: steps of several processes, rates after warm-up, accuracies."""

import dataclasses
import json

import pytest

from bench.peers import curves
from bench.peers.lab import Bytes, sent_bytes

LISTING = json.dumps(
    [
        {"kind": "tbf", "dev": "way0", "root": True, "bytes": 9623, "packets": 12, "drops": 1},
        {"kind": "pfifo", "dev": "way0", "parent": "1:", "bytes": 1},
    ]
)


def test_counters_are_those_of_the_root_queue():
    assert sent_bytes(LISTING) == 9623
    with pytest.raises(ValueError, match="no root queue"):
        sent_bytes("[]")


def test_bytes_between_two_samples_are_interpolated():
    counted = Bytes([(10.0, 0.0, 100.0), (12.0, 50.0, 300.0)])
    assert counted.at(11.0) == (25.0, 200.0)
    assert counted.at(1.0) == (0.0, 100.0) and counted.at(99.0) == (50.0, 300.0)


def test_steps_of_all_processes_add_up():
    steps = curves.Steps([[(1.0, 1), (3.0, 5)], [(2.0, 1), (4.0, 3)], []])
    assert (steps.began, steps.ended) == (1.0, 3.0)
    assert steps.at(0.5) == 0
    assert steps.at(2.0) == 3 + 1
    assert steps.at(3.0) == 5 + 2


def test_lines_without_a_new_step_do_not_prolong_the_run():
    steps = curves.Steps([[(0.0, 0), (1.0, 1), (2.0, 1), (3.0, 3), (9.0, 3)]])
    assert (steps.began, steps.ended) == (1.0, 3.0)


@pytest.mark.parametrize("lines", [[], [[]], [[(1.0, 0)]]], ids=["nobody", "silent", "no step"])
def test_no_steps_are_refused(lines):
    with pytest.raises(ValueError, match="no step"):
        curves.Steps(lines)


def test_rates_leave_the_beginning_out():
    # One step a second for 5 s, then ten: a slow start that must not count.
    steps = curves.Steps([[(0.0, 1), (5.0, 6), (25.0, 206)]])
    counted = Bytes([(0.0, 0.0, 0.0), (5.0, 7e9, 8e9), (25.0, 7e9 + 400.0, 8e9 + 2000.0)])
    found = curves.rates(steps, counted)
    assert found == curves.Rates(10.0, 20.0, 2.0, 10.0)
    assert curves.rates(steps, None) == curves.Rates(10.0, 20.0, None, None)


def test_in_rounds_the_beginning_counts():
    # 50 steps in 4 s, an exchange of 6 s, twice; the first step of the next round ends the run.
    lines = [(0.0, 1), (4.0, 49), (10.0, 50), (14.0, 99), (20.0, 101)]
    found = curves.rates(curves.Steps([lines]), None, in_rounds=True)
    assert found.steps_per_second == 5.0 and found.seconds == 20.0


def test_the_first_step_lies_a_round_before_the_first_that_is_reported():
    rounds = [(30.0, 100), (40.0, 200), (50.0, 300)]
    steps = curves.Steps([rounds], round_steps=100)
    assert (steps.began, steps.ended) == (20.0, 50.0) and steps.at(40.0) == 200
    assert curves.Steps([rounds]).began == 30.0
    assert curves.Steps([rounds[:1]], round_steps=100).began == 30.0  # nothing is known of rounds


def test_a_short_run_leaves_a_quarter_out():
    found = curves.rates(curves.Steps([[(0.0, 1), (4.0, 5), (8.0, 9)]]), None)
    assert found.seconds == 6.0 and found.steps_per_second == 1.0


def test_a_run_of_one_step_has_no_rate():
    with pytest.raises(ValueError, match="more seconds"):
        curves.rates(curves.Steps([[(0.0, 1)]]), None)


def test_evaluation_stops_at_the_highest_target_but_for_the_last(tmp_path):
    accuracies = [0.5, 0.79, 0.81, 0.86, 0.87, 0.4]
    kept = [(curves.CurvePoint(float(n), n, 0.0, 0.0), tmp_path / str(n)) for n in range(6)]
    asked = []

    def evaluate(path):
        asked.append(int(path.name))
        return accuracies[asked[-1]]

    curve = curves.evaluated(kept, [0.80, 0.85], evaluate)
    assert asked == [0, 1, 2, 3, 5]
    assert curves.first_at(curve, 0.80).seconds == 2.0
    assert curves.first_at(curve, 0.85).seconds == 3.0
    assert curves.first_at(curve, 0.90) is None


def test_points_carry_what_they_cost(tmp_path):
    steps = curves.Steps([[(100.0, 1), (110.0, 11)]])
    counted = Bytes([(90.0, 0.0, 0.0), (110.0, 20.0, 40.0)])
    ((point, path),) = curves.points([(105.0, tmp_path)], steps, counted)
    assert point == curves.CurvePoint(5.0, 6.0, 15.0, 30.0) and path == tmp_path


def test_what_takes_too_long_is_computed():
    warm = curves.Rates(4.0, 20.0, 1000.0, 3000.0)
    assert curves.computed(200.0, warm) == curves.CurvePoint(50.0, 200.0, 2e5, 6e5)
    uncounted = dataclasses.replace(warm, bytes_up=None, bytes_down=None)
    assert curves.computed(200.0, uncounted).bytes_up is None


def test_progress_files_are_read_though_one_ends_in_the_middle(tmp_path):
    def line(time, steps, snapshot=None):
        return json.dumps({"time": time, "steps": steps, "snapshot": snapshot}) + "\n"

    (tmp_path / "progress-0.jsonl").write_text(line(1.0, 1) + line(2.0, 2) + '{"time": 3')
    (tmp_path / "progress-1.jsonl").write_text(line(1.5, 1) + line(2.0, 2))
    (tmp_path / "progress-server.jsonl").write_text(line(1.8, None, "00000.npy"))
    steps, snapshots = curves.read(tmp_path)
    assert steps.at(2.0) == 4
    assert snapshots == [(1.8, tmp_path / "00000.npy")]
