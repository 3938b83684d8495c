"""Partitions by label: the labels of each worker and the number of its examples."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.data import partition
from thinwire.data.partition import PartitionRule
from thinwire.data.pipeline.cursor import Cursor
from thinwire.ops.types import ConfigurationError

#: Fashion-MNIST's shape in small: ten labels, equally frequent, in no order.
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600)).astype(np.int32)


def labels_of(shards: list[np.ndarray]) -> list[set[int]]:
    return [set(LABELS[shard].tolist()) for shard in shards]


def test_two_workers_get_half_the_classes_each() -> None:
    shards = partition.split(LABELS, PartitionRule("class", 2, seed=0))
    assert labels_of(shards) == [{0, 1, 2, 3, 4}, {5, 6, 7, 8, 9}]


def test_six_workers_get_one_and_two_thirds_classes_each() -> None:
    shards = partition.split(LABELS, PartitionRule("class", 6, seed=0))
    assert labels_of(shards) == [{0, 1}, {1, 2, 3}, {3, 4}, {5, 6}, {6, 7, 8}, {8, 9}]
    assert partition.label_counts(LABELS[shards[0]]) == {0: 600, 1: 400}


def test_class_keeps_the_stored_order_within_a_label() -> None:
    shards = partition.split(LABELS, PartitionRule("class", 4, seed=9))
    expected = sorted(range(len(LABELS)), key=lambda position: (LABELS[position], position))
    assert np.concatenate(shards).tolist() == expected


def test_original_order_gives_batches_of_one_class_each_epoch_alike() -> None:
    (shard, *_) = partition.split(LABELS, PartitionRule("class", 2, seed=0))
    cursor = Cursor(shard, 60, seed=1, shuffle=False)
    epochs = [np.array([cursor.next() for _ in range(50)]) for _ in range(2)]
    np.testing.assert_array_equal(epochs[0], epochs[1])
    assert all(len(set(LABELS[batch].tolist())) == 1 for batch in epochs[0])
    shuffled = Cursor(shard, 60, seed=1)
    assert all(len(set(LABELS[shuffled.next()].tolist())) > 1 for _ in range(50))


@settings(max_examples=60, deadline=None)
@given(
    nb_workers=st.integers(1, 100),
    alpha=st.floats(1e-3, 1e6),
    seed=st.integers(0, 2**31),
    smallest=st.integers(1, 60),
)
def test_every_worker_can_fill_a_batch(
    nb_workers: int, alpha: float, seed: int, smallest: int
) -> None:
    shards = partition.split_dirichlet(LABELS, nb_workers, alpha, smallest, seed)
    assert min(map(len, shards)) >= smallest
    assert sorted(np.concatenate(shards).tolist()) == list(range(len(LABELS)))


def test_alpha_sets_the_skew_of_labels_and_of_sizes() -> None:
    num_labels, spreads = [], []
    for alpha in (0.05, 0.5, 100.0):
        shards = partition.split_dirichlet(LABELS, 10, alpha, 1, seed=4)
        sizes = np.array([len(shard) for shard in shards])
        num_labels.append(np.mean([len(found) for found in labels_of(shards)]))
        spreads.append(sizes.std() / sizes.mean())
    assert num_labels[0] < 6 < 8 < num_labels[1] < num_labels[2] == 10
    assert spreads[0] > spreads[1] > 2 * spreads[2]


def test_the_draws_have_dirichlets_moments() -> None:
    """Var of a share = (1/n)(1 - 1/n) / (n alpha + 1), over 10 labels and 100 seeds."""
    nb_workers, alpha = 4, 0.7
    shares = [
        np.bincount(LABELS[shard], minlength=10) / 600
        for seed in range(100)
        for shard in partition.split_dirichlet(LABELS, nb_workers, alpha, 1, seed)
    ]
    assert np.mean(shares) == pytest.approx(1 / nb_workers, abs=1e-9)
    expected = (1 / nb_workers) * (1 - 1 / nb_workers) / (nb_workers * alpha + 1)
    assert np.var(shares) == pytest.approx(expected, rel=0.06)


def test_seeds_differ() -> None:
    first, second = (partition.split_dirichlet(LABELS, 4, 0.5, 1, seed) for seed in (1, 2))
    assert [len(shard) for shard in first] != [len(shard) for shard in second]


def test_filling_up_takes_from_the_largest() -> None:
    labels = np.zeros(1000, np.int32)  # one label: all but one or two workers get nothing
    shards = partition.split_dirichlet(labels, 10, 1e-3, 50, seed=0)
    sizes = sorted(len(shard) for shard in shards)
    assert sizes[:8] == [50] * 8 and sum(sizes) == 1000


def test_too_few_examples_for_a_batch_each() -> None:
    with pytest.raises(ConfigurationError, match="expected at least 6010") as caught:
        partition.split_dirichlet(LABELS, 601, 0.5, 10, seed=0)
    assert "--partition dirichlet" in str(caught.value)
    assert min(map(len, partition.split_dirichlet(LABELS, 600, 0.5, 10, seed=0))) == 10
