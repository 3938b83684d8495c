"""Rows report if they meet their goal, and the table's columns are aligned."""

from bench.table import Row, quartiles, render, spread, times


def row(ratio, goal, better):
    return Row("work", 1.5, "ms", 1.0, ratio, goal, better, "a note")


def test_met_follows_the_direction():
    assert row(2.0, 2.0, "lower").met and not row(2.1, 2.0, "lower").met
    assert row(0.9, 0.9, "higher").met and not row(0.8, 0.9, "higher").met
    assert row(1.0, None, "lower").met is None


def test_the_table_says_what_is_met_and_lines_up():
    text = render([row(3.0, 2.0, "lower"), row(1.0, 0.5, "higher"), row(1.0, None, "lower")])
    head, rule, missed, reached, compared = text.splitlines()
    assert len(rule) == len(head)
    assert "NO" in missed and "<= 2" in missed and "yes" in reached and ">= 0.5" in reached
    assert {line.index("a note") for line in (missed, reached, compared)} == {head.index("note")}


def test_contenders_take_turns():
    calls = []
    seconds = times([lambda: calls.append("A"), lambda: calls.append("B")], 3)
    assert calls == list("ABABABAB") and [len(own) for own in seconds] == [3, 3]


def test_spread_is_of_the_ratios():
    assert spread([1.2, 0.9, 1.0]) == "0.90 to 1.20" and spread([1.0]) == ""
    assert quartiles([4.0, 1.0, 2.0, 3.0, 5.0]) == "1.50 to 4.50"
