"""The comparison of methods on a language model: flags, table and picture of made-up runs."""

import argparse
import dataclasses

import pytest

from bench.studies import language_model as bench

OPTIONS = argparse.Namespace(
    steps=640,
    batch_size=8,
    network="decoder",
    lr_schedule="cosine",
    step_seconds=0.03,
    real=False,
    flag=["--quiet"],
)


def run_of(arm, seed, loss, num_bytes):
    points = [
        bench.LossPoint(0, 0.0, 0, 5.5),
        bench.LossPoint(10_000, 30.0, num_bytes // 2, 2 * loss),
        bench.LossPoint(20_000, 60.0, num_bytes, loss),
    ]
    return bench.PlayedRun(arm, seed, "abc", ["--x=1"], points)


RUNS = [
    run_of("bsp", 1, 1.40, 10_000_000),
    run_of("bsp", 2, 1.60, 10_000_000),
    run_of("diloco", 1, 1.52, 125_000),
    run_of("sparseloco", 1, 1.60, 5_000),
]


def test_all_arms_see_the_same_tokens():
    for arm, each in bench.ARMS.items():
        flags = dict(flag.lstrip("-").split("=") for flag in bench.flags_of(arm, 3, OPTIONS)[:-1])
        assert int(flags["iter_max"]) * each.local_steps == pytest.approx(640, abs=each.local_steps)
        assert flags["seed"] == "3" and flags["link_mbps"] == "10"
        assert int(flags.get("local_steps", 1)) == each.local_steps


def test_the_table_compares_means_with_the_goals():
    lines = bench.table(RUNS).splitlines()
    assert len(lines) == 2 + 3
    assert "| `bsp` | 1 | 2 | 0.02 | 1.500 ± 0.141 | 4.48 |" in lines[2]
    assert "| +1.3 % | 60 | 0.1 | 1/80 | loss met, bytes met |" in lines[3]
    assert "| +6.7 % | 60 | 0.0 | 1/2000 | loss MISSED, bytes met |" in lines[4]
    assert "goals" in bench.table(RUNS[2:])


@pytest.mark.product
def test_runs_are_read_as_they_were_written(tmp_path):
    assert [bench.PlayedRun.of(run.json()) for run in RUNS] == RUNS
    assert dataclasses.asdict(RUNS[0].points[-1])["loss"] == 1.4
    pictures = [tmp_path / name for name in ("one.svg", "two.svg")]
    for path in pictures:
        bench.draw(RUNS, path)
    first, second = (path.read_bytes() for path in pictures)
    assert first == second and len(first) > 10_000
