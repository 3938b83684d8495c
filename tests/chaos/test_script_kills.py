"""Ten seeded kills of a script's workers, evaluator and PS; `tests.chaos.script_kills` has more."""

import json

import pytest

from tests.chaos import script_kills
from tests.chaos.script_kills import LIVES, Outcome, Plan, play, recorded, summary

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def instants():
    """Return the instants of each life without a kill."""
    return {life: recorded(life) for life in LIVES}


@pytest.mark.processes
@pytest.mark.parametrize("number", range(10))
def test_a_run_ends_as_promised(number, instants):
    plan = Plan.drawn(1, number, instants)
    outcome = play(plan)
    assert outcome.struck and not outcome.problems, (plan, outcome.problems, outcome.output[-3000:])


@pytest.mark.processes
def test_the_lives_pass_through_every_standing_of_a_run_without_kills(instants):
    passed = {
        standing for life in LIVES for each in instants[life].values() for standing, _ in each
    }
    assert passed == {
        *("ALONE", "AWAITING_STEP", "OPENING", "JOINED", "LEAVING", "LEFT", "CLOSING"),
        *("SUCCEEDING", "REPLACED"),
    }


def test_a_search_goes_on_after_its_last_line(tmp_path, monkeypatch, capsys):
    played = []
    monkeypatch.setattr(script_kills, "recorded", lambda life: {1: [("LEFT", "DONE")] * 3, 2: []})
    monkeypatch.setattr(
        Plan,
        "drawn",
        classmethod(
            lambda cls, seed, number, instants: cls(
                "loop", "bsp", 1, "LEFT", "DONE", number + 1, "ps-0", False
            )
        ),
    )

    def failing(plan):
        played.append(plan.count)
        return Outcome(plan.count != 3, ("exit code 7",) if plan.count == 2 else (), 1.0, "words")

    monkeypatch.setattr(script_kills, "play", failing)
    out = tmp_path / "kills.jsonl"
    assert script_kills.main(["--kills", "1", "--out", str(out)]) == 0
    assert script_kills.main(["--kills", "3", "--out", str(out)]) == 1
    assert script_kills.main(["--kills", "3", "--out", str(out)]) == 1
    assert played == [1, 2, 3]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["problems"] for row in rows] == [[], ["exit code 7"], []]
    assert rows[1]["output"] == "words" and "output" not in rows[0]
    assert summary(rows) == "2 of 3 runs struck (LEFT 2); 1 broke a promise\n"
    assert "was not struck" in capsys.readouterr().out
