"""The number of local steps in a round, and the measured cost of compositions."""

import pathlib
import re

import pytest

from tests.command_line import given
from tests.documents import ROOT
from thinwire.advisor import costs, predict, role
from thinwire.advisor.costs import MeasuredCost
from thinwire.advisor.predict import Candidate
from thinwire.advisor.rounds import PLAYED_STEPS, RoundCosts
from thinwire.runtime.telemetry.predictions import (
    Predicted,
    Prediction,
    PredictionSetting,
    Recommendation,
    WorkerLink,
)

ESYNC = Candidate(("--method=esync",))
ROUNDS = Candidate(("--method=bsp", "--pacer=fixed"), most_local_steps=100)


def trial_of(*arguments, candidate=ROUNDS):
    with given("--type_node=Advisor", "--nb_workers=2", *arguments) as values:
        ((trial,), _) = predict.trials(pathlib.Path("x"), (candidate,), values)
        yield trial


@pytest.mark.parametrize(
    ("exchange", "step", "rate", "expected"),
    [
        (4.0, 0.1, 0.8, 160),  # 16 of 20 s
        (4.0, 0.1, 0.5, 40),
        (0.0, 0.1, 0.8, 2),  # nothing to save
        (4.0, 0.1, 1.0, 500),  # no number is enough
        (1e6, 0.1, 0.8, 500),
        (1.0, 0.3, 0.8, 14),
    ],
)
def test_the_fewest_steps_that_are_enough_of_a_round(exchange, step, rate, expected):
    of_round = RoundCosts(exchange, step)
    steps = of_round.steps_for(rate, 2, 500)
    assert steps == expected
    if 2 < steps < 500:
        shares = [n * step / (exchange + n * step) for n in (steps, steps - 1)]
        assert shares[0] >= rate - 1e-9 > shares[1] - 1e-9


def test_longer_rounds_follow_from_the_played_ones():
    played = Prediction(1 / (3.0 + 2 * 0.5), 2 * 2 * 8 / 4.0, 100.0, 200.0)  # two workers, batch 8
    of_round = RoundCosts.of(played, 0.4, 0.1)
    assert of_round.exchange_seconds == pytest.approx(3.0)
    found = of_round.stretched(played, 10)
    assert 1 / found.updates_per_second == pytest.approx(3.0 + 10 * 0.5)
    assert found.samples_per_second == pytest.approx(2 * 10 * 8 / 8.0)
    assert (found.bytes_up_per_push, found.bytes_down_per_pull) == (100.0, 200.0)


class Played:
    """Rounds of exchanges of 3 s, and 0.01 s of the local optimizer a step."""

    def coding_seconds(self, run):
        return 0.05 + 0.01 * run.method.pacer.longest_round

    def predict(self, run, links, coding_seconds):
        steps = run.method.pacer.longest_round
        seconds = 3.0 + 0.01 * steps + steps * max(link.step_seconds for link in links)
        return Prediction(1 / seconds, 2 * 8 * steps / seconds, 1e3, 2e3)


@pytest.mark.parametrize(
    ("arguments", "rate", "steps"),
    [
        ([], 0.8, 30),  # 12 of 15 s, of 0.4 + 0.01 s each
        ([], 0.99, 100),  # the most that is proposed
        (["--local_steps=7"], 0.8, 7),  # as given
    ],
)
def test_the_length_of_a_round_is_proposed_from_step_and_link(arguments, rate, steps):
    links = [WorkerLink(1, 0.2, 1.0, 1.0, 0.0, 9), WorkerLink(2, 0.4, 1.0, 1.0, 0.0, 9)]
    for trial in trial_of(*arguments):
        row = role._predict(Played(), trial, links, 1, rate)
        assert row.flags == ["--method=bsp", "--pacer=fixed", f"--local_steps={steps}"]
        assert 1 / row.prediction.updates_per_second == pytest.approx(3.0 + 0.41 * steps)
        made = trial.with_steps(steps).run.method
        assert made.pacer.longest_round == steps


def test_what_is_played_is_short():
    for trial in trial_of():
        assert trial.settled.method.pacer.longest_round == PLAYED_STEPS


def test_other_compositions_are_played_as_they_are():
    for trial in trial_of(candidate=ESYNC):
        assert trial.with_steps is None


def test_every_measured_cost_stands_on_its_page():
    for row in costs.load():
        page, _, anchor = row.source.partition("#")
        text = (ROOT / "docs" / page).read_text()
        parts = {slug(part.splitlines()[0]): part for part in re.split(r"\n#+ ", text)}
        assert anchor in parts, row.source
        for value in (row.value, row.reference):
            wanted = re.compile(rf"{re.escape(f'{value:.4g}')}0*(?!\d)")
            assert wanted.search(parts[anchor]), f"{row.flags}: {value} not in {row.source}"


def slug(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_every_measured_cost_is_of_flags_that_exist():
    for row in costs.load():
        steps = [f"--local_steps={row.local_steps}"] if row.local_steps else []
        with given("--type_node=Advisor", "--nb_workers=4", *row.flags, *steps) as values:
            predict.compose((), pathlib.Path("x"), values)


def cost(*flags, local_steps=0, value=0.9, reference=0.91, metric="accuracy"):
    work = ("bsp", "a small task", "lab/measurements.md#x")
    return MeasuredCost(flags, metric, value, reference, *work, local_steps)


def test_the_nearest_row_is_taken():
    rows = [
        cost("--method=a"),
        cost("--method=a", "--compression_rate=0.1"),
        cost("--method=b", local_steps=10),
        cost("--method=b", local_steps=50),
    ]
    assert costs.of(["--method=a", "--compression_rate=0.1"], rows) is rows[1]
    assert costs.of(["--method=a", "--compression_rate=0.01"], rows) is rows[0]
    assert costs.of(["--method=b", "--local_steps=7"], rows) is rows[2]
    assert costs.of(["--method=b", "--local_steps=20"], rows) is rows[3]
    assert costs.of(["--method=b", "--local_steps=90"], rows) is rows[3]
    assert costs.of(["--method=c"], rows) is None


def test_a_cost_in_words():
    assert "accuracy 1.0 points worse than bsp (0.9 and 0.91; a small task" in str(cost())
    loss = cost(metric="loss", value=1.5, reference=1.6, local_steps=64)
    assert "loss 0.1 better than bsp with --local_steps=64" in str(loss)


def test_advice_has_what_was_seen_and_what_is_unknown():
    rows = [
        Predicted([name], "digest", Prediction(1.0, rate, 1.0, 1.0), 0.01)
        for name, rate in (("--method=asgd", 20.0), ("--method=nothing", 99.0))
    ]
    setting = PredictionSetting("cnn", "mnist", 10, 1, 1)
    links = [WorkerLink(1, 0.1, 20.0, 0.0, 0.03, 12)]
    advice = Recommendation(setting, [], links, 100.0, 0.9, rows, [], 1, True)
    text = predict.describe(advice, pathlib.Path("a"))
    assert re.search(r"  --method=asgd: accuracy .* docs/lab/measurements.md#grouping", text)
    assert "* --method=nothing: not measured yet" in text
