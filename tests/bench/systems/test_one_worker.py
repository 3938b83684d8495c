"""The measured script runs alone and as a distributed run."""

import re

import pytest

from bench.systems import one_worker

pytestmark = [pytest.mark.processes, pytest.mark.product, pytest.mark.timeout(150)]


def test_both_kinds_of_steps_are_measured():
    line = one_worker._run("dgs", "20,042", 1)
    found = re.fullmatch(
        r"alone (\S+) ms, shared (\S+) ms a step \(medians of 14\): \S+ of its steps/s", line
    )
    assert found, line
    assert min(float(each) for each in found.groups()) > 1
