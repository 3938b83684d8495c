"""A script's optimizer state is fetched from real shards over loopback."""

import json
import types

import numpy as np
import pytest

from tests.threads.cluster import InProcessCluster
from tests.virtual.toy import SPEC, method
from thinwire.ops.methods.builder import adopt
from thinwire.ops.offer import Described, Offer, OptimizerOffer
from thinwire.ops.optimizers.slots import OptimizerState, Slot, decode, encode, whole_values
from thinwire.ops.sharding.split import shard_positions
from thinwire.proto.grpc.session import RequestRejected
from thinwire.runtime.run.credentials import NO_CREDENTIALS
from thinwire.worker.client.slots import fetch_slots

ADAM = OptimizerOffer(Described("Adam", {"learning_rate": 0.25, "clipnorm": 1.0}))


def test_every_shard_sends_its_part_between_two_updates():
    chosen = method("bsp", 2, overrides={"server_optimizer": "script"})
    adopted = adopt(chosen, Offer(SPEC, optimizers=(ADAM,)))
    with InProcessCluster(adopted, 2) as cluster:
        run = types.SimpleNamespace(
            addresses=[f"127.0.0.1:{shard.port}" for shard in cluster.shards],
            nb_ps=2,
            credentials=NO_CREDENTIALS,
            reconnect_timeout_seconds=10.0,
        )
        whole = fetch_slots(run, 1, "run", cluster.layouts, num_statistics=0)
        weights, _ = whole_values(SPEC, cluster.layouts, [states[-1].slots for states in whole])
        parts = [shard.core.model.theta for shard in cluster.shards]
        for layout, theta in zip(cluster.layouts, parts, strict=True):
            places = shard_positions(SPEC, layout)
            np.testing.assert_array_equal(np.concatenate([weights[at] for at in places]), theta)
        shards = fetch_slots(run, 1, "run", cluster.layouts)
        with pytest.raises(ValueError, match="28 of 28 weights"):
            whole_values(SPEC, cluster.layouts, [states[-1].slots for states in shards])
        for layout, (state, _) in zip(cluster.layouts, shards, strict=True):
            assert state.rate == 0.25
            found = {(slot.slice, slot.role): slot.values.shape for slot in state.slots}
            shapes = [SPEC.tensors[piece.tensor].shape for piece in layout.slices]
            assert found == {(None, "iteration"): ()} | {
                (number, role): shape
                for number, shape in enumerate(shapes)
                for role in ("momentum", "velocity")
            }
        with pytest.raises(RequestRejected, match="no worker 9"):
            fetch_slots(run, 9, "run", cluster.layouts)


BROKEN = [
    ("no document", b""),
    ("[7]", b""),
    ("[]", b"1"),
    ([{"arrays": []}], b""),
    ([{"rate": 0.1, "arrays": []}], b"1"),
    ([{"rate": 0.1, "arrays": [[0, "m", [2], "float32"]]}], b"1234"),
    ([{"rate": 0.1, "arrays": [[0, "m", [1 << 40, 1 << 40], "float32"]]}], b"1234"),
    ([{"rate": 0.1, "arrays": [[0, "m", [-1], "float32"]]}], b""),
    ([{"rate": 0.1, "arrays": [[0, "m", [1], "object"]]}], b"12345678"),
]


@pytest.mark.parametrize(("document", "payload"), BROKEN)
def test_broken_slots_are_refused(document, payload):
    text = document if isinstance(document, str) else json.dumps(document)
    with pytest.raises(ValueError):
        decode(text, memoryview(payload))


def test_slots_of_any_layout_survive():
    values = np.arange(6, dtype=np.float32).reshape(2, 3).T
    states = [OptimizerState([Slot(3, "velocity", values * n)], 0.5 * n) for n in (1, 2)]
    document, pieces = encode(states)
    payload = memoryview(b"".join(bytes(piece) for piece in pieces))
    for number, found in enumerate(decode(document, payload), 1):
        (slot,) = found.slots
        assert (slot.slice, slot.role, found.rate) == (3, "velocity", 0.5 * number)
        np.testing.assert_array_equal(slot.values, values * number)
