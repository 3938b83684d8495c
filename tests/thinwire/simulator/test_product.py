"""Mixes of policies on the virtual clock: each ends, stays finite and repeats."""

import numpy as np

from tests.test_product import compose, covering_array
from tests.thinwire.simulator.toy import ToyTrainer, simulated_of
from thinwire.ops.types import Link, ModelSpec, TensorSpec

EMPTY = TensorSpec("empty", (0, 4))


def trainer_with_empty_variable():
    trainer = ToyTrainer()
    upper, *others = trainer.spec.tensors
    trainer.spec = ModelSpec((upper, EMPTY, *others))
    return trainer


def end_of(mix, folder):
    """Play a mix; return the weights of every shard."""
    simulation = simulated_of(
        compose(mix),
        steps="0.1,0.25,0.4",
        links=(Link(0.1, 10),),
        trainer=trainer_with_empty_variable(),
        nb_ps=mix["nb_ps"],
        failures="2@0.6-1",
        lease_seconds=2.0,
        iter_max=18,
        run_dir=folder,
    )
    assert simulation.play(lambda now: None, lambda: simulation.clock.now > 60) == "iter_max", mix
    for shard in simulation.shards:
        assert 16 <= shard.core.version <= 18, mix  # a push may die between two shards
        assert np.isfinite(shard.core.model.theta).all(), mix
        assert "outlier" not in shard.core.counters.rejected, mix  # all of them are honest
    return b"".join(shard.core.model.theta.tobytes() for shard in simulation.shards)


def test_all_pairs_of_policy_values(tmp_path):
    # Keras' optimizers are compiled again for each shard, and other tests cover them.
    mixes = [mix | {"server_optimizer": "sgd"} for mix in covering_array(strength=2)]
    assert len(mixes) < 120
    ends = [end_of(mix, tmp_path) for mix in mixes]
    assert ends[:4] == [end_of(mix, tmp_path) for mix in mixes[:4]]
