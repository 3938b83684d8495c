"""Divides a tf.data.Dataset: takes a worker's part of its source and rebuilds the pipeline.

A tf.data pipeline is a source and its chain of transformations. A worker takes its part of the
elements before the first shuffle, at a point of the pipeline up to which all workers get the same
elements in the same order. So the pipeline's transformations after the division may differ by
worker in seeds, parallel calls and random augmentation. If a transformation after a shuffle depends
on the number of elements (`take`, `skip`, windows), the worker takes its part after that
transformation, and the script must give the shuffle a seed. A tf.data pipeline is rejected if
Thinwire cannot show that it gives all workers the same elements.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from thinwire.models.seeds import own_seed
from thinwire.ops.types import ConfigurationError
from thinwire.script.data import pipeline
from thinwire.script.data.arrays import DEFAULT_BATCH_SIZE, steps_of_worker
from thinwire.script.data.by_rows import mixes_rows
from thinwire.script.data.dataset_passes import read_in_passes
from thinwire.script.data.fit_counts import mixed_seed
from thinwire.script.data.pipeline import Pipeline
from thinwire.script.data.place import Shared, StepRows, UnfilledRounds, WorkerPlace, last_steps
from thinwire.script.data.windows import cut_batches, deal_elements

_INSTEAD = (
    'Give distribute() shard="off" (or --shard=off) and let the script take its part with '
    "thinwire.worker_id() and thinwire.num_workers()"
)
#: Cache: maps a map's function to a dict from the number of workers to the result of `mixes_rows`.
#: Each call of `mixes_rows` reads a batch, and a script may call `fit` once for each epoch.
_MIXES_ROWS: MutableMapping[Any, dict[int, bool]] = weakref.WeakKeyDictionary()


def share_dataset(arguments: dict[str, Any], place: WorkerPlace) -> Shared:
    """Return this worker's part of a tf.data.Dataset that the script passes to `fit` as x.

    Args:
        arguments: Arguments of the call of Keras' `fit`, by name.
        place: This worker's number in the run, and the rules that divide the training data among
            workers.

    Raises:
        ConfigurationError: Thinwire cannot show that the workers' parts are disjoint and complete,
            a worker would get no rows, a batch in the middle of an epoch would have fewer rows than
            the run has workers, or the elements are not batches.
    """
    fit_arguments, whole = dict(arguments), arguments["x"]
    plan, steps = _Plan.of(whole), fit_arguments.get("steps_per_epoch")
    batch_size, unfilled, rows = plan.batch_size, None, None
    if place.is_shared:
        place.check_partition("tf.data.Dataset")
        if any(shape.rank == 0 for shape in pipeline.shapes_of(whole)):
            raise ConfigurationError(
                "the elements of the tf.data.Dataset given to fit are not batches; their structure "
                f"is {whole.element_spec}. Expected a first axis of rows in each component: add "
                ".batch(n)."
            )
        # If the number of rows is known only after the data is read, `deal_elements` or
        # `cut_batches` rejects a batch with too few rows during the epoch.
        total = plan.rows_of_pass if plan.knows_steps and not plan.drops_rest else None
        own_steps = steps_of_worker(arguments, total, batch_size or 1, place, plan.num_passes != 1)
        fit_arguments["steps_per_epoch"], has_steps = own_steps, bool(own_steps)
        if not (has_steps or plan.knows_steps) and place.one_group:
            unfilled = UnfilledRounds()
        part = _WorkerPart(plan, place, has_steps or plan.num_passes != 1, unfilled)
        fit_arguments["x"], rows = part.dataset(), part.rows_of_workers()
        if keras.backend.backend() != "tensorflow":
            fit_arguments = read_in_passes(fit_arguments, unfilled)
    elif place.divides_batch:
        fit_arguments["x"] = whole.rebatch(place.part_of_batch(_known(batch_size)))
    counted = steps if fit_arguments.get("steps_per_epoch") else None
    short_by, batch_parts = last_steps(place, counted, batch_size, rows, plan.drops_rest)
    short_by *= max(0, plan.num_passes)
    num_examples = plan.examples_of_epoch(place) if place.shard == "auto" else None
    rounds = _rounds(plan, place, rows, bool(steps)) if place.divides_batch else None
    return Shared(fit_arguments, batch_size, num_examples, short_by, batch_parts, rounds, unfilled)


def _rounds(
    plan: _Plan, place: WorkerPlace, rows: Sequence[int] | None, has_steps: bool
) -> StepRows:
    """Return the row counts of all workers in each step of an epoch.

    Args:
        plan: Transformations of the tf.data.Dataset that the script passes to `fit`.
        place: Number of this worker, which takes a part of each batch, and the rules that divide
            data among workers.
        rows: For each worker, the number of rows in one pass over the data; None if unknown.
        has_steps: True if the script passes steps_per_epoch to `fit`.
    """
    size, batching = plan.batch_size, plan.batching
    if size is None:
        return StepRows(place, None, "the batch size of the tf.data.Dataset cannot be found")
    if batching is None:
        is_full = {size} == {spec.shape[0] for spec in tf.nest.flatten(plan.nodes[0].element_spec)}
    else:
        total = int(plan.nodes[batching + 1].cardinality())
        is_full = plan.drops_rest or total == tf.data.INFINITE_CARDINALITY
    if is_full:
        return StepRows.full(place, size)
    return StepRows.of_rows(place, size, rows, has_steps or plan.num_passes != 1)


def part_of_dataset(dataset: Pipeline, place: WorkerPlace) -> Pipeline:
    """Return this worker's part of a dataset, which may have batches; each batch stays whole.

    Raises:
        ConfigurationError: Thinwire cannot show that the workers' parts are disjoint and complete,
            or a part is empty.
    """
    place = dataclasses.replace(place, batch="worker")
    return _WorkerPart(_Plan.of(dataset), place).dataset() if place.is_shared else dataset


def _known(batch_size: int | None) -> int:
    if batch_size is None:
        raise ConfigurationError(
            "--batch=global: Thinwire cannot find the batch size of the tf.data.Dataset given to "
            "fit, and so cannot divide the batches among the workers; use .batch(n) as one of its "
            "last transformations, or --batch=worker."
        )
    return batch_size


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Transformations of a pipeline which turn a part of their input into a part of their output.

    Attributes:
        nodes: tf.data transformations in order from the pipeline's last one to the source. Each
            node except the last node of the list turns a part of its input into the same part of
            its output.
        batching: Index in `nodes` of the transformation that makes the script's batches; None if no
            transformation makes batches.
    """

    nodes: tuple[Pipeline, ...]
    batching: int | None

    @classmethod
    def of(cls, dataset: Pipeline) -> _Plan:
        nodes, batching = [dataset], None
        # If a pipeline has several batch transformations, only the last one makes the script's
        # batches. Rows of an earlier one, or of one before an unbatch(), are not the script's
        # examples.
        may_batch = True
        while pipeline.commutes(nodes[-1]):
            if pipeline.name_of(nodes[-1]) in pipeline.BATCHES:
                if not may_batch:
                    break
                batching, may_batch = len(nodes) - 1, False
            may_batch = may_batch and not pipeline.changes_elements(nodes[-1])
            nodes.extend(pipeline.inputs_of(nodes[-1]))
        return cls(tuple(nodes), batching)

    @property
    def batch_size(self) -> int | None:
        """Number of rows in a full batch of the script; None if the batch size is unknown."""
        node = self.nodes[0]
        while pipeline.name_of(node) not in pipeline.BATCHES:
            sources = pipeline.inputs_of(node)
            if len(sources) != 1 or pipeline.changes_elements(node):
                sizes = {shape[0] for shape in pipeline.shapes_of(self.nodes[0]) if shape.rank}
                return sizes.pop() if len(sizes) == 1 else None
            node = sources[0]
        return pipeline.size_of_batch(node)

    @property
    def num_examples(self) -> int | None:
        """Number of rows in one pass over the training set; None if unknown."""
        if self.batching is None:
            return None
        for node in self.nodes[self.batching + 1 :]:
            total = int(node.cardinality())
            if pipeline.name_of(node) != pipeline.REPEAT and total != tf.data.INFINITE_CARDINALITY:
                return total if total >= 0 else None
        return None

    @property
    def rows_of_pass(self) -> int | None:
        """Number of rows that enter batches in one pass over the data; None if unknown."""
        if self.batching is None:
            return None
        total = int(self.nodes[self.batching + 1].cardinality())
        return total if total >= 0 else None

    @property
    def num_passes(self) -> int:
        """Number of times that `repeat` repeats the batches; -1 means without end."""
        return _num_repeats(self.nodes[: self.batching or 0])

    @property
    def drops_rest(self) -> bool:
        """True if the script's batching drops a last batch that is not full."""
        return self.batching is not None and pipeline.drops_remainder(self.nodes[self.batching])

    @property
    def keeps_batches(self) -> bool:
        """True if no transformation after the batching may drop a batch."""
        return self.batching is not None and not any(
            pipeline.may_drop(node) for node in self.nodes[: self.batching]
        )

    @property
    def knows_steps(self) -> bool:
        """True if the number of batches in one pass is known before the data is read."""
        return self.rows_of_pass is not None and self.keeps_batches

    def examples_of_epoch(self, place: WorkerPlace) -> int | None:
        """Return the number of rows that all workers train on in one pass; None if unknown."""
        total, size = self.num_examples, self.batch_size
        if total is None or size is None or not self.drops_rest:
            return total
        if not place.is_shared or place.divides_batch or not self.keeps_batches:
            return total - total % size
        return sum(rows - rows % size for rows in place.dealt_rows(total, place.run_batch(size)))

    @property
    def fixes_rows(self) -> bool:
        """True if the pipeline cannot make batches with fewer rows for a single worker.

        Batches have a fixed number of rows if the source delivers whole batches, or if functions
        are traced for a static batch size.
        """
        if self.batching is None:
            return True
        return self.drops_rest and any(
            pipeline.has_functions(node) for node in self.nodes[: self.batching]
        )


def _num_repeats(nodes: Sequence[Pipeline]) -> int:
    """Return how often the `repeat` transformations in a list repeat elements; -1: without end."""
    counts = [pipeline.repeats(node) for node in nodes if pipeline.name_of(node) == pipeline.REPEAT]
    return -1 if -1 in counts else math.prod(counts)


@dataclasses.dataclass(frozen=True)
class _SameOrder:
    """The transformations of a script's pipeline, with an order equal on all workers.

    Attributes:
        nodes: tf.data transformations in order from the pipeline's last one to the source.
        place: This worker's number in the run, and the rules that divide the training data among
            workers.
    """

    nodes: tuple[Pipeline, ...]
    place: WorkerPlace

    @functools.cached_property
    def _rebuilt(self) -> list[Pipeline]:
        """Transformations rebuilt so far, from the source towards the last one."""
        return [self._source(self.nodes[-1])]

    def node(self, number: int) -> Pipeline:
        """Return the pipeline's transformation at an index, with an order equal on all workers."""
        for index in range(len(self.nodes) - 1 - len(self._rebuilt), number - 1, -1):
            node, source = self.nodes[index], self._rebuilt[-1]
            is_open = pipeline.has_open_order(node, self.nodes[0])
            if is_open or source is not pipeline.inputs_of(node)[0]:
                node = pipeline.rebuild(
                    node, source, self.place.worker, seed=self._seed(index), in_order=True
                )
            self._rebuilt.append(node)
        return self._rebuilt[len(self.nodes) - 1 - number]

    def _source(self, node: Pipeline) -> Pipeline:
        """Return the transformation nearest to the source, with seeds for one call of `fit`.

        The random generators of a script's dataset advance with each iteration over the dataset. A
        restarted worker does not iterate in the calls of `fit` that it skips, so its random
        generators would lag behind. So the transformations that can be rebuilt get seeds that
        depend on the number of the call of `fit`.
        """
        fit, sources = self.place.fit, pipeline.inputs_of(node)
        has_cache = pipeline.keep_elements((*self.nodes, node))
        if fit is None or not fit.uses or len(sources) != 1 or has_cache:
            return node
        source = self._source(sources[0]) if pipeline.is_rebuilt_whole(node) else sources[0]
        seed = pipeline.seed_of(node)
        is_new = seed is not None and pipeline.reshuffles(node)
        if source is sources[0] and not is_new:
            return node
        if seed is not None and is_new:
            seed = mixed_seed(seed, fit.uses)
        return pipeline.rebuild(node, source, self.place.worker, seed=seed, in_order=True)

    def _seed(self, number: int) -> int | None:
        """Return a seed, equal on all workers, for a shuffle; None for other transformations.

        A tf.data shuffle draws a new order in each iteration, so without Thinwire each `fit` of a
        script has a different order. A rebuilt shuffle starts from its seed, so its seed depends on
        the number of the call of `fit`. The seed of a shuffle is the same in each `fit` if the
        order must not change: for reshuffle_each_iteration=False, or with a cache after the
        shuffle. A dataset that the script creates for each `fit` starts with the same order if its
        shuffle has a seed, and with a new order if the shuffle has none.
        """
        node, fit = self.nodes[number], self.place.fit
        if pipeline.name_of(node) != pipeline.SHUFFLE:
            return None
        seed = pipeline.seed_of(node)
        if seed is None:
            seed = mixed_seed(self.place.rule.seed, 0 if fit is None else fit.before_data)
        is_kept = pipeline.keep_elements(self.nodes[:number]) or not pipeline.reshuffles(node)
        return seed if fit is None or is_kept else mixed_seed(seed, fit.uses)

    def own_seed(self, number: int) -> int | None:
        """Return the seed of a shuffle of one worker's rows; None if any seed is allowed."""
        seed, place = self._seed(number), self.place
        if seed is None or (place.fit is None and pipeline.seed_of(self.nodes[number]) is None):
            return None
        return own_seed(seed, place.worker)


@dataclasses.dataclass(frozen=True)
class _WorkerPart:
    """A worker's part of a pipeline of tf.data transformations.

    Attributes:
        plan: Transformations of the script's tf.data pipeline.
        place: This worker's number in the run, and the rules that divide the training data among
            workers.
        is_repeated: True if one epoch of `fit` may continue into the next pass over the training
            data.
        unfilled: Counter of rounds (steps of all workers) in which this worker has no rows, counted
            while the data is read. None: do not count these rounds.
    """

    plan: _Plan
    place: WorkerPlace
    is_repeated: bool = False
    unfilled: UnfilledRounds | None = None

    @functools.cached_property
    def _ordered(self) -> _SameOrder:
        return _SameOrder(self.plan.nodes, self.place)

    def dataset(self) -> Pipeline:
        """Return a tf.data.Dataset of this worker's part of the rows. Raises ConfigurationError."""
        place, plan, point = self.place, self.plan, self._dealt_at
        if self._cuts_batches:
            part = self._cut_batches(point)
        else:
            deals_rows = self._behind is None and plan.batching is not None
            # If a repeat() before the batching repeats the rows, a batch may span two passes over
            # the data. A short last window is then not a short batch and must not be rejected.
            between = plan.nodes[(plan.batching or 0) + 1 : point]
            ends_batch = not deals_rows or _num_repeats(between) == 1
            if deals_rows:
                window = place.run_batch(_known(plan.batch_size))
            else:
                has_batches = pipeline.has_batches(plan.nodes[0])
                window = place.num_workers * (1 if has_batches else DEFAULT_BATCH_SIZE)
            deal_out = functools.partial(
                deal_elements,
                window=window,
                drops_rest=self._drops_rest(point),
                is_repeated=self.is_repeated and ends_batch,
                unfilled=self.unfilled if ends_batch else None,
            )
            part = _push_up(self._ordered.node(point), deal_out, self._dealing(point))
        for number in range(point - 1, -1, -1):
            is_batching = number == plan.batching
            size = place.part_of_batch(_known(plan.batch_size)) if is_batching else None
            seed = self._ordered.own_seed(number)
            part = pipeline.rebuild(plan.nodes[number], part, place.worker, size, seed)
        return part

    def rows_of_workers(self) -> tuple[int, ...] | None:
        """Return the number of rows of each worker in one pass over the data; None if unknown."""
        plan, place = self.plan, self.place
        total, size = plan.rows_of_pass, plan.batch_size
        if not total or size is None or not plan.keeps_batches:
            return None
        window = place.run_batch(size)
        if self._cuts_batches:
            return place.dealt_rows(total - (total % size if plan.drops_rest else 0), window)
        # Between the transformation whose output is divided and the batching, elements may be
        # repeated or expanded into several rows.
        dealt = int(plan.nodes[self._dealt_at].cardinality())
        if dealt <= 0 or total % dealt:
            return None
        full = dealt - (dealt % window if self._drops_rest(self._dealt_at) else 0)
        return tuple(total // dealt * rows for rows in place.dealt_rows(full, window))

    @property
    def _cuts_batches(self) -> bool:
        """True if every worker makes the script's whole batches and keeps a part of each batch."""
        return self.place.divides_batch and (self.plan.fixes_rows or self._behind is not None)

    @functools.cached_property
    def _behind(self) -> int | None:
        """Index of the last transformation that needs whole batches; None if none does.

        Every worker must make the script's whole batches up to the last transformation that needs
        whole batches. A `filter` after the batching accepts or drops whole batches. A `map` after
        batching may compute a row from all rows of its batch. A `map` that computes a row from all
        rows needs whole batches if workers take parts of each batch.
        """
        plan, divides = self.plan, self.place.divides_batch
        if plan.batching is None or (divides and plan.fixes_rows):
            return None
        for number, node in enumerate(plan.nodes[: plan.batching]):
            mixes = divides and pipeline.is_map(node) and self._mixes_rows(number)
            if mixes or pipeline.may_drop(node):
                return number
        return None

    def _mixes_rows(self, number: int) -> bool:
        """Return True if a map gives other rows for parts of a batch than for the whole batch."""
        function, num_workers = self.plan.nodes[number]._map_func, self.place.num_workers
        known = _MIXES_ROWS.setdefault(function, {})
        if num_workers not in known:
            try:
                batch = pipeline.first_element(self.plan.nodes[number + 1])
                known[num_workers] = mixes_rows(function, batch, self.place)
            except tf.errors.OpError:
                return False  # the script's pipeline fails without Thinwire as well
        return known[num_workers]

    @functools.cached_property
    def _dealt_at(self) -> int:
        """Index of the transformation whose output elements are divided among the workers.

        If a transformation needs whole batches, the batches are divided. Otherwise a pipeline is
        divided at the last transformation up to which all workers get the same elements and that
        precedes the first shuffle and the batching. Division at the last possible transformation
        gives the most even parts. All rows of one file or one window go to one worker only if
        single rows cannot be divided. A `filter` after a shuffle would give the workers different
        numbers of rows and steps. So rows are divided after a `filter` that follows a shuffle, if
        the shuffle can have the same order on all workers.
        """
        plan, nodes, behind = self.plan, self.plan.nodes, self._behind
        if self._cuts_batches:
            return behind or 0
        reason, source = "", nodes[-1]
        if behind is not None:
            point, reason = self._point_within(behind, None)
            if point is None:
                raise _unsure(reason, *self._named(behind))
            if self._suffices(point):
                return point
            reason, source = "", nodes[point]
        else:
            first, last = 0 if plan.batching is None else plan.batching + 1, len(nodes) - 1
            changing = (
                number
                for number in range(first, last)
                if pipeline.changes_elements(nodes[number]) or pipeline.may_drop(nodes[number])
            )
            for end in (next(changing, last), last):
                point, reason_here = self._point_within(end, plan.batching)
                reason = reason or reason_here
                if point is not None and self._suffices(point):
                    return point
        if reason:
            raise _unsure(reason)
        total = int(source.cardinality())
        raise ConfigurationError(
            f"{total} elements of the tf.data.Dataset given to fit cannot be divided among "
            f"{self.place.num_workers} workers; expected at least one element for each worker. "
            f"Use --nb_workers={max(total, 1)} at most, or more data."
        )

    def _named(self, number: int) -> tuple[str, str]:
        """Return the texts (reason, advice) of an error about a transformation after `batch()`."""
        name = pipeline.plain_name(self.plan.nodes[number])
        why = (
            f"{name} comes after batch() and needs the script's whole batches, so every worker "
            "must make the same batches, but "
        )
        return why, f"Put {name} before batch(), or give "

    def _point_within(self, end: int, batching: int | None) -> tuple[int | None, str]:
        """Return the transformation whose output workers divide, or None and a reason.

        Args:
            end: Index of the candidate transformation that is nearest to the tf.data pipeline's
                source.
            batching: Index of the transformation that makes batches. Only transformations between
                the source and the batching are candidates; None: all are candidates.
        """
        nodes = self.plan.nodes
        last, point, reason = -1 if batching is None else batching, None, ""
        for number in range(end):
            if pipeline.name_of(nodes[number]) == pipeline.SHUFFLE:
                last = max(last, number)
        for number in range(end, last, -1):
            reason = pipeline.why_unsure(self._ordered.node(number), nodes[0])
            if reason:
                break
            point = number
        while point is not None and point < end and pipeline.is_one_to_one(nodes[point]):
            point += 1
        return point, reason

    def _suffices(self, point: int) -> bool:
        total = int(self.plan.nodes[point].cardinality())
        return total < 0 or total >= self.place.num_workers

    def _dealing(self, point: int) -> WorkerPlace:
        """Return this worker's `WorkerPlace` for the division of a transformation's output.

        If the script's order of elements is the same in each `fit`, or with each new dataset, a
        worker must get the same part in each `fit`. If a worker's part changed, a cache would
        replay the part of the first `fit`, and a shuffle that repeats its order would order
        different rows.
        """
        place, behind = self.place, self.plan.nodes[:point]
        shuffles = [node for node in behind if pipeline.name_of(node) == pipeline.SHUFFLE]
        is_cached = any(pipeline.name_of(node) == pipeline.CACHE for node in behind)
        if is_cached or not all(pipeline.reshuffles(node) for node in shuffles):
            return dataclasses.replace(place, deals_alike=True)
        is_seeded = any(pipeline.seed_of(node) is not None for node in shuffles)
        if place.fit is None or not is_seeded:
            return place
        return dataclasses.replace(place, fit=dataclasses.replace(place.fit, before=place.fit.uses))

    def _drops_rest(self, point: int) -> bool:
        """Return True if an incomplete last window is a short batch that the script drops."""
        plan, batching = self.plan, self.plan.batching
        if not (plan.drops_rest and self.place.divides_batch) or batching is None:
            return False
        return all(
            pipeline.is_one_to_one(node) or pipeline.name_of(node) == pipeline.SHUFFLE
            for node in plan.nodes[batching + 1 : point]
        )

    def _cut_batches(self, point: int) -> Pipeline:
        """Return the batches of a transformation, each with only this worker's rows."""
        whole, plan, size = self._ordered.node(point), self.plan, self.plan.batch_size
        if reason := pipeline.why_unsure(whole, plan.nodes[0]):
            if plan.fixes_rows:
                raise _unsure(reason, "", "--batch=worker needs no cut batches; or give ")
            raise _unsure(reason, *self._named(point))
        if size is not None:
            self.place.part_of_batch(size)
        total = plan.rows_of_pass
        rest = None if total is None or size is None or not plan.keeps_batches else total % size
        if plan.drops_rest or (plan.batching is None and size is not None):
            rest = 0
        return cut_batches(
            whole,
            self._dealing(point),
            rest=rest,
            is_repeated=self.is_repeated,
            unfilled=self.unfilled,
        )


def _push_up(node: Pipeline, deal_out: Callable[..., Pipeline], place: WorkerPlace) -> Pipeline:
    """Return a worker's part of an output, divided as near the tf.data source as possible."""
    name = pipeline.name_of(node)
    if name == pipeline.ZIP and pipeline.are_equally_long(node):
        datasets = node._datasets
        parts = [_push_up(each, deal_out, place) for each in tf.nest.flatten(datasets)]
        return tf.data.Dataset.zip(tf.nest.pack_sequence_as(datasets, parts))
    if pipeline.is_one_to_one(node):
        (source,) = pipeline.inputs_of(node)
        before = dataclasses.replace(place, deals_alike=True) if name == pipeline.CACHE else place
        return pipeline.rebuild(node, _push_up(source, deal_out, before), place.worker)
    return deal_out(node, place=place)


def _unsure(reason: str, why: str = "", help_first: str = "Give ") -> ConfigurationError:
    """Return the error for a dataset whose elements or order may differ by worker.

    Args:
        reason: Property of the dataset because of which its elements may differ between workers.
        why: Text for the error message, why all workers need the same elements of the dataset; may
            be empty.
        help_first: First words of the error message's advice, before "each shuffle a seed".
    """
    return ConfigurationError(
        "the workers' parts of the tf.data.Dataset given to fit cannot be shown to be disjoint "
        f"and complete: {why}{reason}. {help_first}each shuffle a seed and each interleave a "
        "cycle_length, and leave deterministic=False and Python generators out. Another solution: "
        f"{_INSTEAD}."
    )
