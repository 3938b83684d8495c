"""The peers' table shows medians and spreads, marks computed values and checks the goals."""

import dataclasses

import pytest

from bench.peers import curves, plan, report, work
from bench.peers.subjects import SUBJECTS

TARGETS = (0.80, 0.85)
CNN, DECODER = SUBJECTS[work.MNIST_CNN], SUBJECTS[work.DECODER]


def record(name, link="none", samples=1000.0, number=1, reached=40.0, up=4.8e6, scores=TARGETS):
    rates = curves.Rates(samples / 64, 50.0, up, up)
    curve = [
        curves.CurvePoint(reached / 2, reached * 10, 50 * up, 50 * up, scores[0]),
        curves.CurvePoint(reached, reached * 20, 100 * up, 100 * up, scores[1]),
    ]
    found = {
        "samples_per_second": samples,
        "rates": dataclasses.asdict(rates),
        "curve": [dataclasses.asdict(point) for point in curve] if reached else [],
    }
    return plan.record_of(plan.PlannedRun(name, link, 0.01, number), found)


def rows(records, *links, subject=CNN, targets=TARGETS):
    return {row.work: row for row in report.rows(subject, records, links, targets)}


def test_a_line_has_medians_and_spread():
    records = [
        record("torch DDP", samples=speed, number=n)
        for n, speed in enumerate((1000.0, 1300.0, 1200.0), 1)
    ]
    head, line = report.cells(CNN, records, ["none"], TARGETS)
    assert len(head) == len(line)
    assert line[:6] == ["none", "torch DDP", "0.01", "3", "1,200", "1,000 to 1,300"]
    assert line[6:] == ["4,800,000", "4,800,000", "20", "480", "40", "960"]


def test_computed_figures_are_marked_and_missing_ones_said():
    records = [record("torch DDP"), record("torch DDP", "10", 128.0, reached=0)]
    line = report.cells(CNN, records, ["10"], TARGETS)[1]
    # 800 steps at two a second; 4.8 MB each way for each.
    assert line[-2:] == ["400 c", "7,680 c"]
    assert (
        report.cells(CNN, [record("torch DDP", reached=0)], ["none"], TARGETS)[1][-2]
        == "not reached"
    )


def test_dense_ours_is_held_against_each_peer_without_a_limit():
    records = [
        record("thinwire asgd", samples=1500.0),
        record("thinwire dgs", samples=1700.0),
        record("torch DDP", samples=1600.0),
        record("MXNet dist_sync"),
    ]
    found = rows(records, "none")
    assert found["thinwire asgd / torch DDP, samples/s, no limit"].met is False
    assert found["thinwire asgd / MXNet dist_sync, samples/s, no limit"].met is True


@pytest.mark.parametrize(("samples", "met"), [(1650.0, True), (1500.0, False)])
def test_goals_over_a_link(samples, met):
    records = [
        record("thinwire dgs", samples=samples, up=5e4),
        record("thinwire dgs", "100", samples, up=5e4),
        record("MXNet dist_sync", "100", 150.0),
        record("TF ParameterServerStrategy", "100", 200.0),
        record("torch DDP", "100", 310.0),
    ]
    found = rows(records, "100")
    assert found["thinwire dgs / TF ParameterServerStrategy, samples/s, 100 Mbit/s"].met is met
    assert found["thinwire dgs / torch DDP, samples/s, 100 Mbit/s"].met is met
    assert "thinwire dgs / MXNet dist_sync, samples/s, 100 Mbit/s" not in found


def test_seconds_and_bytes_are_held_against_the_best_peer():
    ours = [record("thinwire asgd", reached=30.0), record("thinwire dgs", reached=60.0, up=5e4)]
    records = [*ours, record("torch DDP", reached=40.0), record("MXNet dist_sync", reached=50.0)]
    found = rows(records, "none")
    seconds = found["seconds to 0.85, best of ours / best peer, no limit"]
    assert (seconds.value, seconds.limit, seconds.met) == (30.0, 40.0, True)
    assert seconds.note == "thinwire asgd; torch DDP"
    assert found["bytes to 0.85, best of ours / best peer, no limit"].value == 10.0
    assert found["seconds to 0.80, best of ours / best peer, no limit"].met is None  # no goal


@pytest.mark.parametrize(("link", "goal"), [("100", 1.0), ("10", 0.65), ("1", 0.2)])
def test_a_decoder_is_measured_by_its_loss_with_a_goal_for_each_link(link, goal):
    scores = (-2.9, -2.3)
    ours = record("thinwire diloco", link, reached=30.0, scores=scores)
    records = [ours, record("torchft LocalSGD", link, reached=40.0, scores=scores)]
    found = rows(records, link, subject=DECODER, targets=DECODER.scores([2.9, 2.3]))
    seconds = found[f"seconds to loss 2.30, best of ours / best peer, {link} Mbit/s"]
    assert (seconds.value, seconds.limit) == (30.0, 40.0)
    assert (seconds.goal, seconds.met) == (goal, goal == 1.0)
    assert found[f"seconds to loss 2.90, best of ours / best peer, {link} Mbit/s"].goal is None
    head = report.cells(DECODER, records, [link], [-2.3])[0]
    assert head[-2:] == ["s to loss 2.30", "MB to loss 2.30"]


def test_troubles_are_listed():
    failed = plan.record_of(plan.PlannedRun("torch DDP", "100", 0.1, 1), None, error="gloo aborted")
    again = record("torch DDP, PowerSGD") | {"attempts": 2, "error": "crashed"}
    left_out = plan.record_of(plan.PlannedRun("torch DDP", "10", 0.1, 1), None, left_out=True)
    text = report.document(CNN, [failed, again, left_out], ["none", "100"], TARGETS)
    assert "link 10," not in text
    assert "torch DDP, link 100, lr 0.1: failed: gloo aborted" in text
    assert "worked at attempt 2: crashed" in text


def test_the_sheet_has_the_table():
    text = report.sheet(CNN, [record("torch DDP")], ["none"], TARGETS)
    assert text.splitlines()[0].startswith("link,contender,lr,runs,samples/s")
    assert '"4,800,000"' in text
