"""Loads a run's data: the whole data set (by name or from the user's module) and worker shards."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.data import fractions, partition, registry
from thinwire.data.choices import AUGMENTATIONS, PARTS
from thinwire.data.pipeline import lazy
from thinwire.data.pipeline.cursor import Cursor, check_batch_size
from thinwire.models.tasks import TASKS
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.settings import DataChoice, ModelChoice, Run


@dataclasses.dataclass(frozen=True)
class TrainingShard:
    """Shard of the training set: the examples on which one worker trains."""

    images: NDArray[Any] | lazy.Lazy  # model inputs of the shard, [n, ...], without augmentation
    labels: NDArray[Any]  # labels of the shard, [n, ...], in the task's form; [n] int32 for classes
    cursor: Cursor  # order in which the shard's examples 0..n-1 are used
    label_counts: dict[int, int]  # label -> number of examples in the shard, for reports
    feed: lazy.Feed  # function that returns the augmented images of a training batch
    num_train: int = 0  # number of examples in the whole training set

    @property
    def num_examples(self) -> int:
        """Number of examples in a worker's shard; 0 if the worker has no data."""
        return len(self.labels)

    def fork(self) -> TrainingShard:
        """Return a copy of the shard whose separate cursor begins at the shard's present
        position.
        """
        return dataclasses.replace(self, cursor=self.cursor.fork())

    def next(self) -> tuple[Any, NDArray[Any]]:
        """Return the next mini-batch: images [B, ...] (an array or a tensor) and labels [B, ...].

        Raises:
            ConfigurationError: An image file of the training set is damaged.
        """
        place = self.cursor.place
        chosen = self.cursor.next()
        return self.feed(chosen, place), self.labels[chosen]


def load_dataset(
    data: DataChoice,
    model: ModelChoice,
    user_module: ModuleType | None,
    seed: int,
    parts: Sequence[str] = PARTS,
) -> registry.Dataset:
    """Load the data set that --dataset names, or the data of the user's function `load_data()`.

    Raises:
        ConfigurationError: Files of the data set are missing or damaged, or the data does not fit
            the model.
    """
    if user_module is not None and hasattr(user_module, "load_data"):
        if data.augment not in (None, AUGMENTATIONS[0]):
            raise ConfigurationError(
                f"--augment={data.augment} is for a --dataset, but load_data() of the --model file "
                "returns the images; leave --augment out."
            )
        return registry.from_user_module(user_module, seed, TASKS[model.task])
    return registry.load(
        data.dataset,
        data.data_dir,
        model.image_size,
        model.image_depth,
        model.nb_classes,
        data.scaling,
        seed,
        parts=parts,
        augment=data.augment,
        task=TASKS[model.task],
    )


def num_train(
    data: DataChoice, model: ModelChoice, user_module: ModuleType | None, seed: int
) -> int:
    """Return the number of examples in the training set, which make up one epoch."""
    return len(load_dataset(data, model, user_module, seed, parts=("train",)).train_labels)


def load_shard(run: Run, user_module: ModuleType | None, id_worker: int) -> TrainingShard:
    """Load the training set and select the examples of one worker (the worker's shard).

    Raises:
        ConfigurationError: Files of the data set are missing or damaged, or ``take_shard`` rejects
            the settings.
    """
    whole = load_dataset(run.data, run.model, user_module, run.seed, parts=("train",))
    return take_shard(run, whole, id_worker, run.nb_workers)


def take_shard(run: Run, whole: registry.Dataset, id_worker: int, nb_workers: int) -> TrainingShard:
    """Select one worker's shard (examples) of a loaded training set, with a cursor at its start.

    Raises:
        ConfigurationError: The training set cannot be split, the data-sharding file does not fit
            the run, or the batch size is larger than the number of the worker's examples.
    """
    rule = split_rule(run, nb_workers)
    positions = partition.shard(whole.classes, id_worker, rule, whole.train_file_offsets)
    return _pick(run, whole, positions, id_worker)


def take_shards(run: Run, whole: registry.Dataset) -> list[TrainingShard]:
    """Return the training set's shards (examples) of all workers; split the set only once."""
    rule = split_rule(run, run.nb_workers)
    shards = partition.split(whole.classes, rule, whole.train_file_offsets)
    return [
        _pick(run, whole, positions, id_worker)
        for id_worker, positions in enumerate(shards, start=1)
    ]


def _pick(
    run: Run, whole: registry.Dataset, mine: NDArray[np.int64], id_worker: int
) -> TrainingShard:
    """Return a shard with the examples at given positions of the training set, and a cursor at its
    start.
    """
    if not run.data.whole_epochs:
        check_batch_size(run.batch_size, len(mine), run.data.partition)
    cursor = Cursor(
        np.arange(len(mine)),
        run.batch_size,
        run.seed * 100_003 + id_worker,
        shuffle=not run.data.no_block_shuffle,
        digest=zlib.crc32(mine.astype("<i8").tobytes()),
        whole_epochs=run.data.whole_epochs,
    )
    images = lazy.subset(whole.train_images, mine)
    # An autoencoder's labels are its images: the shard holds one copy of the images.
    is_autoencoder = whole.train_labels is whole.train_images
    labels = images if is_autoencoder else whole.train_labels[mine]
    counts, feed = partition.label_counts(whole.classes[mine]), lazy.feed_of(images, cursor)
    return TrainingShard(images, labels, cursor, counts, feed, len(whole.train_labels))


def whole_shard(run: Run, whole: registry.Dataset) -> TrainingShard:
    """Return the whole training set as one shard, for training on a single device."""
    images, labels = whole.train_images, whole.train_labels
    cursor = Cursor(np.arange(len(labels)), run.batch_size, run.seed)
    counts, feed = partition.label_counts(whole.classes), lazy.feed_of(images, cursor)
    return TrainingShard(images, labels, cursor, counts, feed)


def split_rule(run: Run, nb_workers: int) -> partition.PartitionRule:
    """Return the rule by which the run's settings split the training set among ``nb_workers``
    workers.
    """
    path, listed = run.data.sharding_file, run.data.partition_file
    alpha = run.data.dirichlet_alpha
    return partition.PartitionRule(
        partition=run.data.partition,
        nb_workers=nb_workers,
        seed=run.seed,
        fractions=None if path is None else fractions.read_fractions(path, nb_workers),
        dirichlet_alpha=partition.DIRICHLET_ALPHA if alpha is None else alpha,
        batch_size=1 if run.data.whole_epochs else run.batch_size,
        positions=None if listed is None else partition.read_positions(listed, nb_workers),
    )
