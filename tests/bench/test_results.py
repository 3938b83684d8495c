"""Rows in bench/results hold their spread, their origin and the failed runs."""

import csv
import io

import pytest

from bench import origin
from bench.__main__ import PARTS, documents, present
from bench.systems import scaling
from bench.table import Row

FACTS = {
    "date": "2026-01-02 03:04 UTC",
    "cores": 2,
    "processor": "a processor",
    "memory_gib": 24,
    "system": "Linux",
    "congestion_control": "cubic",
    "versions": {"keras": "3"},
    "commit": "abc",
    "dirty": True,
    "load_before": 0.1,
}
ROWS = {
    "loop": [Row("good", 1.0, "ms", 1.0, 1.0, 2.0, "lower", spread="0.90 to 1.10")],
    "links": [Row("bad | worse", 1.0, "ms", 1.0, 3.0, 2.0, "lower", "a note")],
}


def test_the_table_says_what_falls_short_and_what_failed():
    found = documents(FACTS, ROWS, ["journal"])
    assert "Fall short: bad | worse." in found["md"] and "not in the table: journal" in found["md"]
    assert "abc with uncommitted changes" in found["md"] and "no measurement" not in found["md"]
    head, good, bad = csv.reader(io.StringIO(found["csv"]))
    assert dict(zip(head, good, strict=True))["spread"] == "0.90 to 1.10"
    assert dict(zip(head, bad, strict=True))["met"] == "NO: falls short"


def test_a_busy_machine_is_told_of():
    assert "no measurement" in origin.describe(FACTS | {"load_before": 1.0})


def test_facts_are_complete_and_results_dated(tmp_path, monkeypatch):
    facts = origin.facts({"torch": "2"})
    assert set(facts) == set(FACTS) and facts["versions"]["torch"] == "2"
    assert origin.describe(facts).count("\n") == 3
    monkeypatch.setattr(origin, "RESULTS", tmp_path / "results")
    (path,) = origin.write("peers", FACTS, {"md": "text"})
    assert path.name == "2026-01-02-peers.md" and path.read_text() == "text"


def test_parts_that_are_not_there_are_left_out():
    assert set(present()) <= set(PARTS) and {"kernels", "scaling"} <= set(present())


def test_cost_of_an_update_is_that_after_the_warm_up():
    seen = [(1.0, 10, 5.0), (7.0, 100, 6.0), (12.0, 200, 6.5), (17.0, 300, 8.0)]
    assert scaling.cost_between(seen, 6.0) == pytest.approx(2.0 / 200)
    with pytest.raises(RuntimeError, match="more seconds"):
        scaling.cost_between(seen, 13.0)


def test_processor_time_is_read_past_any_name():
    fields = " ".join(["S", *map(str, range(4, 14)), "70", "5", "0"])
    assert scaling.ticks(f"1234 (a) b (c) {fields}") == 75
