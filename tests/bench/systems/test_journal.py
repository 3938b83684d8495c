"""The journal bench compares shards with and without a journal on the same work."""

from bench.systems.journal import JournaledShard, updates_of
from thinwire.ops.types import ModelSpec, TensorSpec
from thinwire.ps.persistence.journal import contents, path_of
from thinwire.ps.persistence.journal_format import bodies

SPEC = ModelSpec((TensorSpec("w", (60, 50)), TensorSpec("b", (50,))))


def test_both_apply_every_push_and_one_writes_it_down(tmp_path):
    shards = [JournaledShard("adacomp", SPEC, where) for where in (None, tmp_path)]
    for shard in shards:
        for _ in range(3):
            assert shard.apply(shard.pushes(list(updates_of(SPEC.num_parameters, 5)))) > 0
        assert shard.core.version == 15 and not shard.core.counters.rejected
        assert max(shard.core.counters.staleness) <= 1
    assert shards[0].core.model.theta.tobytes() == shards[1].core.model.theta.tobytes()
    records = [*bodies(contents(path_of(tmp_path, 1)))]
    assert len(records) == 1 + 4 + 15  # the head, two workers that join and pull, and the pushes
