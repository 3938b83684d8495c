"""The link with classes of service: examples computed by hand, and background traffic."""

import itertools

import numpy as np
import pytest

from tests.proto.links import SIZE, UNIT, drain, survivors
from thinwire.ops.types import ConfigurationError, Link
from thinwire.proto.emulation.priority_link import (
    SEND_BUFFER_BYTES,
    TURN_BYTES,
    PriorityLink,
)

MEGABIT_BYTES = 125_000


# -- examples with arithmetic -----------------------------------------------------------------


def test_an_urgent_message_overtakes_what_is_queued():
    link = PriorityLink(Link(mbps=10))
    link.offer(0.0, 7, MEGABIT_BYTES, "long")
    link.offer(0.05, 0, MEGABIT_BYTES, "urgent")
    urgent, long = drain(link)
    segment_seconds = 1448 * 8 / 10e6
    assert (urgent.item, long.item) == ("urgent", "long")
    assert 0.15 <= urgent.at <= 0.15 + segment_seconds
    assert long.at == pytest.approx(0.2)


def test_a_full_queue_drops_the_last_ones():
    """A datagram on the wire takes no space in the queue: 10 wait, and one is under way."""
    link = PriorityLink(Link(mbps=100, queue_kb=15))
    assert link.offer_datagrams(0.0, 3, SIZE, 50, "a") == 10
    assert link.offer_datagrams(0.0, 4, SIZE, 50, "other class") == 10
    assert link.offer_datagrams(0.00012 * 3.5, 3, SIZE, 50, "b") == 4
    arrivals = drain(link)
    assert survivors(arrivals, "a") == list(range(10))
    assert survivors(arrivals, "b") == list(range(4))
    assert survivors(arrivals, "other class") == list(range(10))


def test_a_full_queue_is_not_an_arrival():
    link = PriorityLink(Link(mbps=100, queue_kb=1))
    assert link.offer_datagrams(0.0, 3, SIZE, 5, "too large") == 0
    assert link.next_event() is None
    assert link.next_event() is None


def test_the_stream_is_never_dropped_but_takes_turns_with_datagrams():
    link = PriorityLink(Link(mbps=100, queue_kb=15))
    for number in range(3):
        link.offer(0.0, 7, MEGABIT_BYTES, number)
    link.offer_datagrams(0.0, 7, SIZE, 10, "datagrams")
    arrivals = drain(link)
    assert [arrival.item for arrival in arrivals] == ["datagrams", 0, 1, 2]
    assert arrivals[0].at == pytest.approx((TURN_BYTES + 10 * UNIT) * 8 / 100e6)
    assert arrivals[-1].at == pytest.approx((3 * MEGABIT_BYTES + 10 * UNIT) * 8 / 100e6)


def test_datagrams_pass_in_trains_of_a_few_milliseconds():
    link = PriorityLink(Link(mbps=10, delay_ms=7))
    link.offer_datagrams(0.0, 1, SIZE, 45, "batch")
    arrivals = drain(link)
    assert survivors(arrivals, "batch") == list(range(45))
    at = np.array([arrival.at for arrival in arrivals]) - 0.007
    sent = np.cumsum([len(arrival.indices) for arrival in arrivals])
    assert at == pytest.approx(sent * UNIT * 8 / 10e6)
    assert len(arrivals) == 12  # four datagrams in 4.8 ms


def test_losses_reorderings_and_duplicates_come_as_often_as_asked():
    link = PriorityLink(Link(loss=0.1, reorder=0.2, duplicate=0.3, delay_ms=20), seed=4)
    assert link.offer_datagrams(0.0, 1, SIZE, 20_000, "x") == 20_000
    first, late = drain(link)
    assert (first.at, late.at) == (0.020, 0.040)
    kept = 0.9 * 20_000
    both = np.concatenate([first.indices, late.indices])
    arrived = len(np.unique(both))
    assert 20_000 - arrived == pytest.approx(0.1 * 20_000, rel=0.05)
    assert len(both) - arrived == pytest.approx(0.3 * kept, rel=0.05)
    assert len(late.indices) == pytest.approx(0.2 * 1.3 * kept, rel=0.05)
    assert PriorityLink(Link(loss=1e-9), 1).offer_datagrams(0.0, 1, SIZE, 0, "none") == 0


# -- background -------------------------------------------------------------------------------

CONGESTED = Link(mbps=100, background_mbps=90, background_class=4)


def seconds_for(link, priority, num_bytes, frame_bytes=50_000):
    """How long a stream of frames takes, all of them ready at once."""
    model = PriorityLink(link)
    model.offer(0.0, 0, 1, "start")
    for _ in range(num_bytes // frame_bytes):
        model.offer(1.0, priority, frame_bytes, "frame")
    return drain(model)[-1].at - 1.0


def test_background_takes_its_share_from_what_is_less_urgent():
    alone = 4_000_000 * 8 / 100e6
    assert seconds_for(CONGESTED, 0, 4_000_000) == pytest.approx(alone, rel=0.01)
    assert seconds_for(CONGESTED, 3, 4_000_000) == pytest.approx(alone, rel=0.01)
    assert seconds_for(CONGESTED, 7, 4_000_000) == pytest.approx(alone / 0.1, rel=0.02)


def test_background_shares_its_own_class_in_order_of_coming():
    """With one frame at a time in an endless queue, a stream is left what background leaves."""
    alone = 4_000_000 * 8 / 100e6
    assert 0.8 * 10 * alone < seconds_for(CONGESTED, 4, 4_000_000) < 1.02 * 10 * alone
    bounded = Link(mbps=100, background_mbps=90, background_class=4, queue_kb=50)
    for frame_bytes in (50_000, 1_000_000):  # turns are as small as a window of TCP
        assert seconds_for(bounded, 4, 4_000_000, frame_bytes) == pytest.approx(2 * alone, rel=0.2)


def test_a_class_without_bound_says_when_it_holds_enough():
    link = PriorityLink(Link(mbps=100))
    batches = 0
    while link.has_space(2):
        link.offer_datagrams(0.0, 2, SIZE, 40, batches)
        batches += 1
    assert batches == -(-SEND_BUFFER_BYTES // (40 * UNIT))
    assert link.has_space(1)
    link.advance(40 * UNIT * 8 / 100e6 + 1e-9)
    assert link.has_space(2)
    bounded = PriorityLink(Link(mbps=100, queue_kb=1e6))
    bounded.offer_datagrams(0.0, 2, SIZE, 1000, "x")
    assert bounded.has_space(2)


def test_an_idle_link_jumps_over_background():
    link = PriorityLink(CONGESTED)
    link.offer(0.0, 0, 1000, "first")
    assert len(drain(link)) == 1
    link.offer(1e5, 0, 1000, "much later")
    assert len(drain(link)) == 1
    assert link._background.next_at == pytest.approx(1e5, abs=0.01)


def test_a_small_queue_does_not_eat_the_background():
    link = Link(mbps=100, background_mbps=50, background_class=4, queue_kb=3)
    model = PriorityLink(link)
    model.offer(0.0, 7, 10_000_000, "long")
    (arrival,) = drain(model)
    assert arrival.at == pytest.approx(10_000_000 * 8 / 50e6, rel=0.02)


@pytest.mark.parametrize("mbps", [0, 50, 90])
def test_background_must_leave_something(mbps):
    with pytest.raises(ConfigurationError, match=r"link_background_mbps=90.*less than"):
        PriorityLink(Link(mbps=mbps, background_mbps=90))


def test_next_event_never_stands_still():
    link = PriorityLink(CONGESTED)
    link.offer(0.0, 7, 300_000, "x")
    times = []
    while (at := link.next_event()) is not None:
        times.append(at)
        link.advance(at)
    assert all(one < two for one, two in itertools.pairwise(times))
    assert len(times) < 300
