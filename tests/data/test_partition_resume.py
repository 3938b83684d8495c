"""A worker's data shard: its examples, its cursor, and rejected saved cursors."""

import dataclasses
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.data.choices import PARTITIONS
from thinwire.data.loading import TrainingShard, take_shard, take_shards
from thinwire.data.partition import write_positions
from thinwire.data.registry import Dataset
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.settings import DataChoice

TOTAL = 240
#: Partitions that the command line offers.
KINDS = (*PARTITIONS, "class unshuffled")


def dataset() -> Dataset:
    """Examples with one pixel, which holds the example's position."""
    images = np.arange(TOTAL, dtype=np.float32).reshape(TOTAL, 1, 1, 1)
    labels = np.random.default_rng(2).integers(0, 10, TOTAL).astype(np.int32)
    return Dataset(images, labels, images[:0], labels[:0])


def make_run(folder: Path, kind: str, batch_size: int) -> types.SimpleNamespace:
    """The settings of a run of four workers that the partition depends on."""
    partition = kind.split()[0]
    path = None
    if partition == "file":
        path = folder / "fractions"
        path.write_text("0 0.4\n0.6 1\n0.4 0.5\n0.5 0.6\n")
    if partition == "positions":
        listed = folder / "positions"
        parts = np.array_split(np.random.default_rng(3).permutation(TOTAL), 4)
        write_positions(listed, parts)
    choice = DataChoice(
        "synthetic", None, "unit", partition, path and str(path), None, "unshuffled" in kind
    )
    if partition == "positions":
        choice = dataclasses.replace(choice, partition_file=str(listed))
    return types.SimpleNamespace(data=choice, seed=5, batch_size=batch_size, nb_workers=4)


def take(folder: Path, kind: str, id_worker: int = 2, batch_size: int = 16) -> TrainingShard:
    """Take a shard of four as a worker of this run would."""
    run = make_run(folder, kind, batch_size)
    return take_shard(run, dataset(), id_worker, nb_workers=4)


def draw(shard: TrainingShard, count: int) -> list[list[float]]:
    return [shard.images[shard.cursor.next()].ravel().tolist() for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_four_workers_see_every_example_once_an_epoch(tmp_path: Path, kind: str) -> None:
    shards = [take(tmp_path, kind, worker, batch_size=1) for worker in (1, 2, 3, 4)]
    seen = [draw(shard, len(shard.labels)) for shard in shards]
    assert sorted(np.concatenate(seen).ravel().tolist()) == list(range(TOTAL))
    labels = dataset().train_labels
    for shard in shards:
        np.testing.assert_array_equal(labels[shard.images.ravel().astype(int)], shard.labels)


@pytest.mark.parametrize("kind", KINDS)
def test_all_shards_at_once_are_those_of_each_worker(tmp_path: Path, kind: str) -> None:
    together = take_shards(make_run(tmp_path, kind, 16), dataset())
    for number, shard in enumerate(together, start=1):
        alone = take(tmp_path, kind, number)
        assert shard.cursor.state() == alone.cursor.state()
        assert shard.label_counts == alone.label_counts
        assert sum(shard.label_counts.values()) == len(shard.labels)
        assert draw(shard, 5) == draw(alone, 5)


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    before=st.integers(0, 40),
    batch_size=st.integers(1, 24),
)
def test_resumes_exactly(tmp_path_factory, kind: str, before: int, batch_size: int) -> None:
    folder = tmp_path_factory.getbasetemp()
    going = take(folder, kind, batch_size=batch_size)
    draw(going, before)
    again = take(folder, kind, batch_size=batch_size)
    again.cursor.restore(going.cursor.state())
    assert draw(again, 10) == draw(going, 10)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "iid"])
def test_the_place_in_another_split_is_refused(tmp_path: Path, kind: str) -> None:
    state = take(tmp_path, "iid").cursor.state()
    with pytest.raises(ConfigurationError, match="saved position .* --overwrite"):
        take(tmp_path, kind).cursor.restore(state)


def test_the_place_in_another_order_is_refused(tmp_path: Path) -> None:
    state = take(tmp_path, "class").cursor.state()
    with pytest.raises(ConfigurationError, match="shuffle 1, but this run has .*shuffle 0"):
        take(tmp_path, "class unshuffled").cursor.restore(state)


def test_unshuffled_epochs_are_alike_and_in_order_of_label(tmp_path: Path) -> None:
    shard = take(tmp_path, "class unshuffled", batch_size=20)
    first, second = draw(shard, 3), draw(shard, 3)
    assert first == second
    assert (np.diff(shard.labels) >= 0).all()
    shuffled = take(tmp_path, "class", batch_size=20)
    assert draw(shuffled, 3) != draw(shuffled, 3)


@pytest.mark.parametrize("kind", ["iid", "contiguous", "class", "file"])
def test_a_batch_larger_than_the_shard_names_the_partition(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--batch_size 97 .*--partition {kind}\\)"):
        take(tmp_path, kind, batch_size=97)


def test_dirichlet_refuses_what_cannot_be_split(tmp_path: Path) -> None:
    assert len(take(tmp_path, "dirichlet", batch_size=60).labels) == 60
    with pytest.raises(ConfigurationError, match="--partition dirichlet: 240 training examples"):
        take(tmp_path, "dirichlet", batch_size=61)
