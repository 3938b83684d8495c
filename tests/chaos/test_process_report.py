"""A soak's report names all problems and only problems."""

import pytest

from tests.chaos.soak import Outcome
from tests.chaos.soak_report import write
from tests.chaos.soak_samples import Growth

FLAT = Growth("ps-0", 900.0, (280.0, 281.0), (16.0, 16.0), (23.0, 23.0), 4.0, judged=True)
SUMMARY = {"updates": 5000, "membership": {"lost_updates": 0}, "rejected_pushes": {}}


def outcome(minutes=30.0, **changes):
    right = {
        "counts": {"cut": 2},
        "failures": [],
        "growths": [FLAT],
        "longest_pause_seconds": 20.0,
        "summary": SUMMARY,
        "accuracy": 0.72,
        "quiet_accuracy": 0.725,
    }
    return Outcome(minutes, 1, ("--method=adacomp",), **right | changes)


def test_nothing_is_wrong():
    report, wrong = write(outcome())
    assert not wrong and "Nothing is wrong." in report and "| cut | 2 |" in report


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"failures": ["worker-1 ended with 1 unasked"]}, "unasked"),
        ({"summary": {}}, "did not end"),
        ({"summary": SUMMARY | {"membership": {"lost_updates": 3}}}, "3 updates are lost"),
        ({"growths": []}, "lived long enough"),
        ({"longest_pause_seconds": 100.0}, "no update for 100 s"),
        ({"accuracy": 0.714}, "accuracy 0.7140"),
        ({"quiet_accuracy": float("nan")}, "accuracy"),
    ],
)
def test_what_is_wrong_is_told(changes, complaint):
    report, wrong = write(outcome(**changes))
    assert len(wrong) == 1 and complaint in wrong[0] and wrong[0] in report


def test_a_process_that_grows_is_told():
    grown = Growth("ps-0", 900.0, (280.0, 320.0), (16.0, 16.0), (23.0, 23.0), 160.0, judged=True)
    _, wrong = write(outcome(growths=[grown]))
    assert len(wrong) == 1 and wrong[0].startswith("ps-0 grows")


def test_early_accuracies_may_differ_more():
    assert not write(outcome(minutes=3.0, accuracy=0.70))[1]
    assert write(outcome(minutes=3.0, accuracy=0.67))[1]
