"""The plan of a peers' table: tuning runs first, then alternating rounds; resumable."""

import dataclasses
import json

import pytest

from bench.peers import curves, plan
from bench.peers.__main__ import read_records

SETTINGS = plan.Settings(
    names=("dense", "sparse"),
    dense=frozenset({"dense"}),
    links=("none", "100", "10"),
    learning_rates=(0.01, 0.1),
    rounds=2,
    seconds=60.0,
    most_seconds=600.0,
    targets=(0.80, 0.85),
)


def record(run, seconds=10.0, score=0.9, steps=400.0):
    point = curves.CurvePoint(seconds, steps, 1e6, 2e6, score)
    rates = curves.Rates(20.0, 50.0, 100.0, 300.0)
    found = {
        "samples_per_second": 1280.0,
        "rates": dataclasses.asdict(rates),
        "curve": [dataclasses.asdict(point)],
    }
    return plan.record_of(run, found)


def play(settings=SETTINGS, records=None, best=0.1):
    """Make every run; the given rate is the faster one."""
    records = [] if records is None else records
    made = []
    for run in plan.pending(settings, records):
        made.append(run)
        records.append(record(run, seconds=10.0 if run.learning_rate == best else 20.0))
    return made, records


def test_rates_are_tuned_in_turn_and_then_the_best_is_used():
    made, _ = play()
    tuned = [(run.learning_rate, run.contender) for run in made[:4]]
    assert tuned == [(0.01, "dense"), (0.01, "sparse"), (0.1, "dense"), (0.1, "sparse")]
    assert {run.learning_rate for run in made[4:]} == {0.1}
    rest = [(run.round, run.link, run.contender) for run in made[4:]]
    assert rest == [
        (1, "100", "dense"),
        (1, "100", "sparse"),
        (1, "10", "dense"),
        (1, "10", "sparse"),
        (2, "none", "dense"),
        (2, "none", "sparse"),
        (2, "100", "dense"),
        (2, "100", "sparse"),
        (2, "10", "dense"),
        (2, "10", "sparse"),
    ]


def test_lengths_follow_what_is_known():
    made, _ = play()
    found = {(run.link, run.contender, run.round): run for run in made}
    # 400 steps of two workers, and a margin of three tenths.
    assert found["100", "dense", 1].steps == 260 and found["100", "dense", 1].seconds == 600.0
    assert found["100", "dense", 2].steps == 0 and found["100", "dense", 2].seconds == 60.0
    assert found["10", "dense", 1].steps == found["10", "dense", 2].steps == 20
    assert found["10", "sparse", 1].steps == 260
    assert found["none", "sparse", 2].seconds == 60.0
    assert found["100", "dense", 1].snapshot_seconds > found["100", "sparse", 1].snapshot_seconds


def test_peers_with_rounds_end_after_whole_ones_and_are_timed_for_two_over_the_thinnest_link():
    settings = dataclasses.replace(
        SETTINGS, dense=frozenset(), links=("none", "10", "1"), round_steps={"dense": 50}, rounds=1
    )
    made, _ = play(settings)
    found = {(run.link, run.contender): run.steps for run in made if run.link != "none"}
    assert found == {
        ("10", "dense"): 301,
        ("10", "sparse"): 260,
        ("1", "dense"): 101,
        ("1", "sparse"): 260,
    }


@pytest.mark.parametrize("stopped_after", [0, 1, 5, 9, 13])
def test_a_resumed_table_makes_the_rest(stopped_after):
    whole, records = play()
    rest, _ = play(records=records[:stopped_after])
    assert [run.key for run in rest] == [run.key for run in whole[stopped_after:]]
    assert play(records=list(records))[0] == []


def test_who_never_reaches_the_target_is_told_by_accuracy():
    runs = [plan.PlannedRun("dense", "none", rate, 1) for rate in (0.01, 0.1)]
    records = [record(runs[0], score=0.7), record(runs[1], score=0.6)]
    known = plan.Known(records, SETTINGS.targets)
    assert known.best_rate("dense") == 0.01
    assert known.steps_to("dense", 0.8) is None and known.best_rate("other") is None


def test_failed_runs_count_for_nothing():
    failed = plan.record_of(plan.PlannedRun("dense", "none", 0.01, 1), None, error="crashed")
    known = plan.Known([failed], SETTINGS.targets)
    assert known.best_rate("dense") is None
    made, _ = play(records=[failed])
    assert ("dense", 0.01) not in [(run.contender, run.learning_rate) for run in made]


def test_costs_are_medians_or_computed():
    base = plan.PlannedRun("dense", "none", 0.01, 1)
    records = [
        record(dataclasses.replace(base, round=number), seconds=seconds)
        for number, seconds in ((1, 30.0), (2, 50.0), (3, 40.0))
    ]
    slow = record(dataclasses.replace(base, link="10"), score=0.1)
    known = plan.Known([*records, slow], SETTINGS.targets)
    point, is_computed = known.cost("dense", "none", 0.85)
    assert point.seconds == 40.0 and not is_computed
    point, is_computed = known.cost("dense", "10", 0.85)
    # 400 steps at 20 a second, 100 bytes up and 300 down each.
    assert is_computed and point == curves.CurvePoint(20.0, 400.0, 4e4, 1.2e5)
    assert known.cost("dense", "100", 0.85) is None


def test_the_estimate_shrinks_as_runs_are_made():
    _, records = play()
    times = [plan.estimated_seconds(SETTINGS, records[:number]) for number in range(15)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 14 * 60.0 and times[-1] == 0.0


def test_records_are_read_back_without_the_failed_and_the_cut(tmp_path):
    path = tmp_path / "records.jsonl"
    assert read_records(path) == []
    good = record(plan.PlannedRun("dense", "none", 0.01, 1))
    failed = plan.record_of(plan.PlannedRun("sparse", "none", 0.01, 1), None, error="crashed")
    path.write_text(json.dumps(good) + "\n" + json.dumps(failed) + "\n" + '{"ok": tr')
    assert read_records(path) == [good]
