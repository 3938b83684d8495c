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
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import tensorflow as tf

from thinwire.models.seeds import own_seed
from thinwire.ops.types import ConfigurationError
from thinwire.script.data import pipeline
from thinwire.script.data.arrays import DEFAULT_BATCH_SIZE, steps_of_worker
from thinwire.script.data.by_rows import mixes_rows
from thinwire.script.data.fit_counts import mixed_seed
from thinwire.script.data.pipeline import Pipeline
from thinwire.script.data.place import BatchParts, Shared, StepRows, UnfilledRounds, WorkerPlace
from thinwire.script.data.rounds import UnknownRounds, dealt_rounds, full_rounds
from thinwire.script.data.windows import cut_batches, deal_elements

_INSTEAD = (
    'Give distribute() shard="off" (or --shard=off) and let the script take its part with '
    "thinwire.worker_id() and thinwire.num_workers()"
)
#: Cache: maps a map's function to a dict from the number of workers to the result of `mixes_rows`.
#: Each call of `mixes_rows` reads a batch, and a script may call `fit` once for each epoch.
_MIXES_ROWS: MutableMapping[Any, dict[int, bool]] = weakref.WeakKeyDictionary()


def is_dataset(data: Any) -> bool:
    """Return True if an object is a tf.data.Dataset."""
    return isinstance(data, tf.data.Dataset)


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
    batch_size, short_by, unfilled, part = plan.batch_size, 0, None, None
    batch_parts = BatchParts.of_steps(place, steps) if steps else BatchParts.alike(place)
    if place.is_shared:
        _check_shareable(whole, place)
        fit_arguments["steps_per_epoch"] = _steps_of_worker(fit_arguments, plan, place)
        has_steps = bool(fit_arguments["steps_per_epoch"])
        if not (has_steps or plan.knows_steps) and place.one_group:
            unfilled = UnfilledRounds()
        part = _WorkerPart(plan, place, has_steps or plan.num_passes != 1, unfilled)
        fit_arguments["x"] = part.dataset()
        if not has_steps:
            short_by, batch_parts = part.short_by(), part.parts()
    elif place.divides_batch:
        size = place.part_of_batch(_known(batch_size))
        fit_arguments["x"] = whole.rebatch(size)
    num_examples = plan.examples_of_epoch(place) if place.shard == "auto" else None
    rounds = _rounds(plan, place, part, bool(steps)) if place.divides_batch else None
    return Shared(fit_arguments, batch_size, num_examples, short_by, batch_parts, rounds, unfilled)


def _rounds(plan: _Plan, place: WorkerPlace, part: _WorkerPart | None, has_steps: bool) -> StepRows:
    """Return the row counts of all workers in each step of an epoch.

    Args:
        plan: Transformations of the tf.data.Dataset that the script passes to `fit`.
        place: Number of this worker, which takes a part of each batch, and the rules that divide
            data among workers.
        part: This worker's part of the tf.data.Dataset; None if the script itself divides its data
            among workers.
        has_steps: True if the script passes steps_per_epoch to `fit`.
    """
    size, batching = plan.batch_size, plan.batching
    if size is None:
        return UnknownRounds("the batch size of the tf.data.Dataset cannot be found")
    if batching is None:
        specs = tf.nest.flatten(plan.nodes[0].element_spec)
        is_full = {size} == {spec.shape[0] for spec in specs}
        return full_rounds(place, size) if is_full else dealt_rounds(place, size, None)
    total = int(plan.nodes[batching + 1].cardinality())
    if plan.drops_rest or total == tf.data.INFINITE_CARDINALITY:
        return full_rounds(place, size)
    rows = None if part is None else part.rows_of_workers()
    return dealt_rounds(place, size, rows, has_steps or plan.num_passes != 1)


def _steps_of_worker(given: dict[str, Any], plan: _Plan, place: WorkerPlace) -> int | None:
    """Return this worker's steps_per_epoch; reject a batch with fewer rows than the run's workers.

    If the number of rows is known only after the data is read, `deal_elements` or `cut_batches`
    rejects a batch with too few rows during the epoch.
    """
    steps, size, total = given.get("steps_per_epoch"), plan.batch_size, plan.rows_of_pass
    if size is None or total is None or plan.drops_rest or not plan.knows_steps:
        return place.steps(steps) if steps else None
    return steps_of_worker(given, total, size, place, is_repeated=plan.num_passes != 1)


def part_of_dataset(dataset: Pipeline, place: WorkerPlace) -> Pipeline:
    """Return this worker's part of a dataset, which may have batches; each batch stays whole.

    Raises:
        ConfigurationError: Thinwire cannot show that the workers' parts are disjoint and complete,
            or a part is empty.
    """
    place = dataclasses.replace(place, batch="worker")
    return _WorkerPart(_Plan.of(dataset), place, False).dataset() if place.is_shared else dataset


def _known(batch_size: int | None) -> int:
    if batch_size is None:
        raise ConfigurationError(
            "--batch=global: Thinwire cannot find the batch size of the tf.data.Dataset given to "
            "fit, and so cannot divide the batches among the workers; use .batch(n) as one of its "
            "last transformations, or --batch=worker."
        )
    return batch_size


def _check_shareable(dataset: Pipeline, place: WorkerPlace) -> None:
    if place.rule.partition != "iid":
        raise ConfigurationError(
            f"--partition={place.rule.partition} divides only arrays among the workers, but the "
            "script called fit with a tf.data.Dataset. Use --partition=iid, or give fit arrays."
        )
    if any(shape.rank == 0 for shape in pipeline.shapes_of(dataset)):
        raise ConfigurationError(
            "the elements of the tf.data.Dataset given to fit are not batches; their structure is "
            f"{dataset.element_spec}. Expected a first axis of rows in each component: add "
            ".batch(n)."
        )


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
        if self.batching is None or self.batching + 1 == len(self.nodes):
            return None
        total = int(self.nodes[self.batching + 1].cardinality())
        return total if total >= 0 else None

    @property
    def num_passes(self) -> int:
        """Number of times that `repeat` repeats the batches; -1 means without end."""
        number = 1
        for node in self.nodes[: self.batching or 0]:
            if pipeline.name_of(node) == pipeline.REPEAT:
                number = -1 if -1 in (number, count := pipeline.repeats(node)) else number * count
        return number

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

    def repeats_between(self, point: int) -> int:
        """Return how often `repeat` repeats rows from index `point` to batching; -1: endless."""
        number = 1
        for node in self.nodes[(self.batching or 0) + 1 : point]:
            if pipeline.name_of(node) == pipeline.REPEAT:
                number = -1 if -1 in (number, count := pipeline.repeats(node)) else number * count
        return number

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

    def first(self, is_wanted: Callable[[Pipeline], bool], within: int) -> int:
        """Return the index of the wanted transformation that is nearest to the source; else -1.

        Args:
            is_wanted: Function of a tf.data transformation that returns True if the search must
                find the transformation.
            within: Index of a transformation; the search covers only the transformations between
                this index and the pipeline's end.
        """
        indices = [number for number in range(within) if is_wanted(self.nodes[number])]
        return max(indices, default=-1)


class _WorkerPart:
    """A worker's part of a pipeline of tf.data transformations."""

    def __init__(
        self,
        plan: _Plan,
        place: WorkerPlace,
        is_repeated: bool,
        unfilled: UnfilledRounds | None = None,
    ) -> None:
        """Prepare the division of a dataset, beginning at the pipeline's source.

        Args:
            plan: Transformations of the script's tf.data pipeline.
            place: This worker's number in the run, and the rules that divide the training data
                among workers.
            is_repeated: True if one epoch of `fit` may continue into the next pass over the
                training data.
            unfilled: Counter of rounds (steps of all workers) in which this worker has no rows,
                counted while the data is read. None: do not count these rounds.
        """
        self._plan, self._place = plan, place
        self._is_repeated, self._unfilled = is_repeated, unfilled
        self._nodes = plan.nodes
        # Transformations that `_node` has rebuilt so far, from the source towards the last one.
        self._in_order = [self._source(plan.nodes[-1])]

    def _node(self, number: int) -> Pipeline:
        """Return the pipeline's transformation at an index, with an order equal on all workers."""
        fixed = self._in_order
        while len(fixed) < len(self._nodes) - number:
            node, source = self._nodes[-1 - len(fixed)], fixed[-1]
            is_open = pipeline.has_open_order(node, self._nodes[0])
            if is_open or source is not pipeline.inputs_of(node)[0]:
                seed = self._seed(len(self._nodes) - 1 - len(fixed))
                node = pipeline.rebuild_in_order(node, source, self._place.worker, seed)
            fixed.append(node)
        return fixed[len(self._nodes) - 1 - number]

    def dataset(self) -> Pipeline:
        """Return a tf.data.Dataset of this worker's part of the rows. Raises ConfigurationError."""
        place, plan, point = self._place, self._plan, self._dealt_at
        if self._cuts_batches:
            part = self._cut_batches(point)
        else:
            deals_rows = self._behind is None and plan.batching is not None
            # If a repeat() before the batching repeats the rows, a batch may span two passes over
            # the data. A short last window is then not a short batch and must not be rejected.
            ends_batch = not deals_rows or plan.repeats_between(point) == 1
            deal_out = functools.partial(
                deal_elements,
                window=self._window(in_batches=self._behind is not None),
                drops_rest=self._drops_rest(point),
                is_repeated=self._is_repeated and ends_batch,
                unfilled=self._unfilled if ends_batch else None,
            )
            part = self._push_up(self._node(point), deal_out, self._dealing(point))
        for number in range(point - 1, -1, -1):
            is_batching = number == plan.batching
            size = place.part_of_batch(_known(plan.batch_size)) if is_batching else None
            seed = self._own_seed(number)
            part = pipeline.rebuild(self._nodes[number], part, place.worker, size, seed)
        return part

    def parts(self) -> BatchParts:
        """Return how many parts of the script's batch each mini-batch of this worker has."""
        rows, size = self.rows_of_workers(), self._plan.batch_size
        if rows is None or size is None:
            return BatchParts.alike(self._place)
        return BatchParts.of_rows(self._place, size, rows, self._plan.drops_rest)

    def short_by(self) -> int:
        """Return by how many steps this worker's epoch is shorter than the longest epoch."""
        rows, plan, place = self.rows_of_workers(), self._plan, self._place
        if rows is None or plan.batch_size is None or plan.num_passes < 0:
            return 0
        steps = place.steps_of_rows(plan.batch_size, rows, plan.drops_rest)
        return place.short_by(steps) * plan.num_passes

    def rows_of_workers(self) -> tuple[int, ...] | None:
        """Return the number of rows of each worker in one pass over the data; None if unknown."""
        plan, place = self._plan, self._place
        total, size = plan.rows_of_pass, plan.batch_size
        if not total or size is None or not plan.keeps_batches:
            return None
        window = place.run_batch(size)
        if self._cuts_batches:
            return place.dealt_rows(total - (total % size if plan.drops_rest else 0), window)
        # Between the transformation whose output is divided and the batching, elements may be
        # repeated or expanded into several rows.
        dealt = int(self._nodes[self._dealt_at].cardinality())
        if dealt <= 0 or total % dealt:
            return None
        full = dealt - (dealt % window if self._drops_rest(self._dealt_at) else 0)
        return tuple(total // dealt * rows for rows in place.dealt_rows(full, window))

    @functools.cached_property
    def _behind(self) -> int | None:
        return self._last_behind_batches()

    @property
    def _cuts_batches(self) -> bool:
        """True if every worker makes the script's whole batches and keeps a part of each batch."""
        return self._place.divides_batch and (self._plan.fixes_rows or self._behind is not None)

    @functools.cached_property
    def _dealt_at(self) -> int:
        """Index of the transformation whose output elements are divided among the workers."""
        if self._cuts_batches:
            return self._behind or 0
        return self._point() if self._behind is None else self._point_behind(self._behind)

    def _last_behind_batches(self) -> int | None:
        """Return the index of the last transformation that needs whole batches; None if none does.

        Every worker must make the script's whole batches up to the last transformation that needs
        whole batches. A `filter` after the batching accepts or drops whole batches. A `map` after
        batching may compute a row from all rows of its batch. A `map` that computes a row from all
        rows needs whole batches if workers take parts of each batch.
        """
        plan, divides = self._plan, self._place.divides_batch
        if plan.batching is None or (divides and plan.fixes_rows):
            return None
        for number in range(plan.batching):
            node = self._nodes[number]
            if pipeline.may_drop(node):
                return number
            if divides and pipeline.is_map(node) and self._mixes_rows(number):
                return number
        return None

    def _mixes_rows(self, number: int) -> bool:
        """Return True if a map gives other rows for parts of a batch than for the whole batch."""
        function = self._nodes[number]._map_func
        known = _MIXES_ROWS.setdefault(function, {})
        if self._place.num_workers not in known:
            try:
                batch = pipeline.first_element(self._nodes[number + 1])
                known[self._place.num_workers] = mixes_rows(function, batch, self._place)
            except tf.errors.OpError:
                return False  # the script's pipeline fails without Thinwire as well
        return known[self._place.num_workers]

    def _source(self, node: Pipeline) -> Pipeline:
        """Return the transformation nearest to the source, with seeds for one call of `fit`.

        The random generators of a script's dataset advance with each iteration over the dataset. A
        restarted worker does not iterate in the calls of `fit` that it skips, so its random
        generators would lag behind. So the transformations that can be rebuilt get seeds that
        depend on the number of the call of `fit`.
        """
        fit, sources = self._place.fit, pipeline.inputs_of(node)
        has_cache = any(
            pipeline.name_of(transformation) in pipeline.KEEPING
            for transformation in (*self._nodes, node)
        )
        if fit is None or not fit.uses or len(sources) != 1 or has_cache:
            return node
        source = self._source(sources[0]) if pipeline.is_rebuilt_whole(node) else sources[0]
        script_seed = pipeline.seed_of(node) if pipeline.name_of(node) == pipeline.SHUFFLE else None
        is_new = script_seed is not None and pipeline.reshuffles(node)
        if source is sources[0] and not is_new:
            return node
        seed = (
            mixed_seed(script_seed, fit.uses) if script_seed is not None and is_new else script_seed
        )
        return pipeline.rebuild_in_order(node, source, self._place.worker, seed)

    def _seed(self, number: int) -> int | None:
        """Return a seed, equal on all workers, for a shuffle; None for other transformations.

        A tf.data shuffle draws a new order in each iteration, so without Thinwire each `fit` of a
        script has a different order. A rebuilt shuffle starts from its seed, so its seed depends on
        the number of the call of `fit`. The seed of a shuffle is the same in each `fit` if the
        order must not change: for reshuffle_each_iteration=False, or with a cache after the
        shuffle. A dataset that the script creates for each `fit` starts with the same order if its
        shuffle has a seed, and with a new order if the shuffle has none.
        """
        node, fit = self._nodes[number], self._place.fit
        if pipeline.name_of(node) != pipeline.SHUFFLE:
            return None
        seed = pipeline.seed_of(node)
        if seed is None:
            before_data = 0 if fit is None else fit.before_data
            seed = mixed_seed(self._place.rule.seed, before_data)
        is_kept = any(
            pipeline.name_of(transformation) in pipeline.KEEPING
            for transformation in self._nodes[:number]
        )
        if fit is None or is_kept or not pipeline.reshuffles(node):
            return seed
        return mixed_seed(seed, fit.uses)

    def _own_seed(self, number: int) -> int | None:
        """Return the seed of a shuffle of one worker's rows; None if any seed is allowed."""
        seed, place = self._seed(number), self._place
        if seed is None or (place.fit is None and pipeline.seed_of(self._nodes[number]) is None):
            return None
        return own_seed(seed, place.worker)

    def _point(self) -> int:
        """Return the index of the transformation whose output elements are divided among workers.

        A pipeline is divided at the last transformation up to which all workers get the same
        elements and that precedes the first shuffle and the batching. Division at the last possible
        transformation gives the most even parts. All rows of one file or one window go to one
        worker only if single rows cannot be divided. A `filter` after a shuffle would give the
        workers different numbers of rows and steps. So rows are divided after a `filter` that
        follows a shuffle, if the shuffle can have the same order on all workers.
        """
        last, reason = len(self._nodes) - 1, ""
        first = 0 if self._plan.batching is None else self._plan.batching + 1
        changing = [
            n
            for n in range(first, last)
            if pipeline.changes_elements(self._nodes[n]) or pipeline.may_drop(self._nodes[n])
        ]
        for end in (*changing[:1], last):
            point, reason_here = self._point_within(end, self._plan.batching)
            reason = reason or reason_here
            if point is not None and self._suffices(self._nodes[point]):
                return point
        if reason:
            raise _unsure(reason)
        raise self._too_few(self._nodes[last])

    def _too_few(self, source: Pipeline) -> ConfigurationError:
        total = int(source.cardinality())
        return ConfigurationError(
            f"{total} elements of the tf.data.Dataset given to fit cannot be divided among "
            f"{self._place.num_workers} workers; expected at least one element for each worker. "
            f"Use --nb_workers={max(total, 1)} at most, or more data."
        )

    def _point_behind(self, behind: int) -> int:
        """Return the index of the transformation whose batches are each divided among workers."""
        point, reason = self._point_within(behind, None)
        if point is None:
            raise _unsure(reason, *self._named(behind))
        if not self._suffices(self._nodes[point]):
            raise self._too_few(self._nodes[point])
        return point

    def _named(self, number: int) -> tuple[str, str]:
        """Return the texts (reason, advice) of an error about a transformation after `batch()`."""
        name = pipeline.plain_name(self._nodes[number])
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
        last = -1 if batching is None else batching
        shuffle = self._plan.first(lambda node: pipeline.name_of(node) == pipeline.SHUFFLE, end)
        point, reason = None, ""
        for number in range(end, max(shuffle, last), -1):
            reason = pipeline.why_unsure(self._node(number), self._nodes[0])
            if reason:
                break
            point = number
        while point is not None and point < end and pipeline.is_one_to_one(self._nodes[point]):
            point += 1
        return point, reason

    def _suffices(self, source: Pipeline) -> bool:
        total = int(source.cardinality())
        return total < 0 or total >= self._place.num_workers

    def _window(self, in_batches: bool) -> int:
        """Return the number of elements that are divided among all workers at a time."""
        place, plan = self._place, self._plan
        if not in_batches and plan.batching is not None:
            return place.run_batch(_known(plan.batch_size))
        if in_batches or pipeline.has_batches(self._nodes[0]):
            return place.num_workers
        return place.num_workers * DEFAULT_BATCH_SIZE

    def _push_up(
        self, node: Pipeline, deal_out: Callable[..., Pipeline], place: WorkerPlace
    ) -> Pipeline:
        """Return a worker's part of an output, divided as near the tf.data source as possible."""
        name = pipeline.name_of(node)
        if name == pipeline.ZIP and pipeline.are_equally_long(node):
            parts = (
                self._push_up(component, deal_out, place)
                for component in tf.nest.flatten(node._datasets)
            )
            return tf.data.Dataset.zip(tf.nest.pack_sequence_as(node._datasets, list(parts)))
        if pipeline.is_one_to_one(node):
            (source,) = pipeline.inputs_of(node)
            is_cache = name == pipeline.CACHE
            before = dataclasses.replace(place, deals_alike=True) if is_cache else place
            part = self._push_up(source, deal_out, before)
            return pipeline.rebuild(node, part, place.worker)
        return deal_out(node, place=place)

    def _dealing(self, point: int) -> WorkerPlace:
        """Return this worker's `WorkerPlace` for the division of a transformation's output.

        If the script's order of elements is the same in each `fit`, or with each new dataset, a
        worker must get the same part in each `fit`. If a worker's part changed, a cache would
        replay the part of the first `fit`, and a shuffle that repeats its order would order
        different rows.
        """
        place, behind = self._place, self._nodes[:point]
        shuffles = [node for node in behind if pipeline.name_of(node) == pipeline.SHUFFLE]
        is_cached = any(pipeline.name_of(node) == pipeline.CACHE for node in behind)
        if is_cached or not all(pipeline.reshuffles(node) for node in shuffles):
            return dataclasses.replace(place, deals_alike=True)
        is_seeded = any(pipeline.seed_of(node) is not None for node in shuffles)
        if place.fit is None or not is_seeded:
            return place
        fit = dataclasses.replace(place.fit, before=place.fit.uses)
        return dataclasses.replace(place, fit=fit)

    def _drops_rest(self, point: int) -> bool:
        """Return True if an incomplete last window is a short batch that the script drops."""
        plan, batching = self._plan, self._plan.batching
        if not (plan.drops_rest and self._place.divides_batch) or batching is None:
            return False
        return all(
            pipeline.is_one_to_one(node) or pipeline.name_of(node) == pipeline.SHUFFLE
            for node in self._nodes[batching + 1 : point]
        )

    def _cut_batches(self, point: int) -> Pipeline:
        """Return the batches of a transformation, each with only this worker's rows."""
        whole, place, plan = self._node(point), self._place, self._plan
        reason = pipeline.why_unsure(whole, self._nodes[0])
        if reason and plan.fixes_rows:
            raise _unsure(reason, "", "--batch=worker needs no cut batches; or give ")
        if reason:
            raise _unsure(reason, *self._named(point))
        size = plan.batch_size
        if size is not None:
            place.part_of_batch(size)
        return cut_batches(
            whole,
            self._dealing(point),
            rest=self._rest(),
            is_repeated=self._is_repeated,
            unfilled=self._unfilled,
        )

    def _rest(self) -> int | None:
        """Return the row count of a short last batch; 0 if every batch is full; None if unknown."""
        plan, size, total = self._plan, self._plan.batch_size, self._plan.rows_of_pass
        if plan.drops_rest or (plan.batching is None and size is not None):
            return 0
        if total is None or size is None or not plan.keeps_batches:
            return None
        return total % size


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
