"""Pushes put together of streams and datagrams, by the real receptions before a real core."""

import numpy as np
import pytest

from ps import events
from tests.ps.port import Port


@pytest.fixture
def port():
    return Port()


def started(port):
    """Return three workers of a run that has begun."""
    workers = [port.join(number) for number in (1, 2, 3)]
    for each in workers:
        port.queue.append(events.Pull(each.number, each.incarnation, None, 0))
    port.turn()
    return workers


def test_a_push_is_the_mean_of_all_that_came(port):
    one, two, three = started(port)
    for each in (one, two, three):
        each.push(each.begin(np.arange(28, dtype=np.float32)))
    assert port.core.version == 1
    for event in port.pushed:
        np.testing.assert_array_equal(event.update.values, np.arange(28, dtype=np.float32))


# -- sessions ---------------------------------------------------------------------------------


def test_a_worker_that_joins_in_the_middle_of_a_round_keeps_its_session(port):
    one, two, three = started(port)
    port.queue.append(events.Leave(3, three.incarnation, "interrupted"))
    port.turn()
    one.push(one.begin())  # the round has begun, two is awaited
    again = port.join(3, 3001)
    assert port.core.sync_state["joining"] == [3]
    two.push(two.begin())
    assert port.core.version == 1
    for each in (one, two, again):
        each.push(each.begin(np.full(28, each.number, np.float32)))
    assert port.core.version == 2
    assert port.pushed[-1].worker == 3
    np.testing.assert_array_equal(port.pushed[-1].update.values, np.full(28, 3, np.float32))
