"""Divides the lists of indices of a torch DataLoader among workers, without Keras.

A map-style loader iterates over lists of indices, one for each batch, which its batch sampler
yields. A worker's loader is a copy of the script's loader with a batch sampler that yields only
this worker's indices. So a worker loads only its own examples, and everything else (collate_fn,
processes, pinned memory) stays as the script wants it. All workers need the same lists of indices,
so each pass iterates the script's batch sampler with random seeds that are equal on all workers.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from thinwire.ops.types import ConfigurationError
from thinwire.script.data.common_randomness import same_randomness
from thinwire.script.data.place import WorkerPlace

# A loader's processes also keep the script's start method. Python's default on Linux is fork. In
# 160 forks beside busy gRPC threads, on JAX and on PyTorch, no child hung: a child calls no gRPC.
# With spawn or forkserver, each child would import the script, and a script without
# `if __name__ == "__main__"` would begin to train there.
_INSTEAD = (
    'Give distribute() shard="off" (or --shard=off) and let the script load a different part of '
    "the data on each worker, by thinwire.worker_id() and thinwire.num_workers()."
)


def part_of_loader(loader: Any, place: WorkerPlace) -> Any:
    """Return a DataLoader of this worker's batches of a DataLoader; each batch stays whole.

    Each iteration over the result is a pass over the data, in which the worker gets other batches.

    Raises:
        ConfigurationError: The flag --partition is not iid, the loader has no lists of indices that
            are equal on all workers, or it has fewer batches than workers.
    """
    if not place.is_shared:
        return loader
    return with_sampler(loader, worker_sampler(loader, dataclasses.replace(place, batch="worker")))


def worker_sampler(loader: Any, place: WorkerPlace) -> WorkerBatchSampler:
    """Return the batch sampler of this worker's part of a loader. Raises ConfigurationError."""
    place.check_partition("torch DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigurationError(
            "the script passes a torch DataLoader over an IterableDataset, which has no indices by "
            "which Thinwire can divide its examples among the workers; expected a map-style data "
            f"set, with __getitem__ and __len__. {_INSTEAD}"
        )
    if loader.batch_sampler is None:
        raise ConfigurationError(
            "the script passes a torch DataLoader with batch_size=None, whose data set makes whole "
            "batches; expected a batch_size or a batch_sampler, so that each example has an index. "
            f"Another solution: give fit a keras.utils.PyDataset. Or: {_INSTEAD}"
        )
    if any(isinstance(each, DistributedSampler) for each in _samplers(loader.batch_sampler)):
        raise ConfigurationError(
            "the script passes a torch DataLoader with a DistributedSampler, which divides the "
            "data, and Thinwire would divide this part again; expected a loader of all of the "
            f"data. Leave the DistributedSampler out. Or keep it: {_INSTEAD}"
        )
    sampler = WorkerBatchSampler(loader.batch_sampler, len(loader), place)
    number = len(sampler.sizes)
    if not number:
        raise ConfigurationError(
            "the torch DataLoader of the script has no batches; expected at least one batch."
        )
    if not place.divides_batch and number < place.num_workers:
        raise ConfigurationError(
            f"{number} batches of a torch DataLoader cannot be divided among {place.num_workers} "
            f"workers; expected at least one batch for each worker. Use --nb_workers={number} at "
            "most, or smaller batches."
        )
    return sampler


def with_sampler(loader: Any, sampler: WorkerBatchSampler) -> Any:
    """Return a copy of a DataLoader, or of an instance of a subclass, with another batch sampler.

    A new DataLoader would lack what a subclass adds.
    """
    part = copy.copy(loader)
    # A DataLoader forbids to set these attributes, which it checks in its constructor.
    vars(part).update(
        batch_sampler=sampler, sampler=sampler, batch_size=None, drop_last=False, _iterator=None
    )
    return part


class WorkerBatchSampler(Sampler[list[Any]]):
    """Yields the lists of indices from which this worker makes its batches.

    If workers divide batches, a worker gets a part of each batch of the script's loader. Otherwise
    a window is n successive batches in a run of n workers, and each worker gets one batch of each
    window. Each iterator is a pass; the numbers of the passes enter all random seeds.

    Attributes:
        next_pass: Number of the pass that the next iterator begins, from 0.
        sizes: Number of rows in each batch of the script in pass 0.
        is_regular: True if in each pass all batches have equally many rows, except a shorter last
            batch.
    """

    def __init__(self, whole: Any, length: int, place: WorkerPlace) -> None:
        """Iterate the script's batch sampler once, for the first pass.

        Args:
            whole: Batch sampler of the script's loader; an iterable of lists of indices.
            length: Number of batches in a pass, as the script's loader states it.
            place: This worker's number in the run, and the rules that divide the training data
                among workers.

        Raises:
            ConfigurationError: Two iterations with the same random seeds give different lists.
        """
        self._whole, self._length, self._place = whole, length, place
        self.next_pass = 0
        # A second iteration of the script's own sampler could change its state.
        trial = _copied(whole)
        self._made = 0, self._iterate(whole, 0)
        if self._iterate(trial, 0) != self._made[1]:
            names = " of a ".join(type(each).__name__ for each in _samplers(whole))
            raise ConfigurationError(
                f"the {names} of the script's torch DataLoader yields other indices in a second "
                "iteration with the same random seeds, so the workers' parts cannot be shown to be "
                "disjoint; expected draws from the generators of torch, NumPy or Python, or from a "
                f"generator in an attribute of the sampler. {_INSTEAD}"
            )
        self.sizes = [len(batch) for batch in self._made[1]]
        self.is_regular = type(whole) is BatchSampler

    def __len__(self) -> int:
        return self._num_own(self._place.worker)

    def __iter__(self) -> Iterator[list[Any]]:
        number, self.next_pass = self.next_pass, self.next_pass + 1
        whole, place = self._batches(number), self._place
        if not place.divides_batch:
            for window in range(-(-len(whole) // place.num_workers)):
                batches = whole[window * place.num_workers : (window + 1) * place.num_workers]
                for position in place.positions(len(batches), number, window):
                    yield batches[position]
            return
        for index, batch in enumerate(whole):
            if len(batch) < place.num_workers and index < len(whole) - 1:
                where = f"batch {index + 1} of the torch DataLoader given to fit"
                raise place.short_batch(len(batch), where)
            positions = place.positions(len(batch), number, index)
            if len(positions):
                yield [batch[position] for position in positions]

    @property
    def short_by(self) -> int:
        """Number of steps by which this worker's pass 0 is shorter than the longest worker's."""
        return self._num_own(worker=1) - len(self)

    def rows_of_step(self, step: int) -> list[int]:
        """Return each worker's rows in a step of the present pass, if workers divide batches."""
        whole, place = self._batches(max(0, self.next_pass - 1)), self._place
        num_rows = len(whole[step]) if step < len(whole) else 0
        return [place.num_dealt(num_rows, worker) for worker in place.workers]

    def _num_own(self, worker: int) -> int:
        """Return the number of batches of a worker in pass 0."""
        place, sizes = self._place, self.sizes
        if not place.divides_batch:
            return place.num_dealt(len(sizes), worker)
        return sum(place.num_dealt(size, worker) > 0 for size in sizes)

    def _batches(self, number: int) -> list[list[Any]]:
        """Return the lists of indices of the script's batches in a pass."""
        if self._made[0] != number:
            self._made = number, self._iterate(self._whole, number)
        return self._made[1]

    def _iterate(self, batch_sampler: Any, number: int) -> list[list[Any]]:
        """Iterate a batch sampler with the random seeds of a pass, which all workers have."""
        with same_randomness(_samplers(batch_sampler), self._place, number):
            # one more than the loader states, because the sampler may have no end
            batches = [list(each) for each in itertools.islice(batch_sampler, self._length + 1)]
        if len(batches) > self._length:
            raise ConfigurationError(
                f"the batch sampler of the script's torch DataLoader yields more than the "
                f"{self._length} batches that len() gives for the loader; expected a sampler whose "
                f"iteration ends. {_INSTEAD}"
            )
        return batches


def _samplers(batch_sampler: Any) -> list[Any]:
    """Return a batch sampler and the samplers inside it, as far as they are objects with state."""
    samplers: list[Any] = []
    inner = batch_sampler
    while hasattr(inner, "__dict__") and not any(inner is each for each in samplers):
        samplers.append(inner)
        inner = getattr(inner, "sampler", None)
    return samplers


def _copied(batch_sampler: Any) -> Any:
    """Return a copy of a batch sampler and of the samplers inside it, but not of their data."""
    copied = copy.copy(batch_sampler)
    outer = copied
    for inner in _samplers(batch_sampler)[1:]:
        outer.sampler = copy.copy(inner)
        outer = outer.sampler
    return copied
