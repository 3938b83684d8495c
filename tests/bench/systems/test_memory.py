"""The memory of a PS process stays below its bound from the offer to the last update."""

import pytest

from bench.systems import memory
from bench.systems.memory import CASES

#: Memory of gRPC's threads for messages under way, and of the modules that a model needs.
SLACK_BYTES = 96 << 20


def points(name, num_parameters, updates):
    case = next(each for each in CASES if each.name == name)
    return list(memory.measure(case, num_parameters, updates))


@pytest.mark.processes
@pytest.mark.product
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_memory_stays_within_its_bound(name):
    for point in points(name, 10_000_000, 4):
        bound = point.case.bound * point.weights_bytes + SLACK_BYTES
        assert point.num_bytes < bound, (point.name, point.ratio)


@pytest.mark.processes
def test_a_model_that_is_offered_is_held_once():
    # So large that half of it exceeds what gRPC's threads hold at the moment of the measurement.
    offered, pulled, _ = points("dgs, 2 workers", 25_000_000, 1)
    assert offered.num_bytes < 1.5 * offered.weights_bytes + (32 << 20)
    assert pulled.num_bytes < 3.5 * offered.weights_bytes + (32 << 20)  # and two replicas
