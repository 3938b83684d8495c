"""Sharing tf.data: a worker's part of a pipeline's source, with the same transformations after it.

A part is taken before the first shuffle, at a point up to which every worker gets the same elements
in the same order. So it does not matter what comes after: seeds, parallel calls, random
augmentation. Where the number of elements matters after a shuffle (`take`, `skip`, windows), the
part is taken after that, and the shuffle must have a seed. What cannot be shown to be alike on all
workers is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from thinwire.models.seeds import own_seed
from thinwire.ops.types import ConfigurationError
from thinwire.sharing import pipeline
from thinwire.sharing.fit_counts import mixed_seed
from thinwire.sharing.pipeline import Pipeline
from thinwire.sharing.place import Rounds, Shared, WorkerPlace, deal
from thinwire.sharing.rounds import UnknownRounds, dealt_rounds, full_rounds

_INSTEAD = (
    'Give distribute() shard="off" (or --shard=off) and let the script take its part with '
    "thinwire.worker_id() and thinwire.num_workers()"
)


def is_dataset(data: Any) -> bool:
    """Return whether Keras would take this as tf.data."""
    return isinstance(data, tf.data.Dataset)


def share_dataset(arguments: dict[str, Any], place: WorkerPlace) -> Shared:
    """Return this worker's part of a tf.data.Dataset that `fit` was given as x.

    Args:
        arguments: Of Keras' fit, by name.
        place: This worker's.

    Raises:
        ConfigurationError: The workers' parts cannot be shown to be disjoint and complete, a part
            would be empty, or the elements are no batches.
    """
    given, whole = dict(arguments), arguments["x"]
    plan = _Plan.of(whole)
    batch_size = plan.batch_size
    if place.is_shared:
        _check_shareable(whole, place)
        given["x"] = _WorkerPart(plan, place).dataset()
    elif place.divides_batch:
        size = place.part_of_batch(_known(batch_size))
        given["x"] = whole.rebatch(size)
    steps = given.get("steps_per_epoch")
    if steps and place.is_shared:
        given["steps_per_epoch"] = place.steps(steps)
    num_examples, short_by = _epoch_of_all(plan, place)
    if place.shard == "off":
        num_examples = None
    rounds = _rounds(plan, place, bool(steps)) if place.divides_batch else None
    return Shared(given, batch_size, num_examples, 0 if steps else short_by, rounds)


def part_of_dataset(dataset: Pipeline, place: WorkerPlace) -> Pipeline:
    """Return this worker's part of a dataset, batched or not, with its batches as they are.

    Raises:
        ConfigurationError: As `share_dataset`.
    """
    place = dataclasses.replace(place, batch="worker")
    return _WorkerPart(_Plan.of(dataset), place).dataset() if place.is_shared else dataset


def _known(batch_size: int | None) -> int:
    if batch_size is None:
        raise ConfigurationError(
            "--batch=global: the batch size of this tf.data.Dataset cannot be found, so that it "
            "cannot be divided; use .batch(n) as one of its last transformations, or "
            "--batch=worker."
        )
    return batch_size


def _check_shareable(dataset: Pipeline, place: WorkerPlace) -> None:
    if place.rule.partition != "iid":
        raise ConfigurationError(
            f"--partition={place.rule.partition} deals out arrays, and fit was given a "
            "tf.data.Dataset. Use --partition=iid, or give fit arrays."
        )
    ranks = [spec.shape.rank for spec in tf.nest.flatten(dataset.element_spec)]
    if 0 in ranks:
        raise ConfigurationError(
            f"the elements of the tf.data.Dataset given to fit are no batches: "
            f"{dataset.element_spec}. Expected a first axis of rows in each component: add "
            ".batch(n)."
        )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A pipeline as far as one transformation follows the other.

    Attributes:
        nodes: From the dataset itself towards its source; parts of the input of each give parts of
            its output, but for the last, of which that is not known.
        batching: Which of them makes the batches; None if none of these does.
    """

    nodes: tuple[Pipeline, ...]
    batching: int | None

    @classmethod
    def of(cls, dataset: Pipeline) -> _Plan:
        nodes, batching = [dataset], None
        may_batch = True  # the rows of a batching before that are no examples of the script's
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
        """Rows of a full batch; None if they cannot be known."""
        node = self.nodes[0]
        while pipeline.name_of(node) not in pipeline.BATCHES:
            sources = pipeline.inputs_of(node)
            if len(sources) != 1 or pipeline.changes_elements(node):
                specs = tf.nest.flatten(self.nodes[0].element_spec)
                sizes = {spec.shape[0] for spec in specs if spec.shape.rank}
                return sizes.pop() if len(sizes) == 1 else None
            node = sources[0]
        return pipeline.size_of_batch(node)

    @property
    def num_examples(self) -> int | None:
        """Rows of the training set, once through; None if they cannot be known."""
        if self.batching is None:
            return None
        for node in self.nodes[self.batching + 1 :]:
            total = int(node.cardinality())
            if pipeline.name_of(node) != pipeline.REPEAT and total != tf.data.INFINITE_CARDINALITY:
                return total if total >= 0 else None
        return None

    def cuts_rows(self, place: WorkerPlace) -> bool:
        """Return whether each finished batch is to be cut, as its batching cannot be changed."""
        if not place.divides_batch:
            return False
        if self.batching is None:
            return True
        return pipeline.drops_remainder(self.nodes[self.batching]) and any(
            pipeline.has_functions(node) for node in self.nodes[: self.batching]
        )

    def first(self, is_wanted: Callable[[Pipeline], bool], within: int) -> int:
        """Return the first of some transformations nearest to the source; -1 if there is none.

        Args:
            is_wanted: Of which.
            within: Only transformations after this one count.
        """
        found = [number for number in range(within) if is_wanted(self.nodes[number])]
        return max(found, default=-1)


class _WorkerPart:
    """A worker's part of a pipeline."""

    def __init__(self, plan: _Plan, place: WorkerPlace) -> None:
        self._plan, self._place = plan, place
        self._nodes = plan.nodes
        # From the source on, as far as `_node` has been.
        self._in_order = [self._source(plan.nodes[-1])]

    def _node(self, number: int) -> Pipeline:
        """Return a transformation, with a fixed order where the script left that open."""
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
        """Return it. Raises ConfigurationError."""
        if self._plan.cuts_rows(self._place):
            return self._rows()
        point = self._point()
        part = self._push_up(self._node(point))
        for number in range(point - 1, -1, -1):
            node = self._nodes[number]
            size = self._own_batch_size if number == self._plan.batching else None
            seed = self._own_seed(number)
            part = pipeline.rebuild(node, part, self._place.worker, size, seed)
        return part

    def _source(self, node: Pipeline) -> Pipeline:
        """Return what the last known transformation gives, with this fit's seeds before it.

        The script's own object goes on with its generators as often as it was iterated over. A
        worker that has passed over fits has not iterated, so what can be made again is.
        """
        fit, sources = self._place.fit, pipeline.inputs_of(node)
        has_cache = any(pipeline.name_of(each) == pipeline.CACHE for each in (*self._nodes, node))
        if fit is None or not fit.uses or len(sources) != 1 or has_cache:
            return node
        source = self._source(sources[0]) if pipeline.is_rebuilt_whole(node) else sources[0]
        known = pipeline.seed_of(node) if pipeline.name_of(node) == pipeline.SHUFFLE else None
        is_new = known is not None and pipeline.reshuffles(node)
        if source is sources[0] and not is_new:
            return node
        seed = mixed_seed(known, fit.uses) if known is not None and is_new else known
        return pipeline.rebuild_in_order(node, source, self._place.worker, seed)

    def _seed(self, number: int) -> int | None:
        """Return the seed of a shuffle on all workers; None: the transformation is another one.

        A dataset that is iterated over again goes on with its shuffle's generator, and so has
        another order in another `fit`. What is made here for each `fit` begins with another seed,
        unless the order stays: by reshuffle_each_iteration=False, or in a cache behind it. A new
        dataset with the same seed begins with the same order, and one without with another.
        """
        node, fit = self._nodes[number], self._place.fit
        if pipeline.name_of(node) != pipeline.SHUFFLE:
            return None
        seed = pipeline.seed_of(node)
        if seed is None:
            before_data = 0 if fit is None else fit.before_data
            seed = mixed_seed(self._place.rule.seed, before_data)
        is_kept = any(pipeline.name_of(each) == pipeline.CACHE for each in self._nodes[:number])
        if fit is None or is_kept or not pipeline.reshuffles(node):
            return seed
        return mixed_seed(seed, fit.uses)

    def _own_seed(self, number: int) -> int | None:
        """Return the seed of a shuffle of this worker's part; None: no matter which."""
        seed, place = self._seed(number), self._place
        if seed is None or (place.fit is None and pipeline.seed_of(self._nodes[number]) is None):
            return None
        return own_seed(seed, place.worker)

    @property
    def _own_batch_size(self) -> int:
        return self._place.part_of_batch(_known(self._plan.batch_size))

    def _point(self) -> int:
        """Return the transformation whose output is shared.

        The last one before the first shuffle, and before the batching, up to which all workers get
        the same: there the parts are most even. What comes of one file or window stays together
        only where it must.
        """
        last, reason = len(self._nodes) - 1, ""
        expanding = [n for n in range(last) if pipeline.changes_elements(self._nodes[n])]
        for end in (*expanding[:1], last):
            point, reason_here = self._point_within(end)
            reason = reason or reason_here
            if point is not None and self._suffices(self._nodes[point]):
                return point
        if reason:
            raise _unsure(reason)
        total = int(self._nodes[last].cardinality())
        raise ConfigurationError(
            f"{total} elements of the tf.data.Dataset given to fit cannot be shared by "
            f"{self._place.num_workers} workers; expected at least one each. Use "
            f"--nb_workers={max(total, 1)} at most, or more data."
        )

    def _point_within(self, end: int) -> tuple[int | None, str]:
        """Return the point among the transformations up to `end`, or why there is none."""
        batching = -1 if self._plan.batching is None else self._plan.batching
        shuffle = self._plan.first(lambda node: pipeline.name_of(node) == pipeline.SHUFFLE, end)
        point, reason = None, ""
        for number in range(end, max(shuffle, batching), -1):
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

    def _push_up(self, node: Pipeline) -> Pipeline:
        """Return a worker's part of what a transformation gives, taken as early as possible."""
        name = pipeline.name_of(node)
        if name == pipeline.ZIP:
            return tf.data.Dataset.zip(
                tf.nest.map_structure(self._push_up, node._datasets),
            )
        if pipeline.is_one_to_one(node):
            (source,) = pipeline.inputs_of(node)
            return pipeline.rebuild(node, self._push_up(source), self._place.worker)
        return self._cut(node)

    def _cut(self, whole: Pipeline) -> Pipeline:
        """Return the elements of whole batches' rows that are this worker's."""
        place, size = self._place, self._plan.batch_size
        run_batch = place.num_workers if size is None else place.run_batch(size)
        worker, workers = place.worker - 1, place.num_workers
        if self._plan.batching is None or run_batch % workers == 0:
            return whole.shard(workers, worker)
        mine = (
            whole.enumerate()
            .filter(lambda position, element: position % run_batch % workers == worker)
            .map(lambda position, element: element)
        )
        total = int(whole.cardinality())
        if total >= 0:
            total = len(deal(total, run_batch, place.worker, workers))
        if total == tf.data.UNKNOWN_CARDINALITY:
            return mine
        return mine.apply(tf.data.experimental.assert_cardinality(total))

    def _rows(self) -> Pipeline:
        """Return each finished batch's rows that are this worker's."""
        whole, place = self._node(0), self._place
        reason = pipeline.why_unsure(whole, whole)
        if reason:
            raise _unsure(reason, "--batch=worker needs no cut batches; or give ")
        start, step = place.worker - 1, place.num_workers
        size = self._plan.batch_size
        if size is not None:
            place.part_of_batch(size)

        def cut(*element: Any) -> Any:
            mine = tf.nest.map_structure(lambda rows: _every(rows, start, step), element)
            return mine if isinstance(whole.element_spec, tuple) else mine[0]

        part = whole.map(cut)
        return part if self._fills_all() else part.filter(_has_rows)

    def _fills_all(self) -> bool:
        """Return whether every batch is known to have a row for each worker."""
        batching, total = self._plan.batching, self._plan.num_examples
        if batching is None:
            return self._plan.batch_size is not None
        if pipeline.drops_remainder(self._nodes[batching]):
            return True
        last = 0 if total is None else total % _known(self._plan.batch_size)
        return total is not None and (last == 0 or last >= self._place.num_workers)


def _unsure(reason: str, help_first: str = "") -> ConfigurationError:
    first = help_first or "Give "
    return ConfigurationError(
        "the workers' parts of the tf.data.Dataset given to fit cannot be shown to be disjoint "
        f"and complete: {reason}. {first}each shuffle a seed and each interleave a cycle_length, "
        f"and leave deterministic=False and Python generators out. Or: {_INSTEAD}."
    )


def _every(rows: Any, start: int, step: int) -> Any:
    """Return rows start, start + step, ... of a batch: a tensor, ragged or sparse."""
    if not isinstance(rows, tf.SparseTensor):
        return rows[start::step]
    number = rows.indices[:, 0]
    mine = tf.equal(number % step, start)
    indices = tf.boolean_mask(rows.indices, mine)
    indices = tf.concat([(indices[:, :1] - start) // step, indices[:, 1:]], axis=1)
    length = (rows.dense_shape[:1] - start + step - 1) // step
    shape = tf.concat([length, rows.dense_shape[1:]], axis=0)
    part = tf.SparseTensor(indices, tf.boolean_mask(rows.values, mine), shape)
    part.set_shape([None, *rows.shape[1:]])
    return part


def _has_rows(*element: Any) -> Any:
    first = tf.nest.flatten(element)[0]
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0] > 0
    if isinstance(first, tf.RaggedTensor):
        return first.nrows() > 0
    return tf.shape(first)[0] > 0


def _epoch_of_all(plan: _Plan, place: WorkerPlace) -> tuple[int | None, int]:
    """Return the rows that all workers train on in an epoch, and `Shared.short_by`.

    The rows are None where they cannot be known; a last, short batch may be left out.
    """
    total, size, batching = plan.num_examples, plan.batch_size, plan.batching
    if total is None or size is None or batching is None:
        return total, 0
    drops = pipeline.drops_remainder(plan.nodes[batching])
    if not place.is_shared or plan.cuts_rows(place):
        return total - total % size if drops else total, 0
    rows, steps = 0, []
    for worker in range(1, place.num_workers + 1):
        part = len(deal(total, place.run_batch(size), worker, place.num_workers))
        own = place.part_of_batch(size, worker)
        steps.append(part // own if drops else -(-part // own))
        rows += steps[-1] * own if drops else part
    repeats = int(plan.nodes[0].cardinality()) < 0
    short_by = max(steps) - steps[place.worker - 1] if place.one_group and not repeats else 0
    return rows, short_by


def _rounds(plan: _Plan, place: WorkerPlace, has_steps: bool) -> Rounds:
    """Return the rows of all workers' steps.

    Args:
        plan: Of the script's dataset.
        place: This worker's; it divides batches.
        has_steps: Whether the script gives a number of steps.
    """
    size, batching = plan.batch_size, plan.batching
    if size is None:
        return UnknownRounds("the batch size of the tf.data.Dataset cannot be found")
    if batching is None:
        has_static_rows = {size} == {
            spec.shape[0] for spec in tf.nest.flatten(plan.nodes[0].element_spec)
        }
        return full_rounds(place, size) if has_static_rows else dealt_rounds(place, size, None)
    if pipeline.drops_remainder(plan.nodes[batching]):
        return full_rounds(place, size)
    total = int(plan.nodes[batching + 1].cardinality())
    if total == tf.data.INFINITE_CARDINALITY:
        return full_rounds(place, size)
    is_counted = int(plan.nodes[0].cardinality()) != tf.data.UNKNOWN_CARDINALITY
    if total < 0 or not is_counted or not place.is_shared:
        return dealt_rounds(place, size, None)
    # A worker's part may be taken before the data are repeated. Then it is the part of one pass,
    # several times, and not the part of all passes.
    repeats = any(pipeline.name_of(node) == pipeline.REPEAT for node in plan.nodes)
    if repeats and total % size == 0 and plan.num_examples is not None:
        total = plan.num_examples
    workers = range(1, place.num_workers + 1)
    totals = [len(deal(total, size, worker, place.num_workers)) for worker in workers]
    return dealt_rounds(place, size, totals, repeats or has_steps)
