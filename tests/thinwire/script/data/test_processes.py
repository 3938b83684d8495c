"""Workers as real processes: unseeded random choices agree wherever they must."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.thinwire.script.data.two_processes import EPOCHS, N

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.product
@pytest.mark.processes
def test_parts_of_unseeded_data_are_disjoint_and_complete_in_every_epoch():
    module = "tests.thinwire.script.data.two_processes"
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(number), "2"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2)
    ]
    first, second = (json.loads(worker.communicate(timeout=100)[0]) for worker in workers)
    assert len(first) == 16
    for name, epochs in first.items():
        for epoch in range(EPOCHS):
            assert sorted(epochs[epoch] + second[name][epoch]) == list(range(N)), name
        assert len({str(rows) for rows in epochs}) == EPOCHS, f"{name}: one order in every epoch"
