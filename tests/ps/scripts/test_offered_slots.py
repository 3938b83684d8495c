"""Optimizer slots with steps before the run, from a worker's offer to a shard's state."""

import numpy as np
import pytest

from tests.command_line import run_of
from tests.virtual.toy import SPEC
from thinwire.ops.offer import Described, Offer, OptimizerOffer, read_offer
from thinwire.ops.optimizers.slots import Slot, SlotPlace, planned
from thinwire.ops.sharding.split import shard_spec
from thinwire.ps.scripts.initial_model import model_of_offer, offered_bytes, offered_layouts
from thinwire.worker.client.offering import Offering

LIMIT = 1 << 20


def optimizer(name, **config):
    return OptimizerOffer(
        Described(name, {"learning_rate": 0.1} | config), iterations=5, has_slots=True
    )


@pytest.mark.parametrize(
    ("described", "roles"),
    [
        (optimizer("SGD"), set()),
        (optimizer("SGD", momentum=0.9), {"momentum"}),
        (optimizer("Adam", use_ema=True), {"average", "momentum", "velocity"}),
        (optimizer("Adafactor"), {"factor", "factor.1", "velocity"}),
        (optimizer("Nadam"), {"momentum", "velocity", "product"}),
    ],
)
def test_slots_come_behind_the_weights(described, roles):
    run = run_of("--method=bsp", "--server_optimizer=script", "--model_from=worker", "--nb_ps=2")
    offer = Offer(SPEC, statistics=2, optimizers=(described,))
    layouts = offered_layouts(run, offer)
    places = planned(described, SPEC)
    assert {place.role for place in places} == roles
    slots = [Slot(each.slice, each.role, some(number, each)) for number, each in enumerate(places)]
    weights, statistics = np.arange(28, dtype=np.float32), np.ones(2, np.float32)
    offering = Offering(offer, lambda: weights, lambda: statistics, lambda: [slots])
    for shard, layout in enumerate(layouts):
        document, pieces = offering.make(shard, layouts)
        payload = memoryview(b"".join(bytes(piece) for piece in pieces))
        received = read_offer(document, LIMIT)
        assert len(payload) == offered_bytes(run, shard, received)
        model = model_of_offer(run, shard, received, payload)
        assert model.statistics.tolist() == [1, 1][: 2 * (shard == 0)]
        server = model.method.server
        state = server.init(model.weights.copy(), shard_spec(SPEC, layout))
        found = {(slot.slice, slot.role): slot.values for slot in server.slots(state)[0]}
        assert found.pop((None, "iteration")) == 5
        own = [piece.tensor for piece in layout.slices]
        expected = {
            (None if slot.slice is None else own.index(slot.slice), slot.role): slot.values
            for slot in slots
            if slot.slice is None or slot.slice in own
        }
        assert found.keys() == expected.keys()
        assert all((found[key] == values).all() for key, values in expected.items())


def some(number, place: SlotPlace):
    # Adafactor's factors of vectors are integers, which stay 0.
    values = np.random.default_rng(number).uniform(size=place.shape).astype(np.float32)
    return values if place.shape or place.role == "product" else np.zeros_like(values)


def test_one_that_has_not_moved_offers_none():
    assert planned(OptimizerOffer(Described("Adam", {"learning_rate": 0.1})), SPEC) == []
