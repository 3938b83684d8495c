"""Invariants of the link with classes of service; with one class it equals the plain link."""

import collections

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.proto.links import SIZE, UNIT, drain, survivors
from thinwire.ops.types import BEST_EFFORT, Link
from thinwire.proto.emulation.link import LinkModel
from thinwire.proto.emulation.priority_link import HEADER_BYTES, PriorityLink


@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 30_000)), max_size=30),
    st.sampled_from([0, 0.1, 10]),
    st.sampled_from([0, 20]),
    st.sampled_from([0, 0.2]),
    st.integers(0, BEST_EFFORT),
    st.integers(0, 99),
)
def test_messages_of_one_class_pass_as_on_the_plain_link(
    messages, mbps, delay, loss, priority, seed
):
    link = Link(mbps, delay, loss)
    plain, own = LinkModel(link, seed), PriorityLink(link, seed)
    expected = []
    for number, (now, size) in enumerate(sorted(messages)):
        delivery = plain.send(now, size)
        expected.append((delivery.delivered_at, number, delivery.bytes_on_wire))
        own.offer(now, priority, size, number)
    assert [(a.at, a.item, a.bytes_on_wire) for a in drain(own)] == expected
    assert own.next_event() is None


LINKS = st.builds(
    Link,
    mbps=st.sampled_from([0.0, 1.0, 100.0]),
    delay_ms=st.sampled_from([0.0, 15.0]),
    loss=st.sampled_from([0.0, 0.05]),
    queue_kb=st.sampled_from([0.0, 3.0, 40.0]),
    reorder=st.sampled_from([0.0, 0.3]),
    duplicate=st.sampled_from([0.0, 0.3]),
)
OFFERS = st.lists(
    st.tuples(
        st.floats(0, 0.5),
        st.integers(0, BEST_EFFORT),
        st.integers(1, 60),
        st.integers(1, SIZE),
        st.booleans(),
    ),
    max_size=25,
)
BACKGROUND = st.sampled_from([(0.0, BEST_EFFORT), (0.9, 4), (0.5, 0), (0.99, BEST_EFFORT)])


def with_background(link, background):
    share, priority = background
    if link.mbps == 0 or share == 0:
        return link
    return Link(
        **{**vars(link), "background_mbps": share * link.mbps, "background_class": priority}
    )


def offer_all(link, offers, before=lambda now: ()):
    """Offer in order of time, `before(now)` before each offer; return the delivered messages."""
    fitting, found = {}, []
    for number, (now, priority, count, size, reliable) in enumerate(sorted(offers)):
        found += before(now)
        if reliable:
            link.offer(now, priority, count * size, number)
        else:
            fitting[number] = link.offer_datagrams(now, priority, size, count, number)
    return fitting, found


@settings(deadline=None)
@given(LINKS, BACKGROUND, OFFERS, st.lists(st.floats(0, 1), max_size=20), st.integers(0, 9))
def test_results_do_not_depend_on_when_time_is_advanced(link, background, offers, looks, seed):
    link = with_background(link, background)
    one, two = PriorityLink(link, seed), PriorityLink(link, seed)
    looks = sorted(looks)

    def look(now):
        found = []
        while looks and looks[0] <= now:
            found += two.advance(looks.pop(0))
        return found

    fitting, _ = offer_all(one, offers)
    again, early = offer_all(two, offers, look)
    expected, actual = one.advance(1e6), early + two.advance(1e6)
    assert fitting == again
    assert len(expected) == len(actual)
    for left, right in zip(expected, actual, strict=True):
        assert (left.at, left.item, left.bytes_on_wire) == (
            right.at,
            right.item,
            right.bytes_on_wire,
        )
        assert (left.indices is None) == (right.indices is None)
        assert left.indices is None or left.indices.tolist() == right.indices.tolist()


@settings(deadline=None)
@given(LINKS, BACKGROUND, OFFERS, st.integers(0, 9))
def test_what_fits_arrives_once_unless_it_is_lost_or_duplicated(link, background, offers, seed):
    model = PriorityLink(with_background(link, background), seed)
    fitting, _ = offer_all(model, offers)
    arrivals = drain(model)
    assert model.advance(1e6) == []  # no delivery was reported late
    ordered = sorted(offers)
    messages = [number for number, offer in enumerate(ordered) if offer[4]]
    assert sorted(a.item for a in arrivals if a.indices is None) == messages
    assert model.next_event() is None
    for number, capacity in fitting.items():
        arrived = survivors(arrivals, number)
        assert set(arrived) <= set(range(capacity))
        assert link.loss or len(set(arrived)) == capacity
        assert link.duplicate or len(set(arrived)) == len(arrived)
    sent = [n * (ordered[at][3] + HEADER_BYTES) for at, n in fitting.items()]
    passed = sum(a.bytes_on_wire for a in arrivals if a.indices is not None)
    assert link.loss or link.duplicate or passed == sum(sent)


@given(OFFERS, st.integers(0, 9))
def test_what_is_urgent_waits_for_one_packet_only(offers, seed):
    """The most urgent class has the whole link, except for one packet already being sent."""
    link = Link(mbps=10)
    shared, alone = PriorityLink(link, seed), PriorityLink(link, seed)
    first = min((offer[1] for offer in offers), default=0)
    offer_all(shared, offers)
    ordered = sorted(offers)
    for number, (now, priority, count, size, reliable) in enumerate(ordered):
        if priority == first and reliable:
            alone.offer(now, priority, count * size, number)
        elif priority == first:
            alone.offer_datagrams(now, priority, size, count, number)
    expected = collections.defaultdict(list)
    for arrival in alone.advance(1e6):
        expected[arrival.item].append(arrival.at)
    actual = collections.defaultdict(list)
    for arrival in shared.advance(1e6):
        if ordered[arrival.item][1] == first:
            actual[arrival.item].append(arrival.at)
    packet_seconds = UNIT * 8 / 10e6
    assert expected.keys() == actual.keys()
    # Each idle moment of the urgent class may end with one packet of another class in its way.
    for item, times in expected.items():
        late = np.array(actual[item]) - np.array(times)
        assert (late >= -1e-9).all()
        assert (late <= packet_seconds * len(offers) + 1e-9).all()
