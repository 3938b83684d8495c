"""Shards are disjoint, complete, even and reproducible; fractions files are checked."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import sharding
from ops.types import ConfigurationError


def all_shards(
    total: int, nb_workers: int, partition: str, seed: int = 0, **more: object
) -> list[np.ndarray]:
    labels = np.zeros(total, dtype=np.int32)
    return [
        sharding.shard(labels, nb_workers, number + 1, partition, seed, **more)
        for number in range(nb_workers)
    ]


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(1, 400),
    nb_workers=st.integers(1, 40),
    partition=st.sampled_from(["iid", "contiguous"]),
    seed=st.integers(0, 2**31),
)
def test_disjoint_complete_and_even(total: int, nb_workers: int, partition: str, seed: int) -> None:
    if nb_workers > total:
        with pytest.raises(ConfigurationError, match=f"{total} training examples"):
            all_shards(total, nb_workers, partition, seed)
        return
    shards = all_shards(total, nb_workers, partition, seed)
    assert sorted(np.concatenate(shards).tolist()) == list(range(total))
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    assert all(shard.dtype == np.int64 and (np.diff(shard) > 0).all() for shard in shards)


@settings(max_examples=60, deadline=None)
@given(
    shares=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    total=st.integers(400, 2000),
    data=st.data(),
)
def test_fractions_are_disjoint_and_complete(
    shares: list[int], total: int, data: st.DataObject
) -> None:
    cuts = np.cumsum([0, *shares]) / sum(shares)
    lines = data.draw(st.permutations(list(itertools.pairwise(cuts))))
    shards = all_shards(total, len(lines), "file", fractions=lines)
    assert sorted(np.concatenate(shards).tolist()) == list(range(total))
    for (start, end), shard in zip(lines, shards, strict=True):
        assert abs(len(shard) - (end - start) * total) <= 1


def test_iid_mixes_and_follows_the_seed() -> None:
    first = all_shards(1000, 2, "iid", seed=1)[0]
    assert 200 < (first < 500).sum() < 300
    np.testing.assert_array_equal(first, all_shards(1000, 2, "iid", seed=1)[0])
    assert (first != all_shards(1000, 2, "iid", seed=2)[0]).any()


def test_contiguous_keeps_files_whole() -> None:
    offsets = np.array([0, 5, 7, 10, 20, 21])
    shards = all_shards(21, 2, "contiguous", file_offsets=offsets)
    assert [shard.tolist() for shard in shards] == [list(range(10)), list(range(10, 21))]
    with pytest.raises(ConfigurationError, match="5 training files"):
        all_shards(21, 6, "contiguous", file_offsets=offsets)


@pytest.mark.parametrize("id_worker", [0, 3, -1])
def test_id_out_of_range(id_worker: int) -> None:
    with pytest.raises(ConfigurationError, match="--id_worker"):
        sharding.shard(np.zeros(9), 2, id_worker, "iid", 0)


@pytest.mark.parametrize("partition", ["class", "dirichlet", "nonsense"])
def test_unknown_partition(partition: str) -> None:
    with pytest.raises(ConfigurationError, match="iid, contiguous, file"):
        sharding.shard(np.zeros(9), 2, 1, partition, 0)


def test_file_needs_fractions_of_all_workers() -> None:
    with pytest.raises(ConfigurationError, match="--data_sharding_file"):
        sharding.shard(np.zeros(9), 2, 1, "file", 0)
    with pytest.raises(ConfigurationError, match="2 workers and got 1"):
        sharding.shard(np.zeros(9), 2, 1, "file", 0, fractions=[(0, 1)])


def test_a_fraction_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="worker 1"):
        sharding.shard(np.zeros(9), 2, 1, "file", 0, fractions=[(0, 0.01), (0.01, 1)])


def test_fractions_file(tmp_path: Path) -> None:
    path = tmp_path / "fractions.txt"
    path.write_text("# worker 1, then 2\n0.3 1\n\n0 0.3  # the slow one\n")
    assert sharding.read_fractions(path, 2) == ((0.3, 1.0), (0.0, 0.3))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0 0.5\n0.4 1\n", "overlap between 0.4 and 0.5"),
        ("0 0.5\n0.6 1\n", "gap between 0.5 and 0.6"),
        ("0.1 0.5\n0.5 1\n", "gap between 0 and 0.1"),
        ("0 0.5\n0.5 0.9\n", "gap between 0.9 and 1"),
        ("0 0.5\n0.5 1.5\n", "line 2"),
        ("0.5 0\n0.5 1\n", "line 1"),
        ("0 0.5\nnan 1\n", "line 2"),
        ("0 half\n0.5 1\n", "half"),
        ("0 0.5 0.7\n0.7 1\n", "two numbers"),
        ("0 1\n", "1 lines"),
    ],
)
def test_bad_fractions_files(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "fractions.txt"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="fractions.txt") as caught:
        sharding.read_fractions(path, 2)
    assert expected in str(caught.value)


def test_missing_fractions_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="absent"):
        sharding.read_fractions(tmp_path / "absent", 2)
