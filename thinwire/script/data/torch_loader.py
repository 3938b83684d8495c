"""Gives Keras' `fit` a worker's part of a torch.utils.data.DataLoader."""

from __future__ import annotations

from typing import Any

from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

from thinwire.script.data.arrays import steps_of_worker
from thinwire.script.data.passes import TrainingPasses
from thinwire.script.data.place import BatchParts, Shared, StepRows, WorkerPlace
from thinwire.script.data.torch_batches import WorkerBatchSampler, with_sampler, worker_sampler


def share_loader(arguments: dict[str, Any], place: WorkerPlace) -> Shared:
    """Return this worker's part of a DataLoader that the script passes to `fit` as x.

    Args:
        arguments: Arguments of the call of Keras' `fit`, by name.
        place: This worker's number in the run, and the rules that divide the training data among
            workers.

    Raises:
        ConfigurationError: The flag --partition is not iid, the loader has no lists of indices that
            are equal on all workers, it has fewer batches than workers, or a batch that workers
            divide has fewer rows than the run has workers.
    """
    fit_arguments, rounds = dict(arguments), None
    if not place.is_shared:
        if place.divides_batch:
            rounds = StepRows(place, None, "the script gives each worker a different DataLoader")
        return Shared(fit_arguments, parts=BatchParts.alike(place), rounds=rounds)
    # Keras rejects arguments that do not go with a DataLoader.
    named = ("x", "y", "sample_weight", "class_weight")
    data_adapters.get_data_adapter(**{name: arguments.get(name) for name in named})
    sampler = worker_sampler(arguments["x"], place)
    sizes, steps = sampler.sizes, arguments.get("steps_per_epoch")
    place.part_of_batch(sizes[0])
    part, total = with_sampler(arguments["x"], sampler), sum(sizes)
    fit_arguments |= {"x": _LoaderAdapter(part, sampler), "shuffle": False}
    known_total = total if sampler.is_regular else None
    own_steps = steps_of_worker(fit_arguments, known_total, sizes[0], place)
    fit_arguments["steps_per_epoch"] = own_steps
    if place.divides_batch and sampler.is_regular:
        rows = place.dealt_rows(total, sizes[0])
        return Shared.of_rows(fit_arguments, place, sizes[0], total, rows, steps)
    has_steps, batch_parts = bool(steps and own_steps), BatchParts.alike(place)
    if steps and own_steps:
        batch_parts = BatchParts.of_steps(place, steps)
    if place.divides_batch and has_steps:
        reason = "fit was given steps_per_epoch and a DataLoader with a batch_sampler of its own"
        rounds = StepRows(place, None, reason)
    elif place.divides_batch:
        rounds = StepRows(place, sampler.rows_of_step)
    short_by = sampler.short_by if place.one_group and not has_steps else 0
    return Shared(fit_arguments, sizes[0], total, short_by, batch_parts, rounds)


class _LoaderAdapter(TorchDataLoaderAdapter):
    """Gives Keras' `fit` the batches of a worker's loader, in passes that all workers number alike.

    Args:
        loader: DataLoader of this worker's part.
        sampler: Batch sampler of the loader.
    """

    def __init__(self, loader: Any, sampler: WorkerBatchSampler) -> None:
        super().__init__(loader)
        self._num_batches = len(sampler)  # Keras does not know it for a data set without __len__

        def begin(number: int) -> Any:
            sampler.next_pass = number
            return loader

        self._dataloader = TrainingPasses(begin)

    def on_epoch_end(self) -> None:
        """Note that Keras ends an epoch."""
        self._dataloader.end_epoch()
