"""The link model against arithmetic, the paced sender on a fake clock, rates of real streams."""

import itertools

import numpy as np
import pytest

from thinwire.ops.types import Link
from thinwire.proto.emulation.link import SEGMENT_BYTES, EmulatedSender, LinkModel

MEGABIT_BYTES = 125_000


def test_rate_is_kept_over_messages_sent_together():
    model = LinkModel(Link(mbps=10))
    deliveries = [model.send(5.0, MEGABIT_BYTES) for _ in range(4)]
    assert [delivery.serialised_at for delivery in deliveries] == pytest.approx(
        [5.1, 5.2, 5.3, 5.4]
    )
    assert all(delivery.delivered_at == delivery.serialised_at for delivery in deliveries)


def test_an_idle_link_starts_anew():
    model = LinkModel(Link(mbps=10))
    model.send(0.0, MEGABIT_BYTES)
    assert model.send(7.0, MEGABIT_BYTES).serialised_at == pytest.approx(7.1)


def test_delay_shifts_arrival_but_never_blocks_the_sender():
    model = LinkModel(Link(mbps=10, delay_ms=250))
    first, second = (model.send(0.0, MEGABIT_BYTES) for _ in range(2))
    assert (first.serialised_at, first.delivered_at) == pytest.approx((0.1, 0.35))
    assert (second.serialised_at, second.delivered_at) == pytest.approx((0.2, 0.45))


def test_no_limit_is_no_time():
    delivery = LinkModel(Link()).send(3.0, 10**9)
    assert (delivery.serialised_at, delivery.delivered_at) == (3.0, 3.0)
    assert delivery.bytes_on_wire == 10**9


def test_lost_segments_cost_their_bytes_and_round_trips():
    link = Link(mbps=10, delay_ms=20, loss=0.1)
    model = LinkModel(link, seed=3)
    size = 1000 * SEGMENT_BYTES
    deliveries = [model.send(0.0, size) for _ in range(200)]
    sent_again = sum(delivery.bytes_on_wire - size for delivery in deliveries)
    # Each of the 200,000 segments is lost on average p / (1 - p) times.
    assert sent_again / (200 * size) == pytest.approx(0.1 / 0.9, rel=0.02)
    assert deliveries[-1].serialised_at == pytest.approx(
        sum(delivery.bytes_on_wire for delivery in deliveries) * 8 / 10e6
    )
    late = [delivery.delivered_at - delivery.serialised_at - 0.020 for delivery in deliveries]
    # With 1,000 segments at least one round of losses is certain; a round trip is 40 ms.
    assert min(late) >= 0.040 - 1e-9


def test_a_round_trip_is_at_least_a_millisecond():
    model = LinkModel(Link(loss=0.5), seed=1)
    delivery = model.send(0.0, 100 * SEGMENT_BYTES)
    assert delivery.delivered_at >= 0.001
    assert delivery.delivered_at * 1000 == pytest.approx(round(delivery.delivered_at * 1000))


def test_deliveries_are_in_order_and_seeded():
    def run(seed: int) -> list[float]:
        model = LinkModel(Link(mbps=50, delay_ms=5, loss=0.2), seed)
        sizes = np.random.default_rng(0).integers(1, 20_000, 300)
        return [model.send(0.001 * step, int(size)).delivered_at for step, size in enumerate(sizes)]

    assert all(one <= two for one, two in itertools.pairwise(run(1)))
    assert run(1) == run(1)
    assert run(1) != run(2)


class FakeTime:
    def __init__(self) -> None:
        self.seconds = 100.0

    def clock(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def test_the_sender_waits_for_delivery_and_pipelines_the_delay():
    fake = FakeTime()
    sender = EmulatedSender(LinkModel(Link(mbps=10, delay_ms=1000)), fake.clock, fake.sleep)
    arrivals = []
    for _ in range(3):
        assert sender.carry(MEGABIT_BYTES, ready_at=100.0) == MEGABIT_BYTES
        arrivals.append(fake.seconds)
    assert arrivals == pytest.approx([101.1, 101.2, 101.3])


def test_streams_share_one_link():
    fake = FakeTime()
    sender = EmulatedSender(LinkModel(Link(mbps=10)), fake.clock, fake.sleep)
    for _ in range(5):  # alternate between two shards
        sender.carry(MEGABIT_BYTES, ready_at=100.0)
        sender.carry(MEGABIT_BYTES, ready_at=100.0)
    assert fake.seconds == pytest.approx(101.0)


def test_messages_handed_in_together_pass_as_one_by_one():
    fake = FakeTime()
    sender = EmulatedSender(LinkModel(Link(mbps=10, delay_ms=1000)), fake.clock, fake.sleep)
    arrivals = []
    for size in sender.carry_all([MEGABIT_BYTES] * 3, ready_at=100.0):
        arrivals.append((size, fake.seconds))
    assert [size for size, _ in arrivals] == [MEGABIT_BYTES] * 3
    assert [at for _, at in arrivals] == pytest.approx([101.1, 101.2, 101.3])
