"""Shards of every partition are disjoint, complete and the same in every process."""

import itertools
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.data import partition as data_partition
from thinwire.data.choices import PARTITIONS
from thinwire.data.partition import PartitionRule
from thinwire.ops.types import ConfigurationError

EQUAL = ("iid", "contiguous", "class")


@st.composite
def problems(draw):
    """Labels, and a rule for them that can be followed."""
    partition = draw(st.sampled_from(PARTITIONS))
    nb_workers = draw(st.integers(1, 30))
    batch_size = draw(st.integers(1, 8))
    total = draw(st.integers(nb_workers * batch_size, 600))
    seed = draw(st.integers(0, 2**31))
    num_classes = draw(st.integers(1, 12))
    labels = np.random.default_rng(seed).integers(0, num_classes, total).astype(np.int32)
    alpha = draw(st.sampled_from([1e-3, 0.1, 0.5, 10.0, 1e6]))
    cuts = np.linspace(0, 1, nb_workers + 1)
    lines = draw(st.permutations(list(itertools.pairwise(cuts))))
    parts = np.array_split(np.random.default_rng(seed).permutation(total), nb_workers)
    parts = [np.sort(part) for part in parts]
    return labels, PartitionRule(partition, nb_workers, seed, lines, alpha, batch_size, parts)


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_disjoint_complete_and_repeatable(problem) -> None:
    labels, rule = problem
    shards = data_partition.split(labels, rule)
    assert len(shards) == rule.nb_workers
    assert sorted(np.concatenate(shards).tolist()) == list(range(len(labels)))
    assert all(shard.dtype == np.int64 and len(shard) for shard in shards)
    if rule.partition != "class":
        assert all((np.diff(shard) > 0).all() for shard in shards)
    if rule.partition in EQUAL:
        sizes = [len(shard) for shard in shards]
        assert max(sizes) - min(sizes) <= 1
    np.random.seed(3)  # earlier draws of the process do not matter
    for worker, owned in enumerate(shards, start=1):
        np.testing.assert_array_equal(data_partition.shard(labels, worker, rule), owned)


def test_every_name_has_a_split() -> None:
    assert tuple(data_partition.SPLITS) == PARTITIONS


@pytest.mark.parametrize("partition", ["iid", "class", "dirichlet"])
def test_another_process_finds_the_same(partition: str) -> None:
    code = (
        "import sys, zlib, numpy as np; from thinwire.data import partition\n"
        f"rule = partition.PartitionRule({partition!r}, 3, 5, batch_size=4)\n"
        "shards = partition.split(np.arange(99) % 7, rule)\n"
        "sys.stdout.write(str(zlib.crc32(b''.join(s.tobytes() for s in shards))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONHASHSEED": "7", "PATH": ""},
    )
    shards = data_partition.split(np.arange(99) % 7, PartitionRule(partition, 3, 5, batch_size=4))
    assert int(done.stdout) == zlib.crc32(b"".join(shard.tobytes() for shard in shards))


def test_iid_mixes_and_follows_the_seed() -> None:
    labels = np.zeros(1000, dtype=np.int32)
    first = data_partition.split(labels, PartitionRule("iid", 2, seed=1))[0]
    assert 200 < (first < 500).sum() < 300
    np.testing.assert_array_equal(
        first, data_partition.split(labels, PartitionRule("iid", 2, seed=1))[0]
    )
    assert (first != data_partition.split(labels, PartitionRule("iid", 2, seed=2))[0]).any()


def test_contiguous_holds_the_original_blocks() -> None:
    shards = data_partition.split(np.zeros(11), PartitionRule("contiguous", 3, seed=0))
    expected = [[0, 1, 2, 9], [3, 4, 5, 10], [6, 7, 8]]  # 9 and 10: the tail ESync never uses
    assert [shard.tolist() for shard in shards] == expected
    for rank, shard in enumerate(
        data_partition.split(np.zeros(60), PartitionRule("contiguous", 6, seed=1))
    ):
        assert shard.tolist() == list(range(rank * 10, (rank + 1) * 10))


def test_contiguous_keeps_files_whole() -> None:
    offsets = np.array([0, 5, 7, 10, 20, 21])
    shards = data_partition.split(np.zeros(21), PartitionRule("contiguous", 2, seed=0), offsets)
    assert [shard.tolist() for shard in shards] == [list(range(10)), list(range(10, 21))]
    with pytest.raises(ConfigurationError, match="5 training files"):
        data_partition.split(np.zeros(21), PartitionRule("contiguous", 6, seed=0), offsets)


@pytest.mark.parametrize("partition", [name for name in PARTITIONS if name != "positions"])
def test_more_workers_than_examples(partition: str) -> None:
    lines = [(worker / 10, (worker + 1) / 10) for worker in range(10)]
    with pytest.raises(ConfigurationError, match="9 training examples .* 10 workers"):
        data_partition.split(np.zeros(9), PartitionRule(partition, 10, 0, lines))


@pytest.mark.parametrize("id_worker", [0, 3, -1])
def test_id_out_of_range(id_worker: int) -> None:
    with pytest.raises(ConfigurationError, match="--id_worker"):
        data_partition.shard(np.zeros(9), id_worker, PartitionRule("iid", 2, 0))


def test_unknown_partition() -> None:
    with pytest.raises(ConfigurationError, match="iid, contiguous, class, dirichlet, file"):
        data_partition.split(np.zeros(9), PartitionRule("nonsense", 2, 0))


def test_label_counts() -> None:
    assert data_partition.label_counts(np.array([3, 0, 3], np.int32)) == {0: 1, 3: 2}
    assert len(data_partition.label_counts(np.arange(200))) == 200
    assert data_partition.label_counts(np.arange(201)) == {}


def test_one_example_for_each_worker_suffices_without_a_batch_size() -> None:
    shards = data_partition.split(np.zeros(3, int), PartitionRule("dirichlet", 3, seed=0))
    assert [len(shard) for shard in shards] == [1, 1, 1]
