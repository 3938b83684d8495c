"""Every case with some hundred faults, on a virtual clock (`make product`)."""

import pytest

from tests.chaos.simulated import CASES, outcomes

RUNS = 120


@pytest.mark.product
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES, ids=[f"{number}: {c}" for number, c in enumerate(CASES)])
def test_no_fault_changes_what_was_acknowledged(case):
    failures, struck = [], 0
    for outcome in outcomes(seed=5, count=RUNS, cases=[case]):
        struck += outcome.struck
        if outcome.error:
            failures.append(f"{outcome.case} | {outcome.plans}\n{outcome.error}")
    assert not failures, "\n".join(failures)
    assert struck > RUNS // 2
