"""Groups by speed on the virtual clock."""

import pytest

from tests.thinwire.simulator.toy import played
from thinwire.data.fractions import read_fractions
from thinwire.ops.sync.groups import AutoGroups, parse_groups_file

CLASSES = ((1, 2), (3, 4), (5, 6))


@pytest.mark.parametrize("nb_ps", [1, 2])
def test_speed_classes_become_groups_and_files_for_another_run(tmp_path, nb_ps):
    simulation = played(
        "gsp",
        6,
        choices={"auto_groups": AutoGroups(40)},
        steps="0.1,0.1,0.2,0.2,0.4,0.4",
        iter_max=300,
        run_dir=tmp_path,
        nb_ps=nb_ps,
    )
    assert simulation.end == "iter_max"
    assert [shard.core.rounds.groups for shard in simulation.shards] == [CLASSES] * nb_ps
    rows = simulation.shards[0].core.counters.groups.summary()
    assert set(rows) == {"1", "2", "3", "4", "5", "6", "1,2", "3,4", "5,6"}
    assert parse_groups_file((tmp_path / "groups.txt").read_text(), "groups") == CLASSES
    shares = [end - start for start, end in read_fractions(tmp_path / "data_sharding.txt", 6)]
    assert shares == pytest.approx([4 / 14] * 2 + [2 / 14] * 2 + [1 / 14] * 2, rel=0.05)
