"""The picture of speed-ups: its input data and the time that simulated devices take."""

import re

import pytest

from bench import origin
from bench.systems import speedup
from bench.systems.speedup import (
    PANELS,
    ExchangeCosts,
    Findings,
    RealPoint,
    SimulatedDevices,
    SpeedupPoint,
)
from tests.bench.test_results import FACTS

FOUND = Findings(
    FACTS,
    "python -m bench.systems.speedup",
    0.03,
    {"asgd": ExchangeCosts(0.007, 0.008), "diloco": ExchangeCosts(0.007, 0.008, 0.004)},
    [
        SpeedupPoint(panel.title, method, workers, 100.0, workers / 2)
        for panel in PANELS
        for method in ("asgd", "diloco")
        for workers in (1, 64)
    ],
    [RealPoint("asgd", 100.0, 0.5, 0.6)],
)


def test_what_is_found_is_read_again_and_tabled():
    assert Findings.of(FOUND.to_json()) == FOUND
    text = speedup.document(FOUND)
    assert "| asgd | 7.00 | 8.00 | 0.00 |" in text and "| asgd | 0.5 | 32 |" in text
    assert "| asgd | 100 | 0.6 | 0.5 | +20 % |" in text


def test_it_is_drawn_from_the_same_numbers(tmp_path):
    target = tmp_path / "speedup.svg"
    (source,) = origin.RESULTS.glob("*-speedup.json")
    speedup.draw(Findings.of(source.read_text()), target)
    paths = [
        re.findall(r' d="(.*?)"', path.read_text(), re.S) for path in (target, speedup.PICTURE)
    ]
    assert paths[0] == paths[1], f"python -m bench.systems.speedup --from {source}"


@pytest.mark.product
def test_devices_wait_for_what_is_slow(tmp_path, monkeypatch):
    monkeypatch.setattr(speedup, "_PUSHES", 4)
    devices = SimulatedDevices(tmp_path)
    step, wide = devices.step_seconds, speedup.Panel("wide", 10_000.0)
    free, dear = ExchangeCosts(0.0, 0.0), ExchangeCosts(step, 0.0)

    def speed(method, workers, panel, costs):
        return devices.rate(method, workers, panel, costs) * step / speedup.BATCH_SIZE

    bytes_of_all = 2 * 4 * 1_199_882
    assert speed("asgd", 1, wide, free) == pytest.approx(
        step / (step + 8 * bytes_of_all / 10e9), rel=0.1
    )
    assert speed("asgd", 4, wide, dear) == pytest.approx(1.0, rel=0.05)  # the PS's capacity
    thin = speed("asgd", 1, PANELS[0], free)
    assert thin == pytest.approx(step / (8 * bytes_of_all / 10e6), rel=0.1)
    assert speed("dgs", 1, PANELS[0], free) > 20 * thin
