"""Losses that are sums over the rows of a batch, where a worker trains on a part of the batch.

A server takes the mean of the workers' gradients, weighted by rows. The mean of means over rows is
the mean over all rows, so most losses need nothing. The mean of sums over rows is too small: with N
workers, 1/N of the sum. Such a part of a loss is therefore multiplied by R / r, R being the rows of
all workers in this step and r those of this worker. A regularizer of weights is the same on all
workers and needs nothing either.

A loss has three sources, and each is looked at where Keras adds it up:

- The losses that `compile` was given. Those of Keras say by their `reduction` what they are.
- The values of `add_loss` and `activity_regularizer`, which Keras sums over the batch.
- What a `train_step` or a `compute_loss` of the script's own adds up. It has no parts to scale.

Where nothing says whether a value is a sum, it is computed twice: for the batch, and for the batch
with each row repeated. A mean stays what it is, and a sum doubles. This happens once in each `fit`,
in the first step, before its gradient is sent. TensorFlow calls this module within the graph, in
the order of the graph's steps, so what a step knows is kept in plain Python.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers.data_adapters import data_adapter_utils

from thinwire.keras.exchange import StepExchange
from thinwire.keras.plan import running_eagerly
from thinwire.keras.run_member import RunMember
from thinwire.keras.step import count_rows, recording
from thinwire.keras.trial import StepTrial
from thinwire.ops.types import ConfigurationError
from thinwire.sharing.rounds import Rounds

#: A sum in float32 over many rows may differ by so much, relative to its size.
_ROUNDING = 1e-3
#: Values of a model with dropout or noise differ by more. A mean seldom grows by three quarters.
_NOISE = 0.25

#: Within a `tf.function` of the script's own nothing here is converted to a graph's control flow.
_as_it_is = tf.autograph.experimental.do_not_convert

_REMEDY = (
    "Or give --batch=worker, with which each worker takes batches of the script's size and the "
    "server takes the mean over the workers."
)


class Kind(enum.Enum):
    """How a value depends on the number of rows."""

    UNDECIDED = enum.auto()  # nothing has shown it so far
    FIXED = enum.auto()  # a mean over the rows, or the same for any rows
    SUM = enum.auto()  # over the rows
    MIXED = enum.auto()  # the total of both
    OTHER = enum.auto()  # something else, such as a loss that compares rows with each other


class _Part:
    """One part of the loss.

    Attributes:
        name: For messages.
        kind: As far as it is known.
        usual: What it is taken for while nothing shows it.
    """

    def __init__(self, name: str, usual: Kind) -> None:
        self.name, self.kind, self.usual = name, Kind.UNDECIDED, usual

    @property
    def is_sum(self) -> bool:
        kind = self.usual if self.kind in (Kind.UNDECIDED, Kind.OTHER) else self.kind
        return kind is Kind.SUM


class RowSums:
    """Scales the sums over rows in the loss of one model, while `fit` divides its batches.

    Args:
        member: The model's place in the run.
        exchange: Of the steps; keeps what goes wrong within a graph.
        trial: Of the model's train_step.
    """

    def __init__(self, member: RunMember, exchange: StepExchange, trial: StepTrial) -> None:
        self._member, self._exchange, self._trial = member, exchange, trial
        self._rounds: Rounds | None = None
        self._compiled: dict[int, _CompiledLoss] = {}  # by identity of Keras' own
        self._added: dict[int, _Part] = {}  # by position
        self._step = 0  # of the epoch
        self._rows: int | None = None  # of this worker in the present step; None: in no step
        self._repeats: int | None = None  # of each row, while a train_step is tried
        self._data: Any = None  # of the present call of a train_step
        self._needs_trial = False

    # -- where the fit is -------------------------------------------------------------------------

    def begin_fit(self, rounds: Rounds | None) -> None:
        """Look at the losses of a `fit`.

        Args:
            rounds: Rows of all workers in each step; None: batches are not divided.
        """
        self._rounds = rounds
        if rounds is None:
            return
        for part in (*self._added.values(), *(each.part for each in self._compiled.values())):
            part.kind = Kind.UNDECIDED
        self._needs_trial = not self._is_standard
        model = self._member.model
        if "_aggregate_additional_loss" not in vars(model):
            alone = model._aggregate_additional_loss
            model._aggregate_additional_loss = _as_it_is(functools.partial(self._aggregate, alone))
        self._watch(getattr(model, "_compile_loss", None))

    def begin_epoch(self) -> None:
        """Count the steps from 0 on."""
        self._step = 0

    def end_fit(self) -> None:
        """Scale nothing between two fits."""
        self._rounds, self._rows, self._data = None, None, None

    @contextlib.contextmanager
    def step(self, data: Any) -> Iterator[None]:
        """Scale the losses of one call of the model's train_step.

        Args:
            data: Its mini-batch.
        """
        if self._rounds is None:
            yield
            return
        self._data = data
        if not self._is_standard:
            self._once(lambda: not self._needs_trial, self._try_step, data)
        tf.numpy_function(self._begin_step, [count_rows(data)], [])
        try:
            yield
        finally:
            self._data = None
        tf.numpy_function(self._end_step, [], [])

    def _begin_step(self, rows: Any) -> None:
        self._rows = None if self._rounds is None else int(rows)

    def _end_step(self) -> None:
        self._rows = None
        self._step += 1

    @property
    def _is_standard(self) -> bool:
        """Whether Keras' own code adds up the loss."""
        model = self._member.model
        is_own = getattr(model.compute_loss, "__func__", None) is keras.Model.compute_loss
        return is_own and self._trial.is_standard

    # -- parts of the loss ------------------------------------------------------------------------

    def _watch(self, compile_loss: Any) -> None:
        """Let each loss that `compile` was given be scaled, from when Keras knows them."""
        if compile_loss is None:
            return
        if compile_loss.built:
            self._watch_each(compile_loss)
        elif "build" not in vars(compile_loss):
            build = compile_loss.build

            def build_watched(y_true: Any, y_pred: Any) -> None:
                build(y_true, y_pred)
                self._watch_each(compile_loss)

            compile_loss.build = build_watched

    def _watch_each(self, compile_loss: Any) -> None:
        for number, entry in enumerate(compile_loss._flat_losses):
            if not isinstance(entry.loss, _CompiledLoss):
                watched = _CompiledLoss(entry.loss, entry.name, self)
                self._compiled[id(entry.loss)] = watched
                compile_loss._flat_losses[number] = entry._replace(loss=watched)

    def scale_compiled(
        self, loss: Any, part: _Part | None, value: Any, y: Any, y_pred: Any, sample_weight: Any
    ) -> Any:
        """Return the value of a compiled loss, scaled if it is a sum over the rows.

        Args:
            loss: Keras' own, or the script's.
            part: Which it is; None: it is a mean.
            value: Of the loss.
            y: Its arguments.
            y_pred: Its arguments.
            sample_weight: Its arguments.

        Raises:
            ConfigurationError: It is not reduced to one value.
        """
        if self._rounds is None or part is None:
            return value
        if len(value.shape):
            raise ConfigurationError(
                f"the loss {part.name!r} gives a value for each row (reduction=None), so its "
                "gradient is that of their sum, and the loss in History is their mean; expected "
                'one of both where workers share a batch. Give it reduction="sum" or '
                'reduction="sum_over_batch_size".'
            )

        def evaluate(arguments: Any, is_moved: bool) -> list[float]:
            y, y_pred, sample_weight = arguments
            if is_moved:
                y_pred = tf.nest.map_structure(_moved, y_pred)
            return [float(loss(y, y_pred, sample_weight))]

        def judge(arguments: Any) -> None:
            self._decide([part], _kinds(evaluate, arguments, _ROUNDING))

        self._once(lambda: part.kind is not Kind.UNDECIDED, judge, (y, y_pred, sample_weight))
        return self._scaled(part, value)

    def _aggregate(self, alone: Callable[[Any], Any], loss: Any) -> Any:
        """Return the sum of one of the model's additional losses, scaled if it is one over rows."""
        total = alone(loss)
        if self._rounds is None or self._data is None:
            return total
        added = _added_losses(self._member.model)
        position = next((n for n, each in enumerate(added) if each is loss), None)
        if position is None:  # a regularizer of weights
            return total
        has_rows = len(loss.shape) and loss.shape[0] == _static_rows(self._data)
        usual = Kind.SUM if has_rows else Kind.FIXED
        name = f"{position}. value of add_loss or activity_regularizer"
        part = self._added.setdefault(position, _Part(name, usual))
        if _is_at_hand(self._data):
            decided = lambda: part.kind is not Kind.UNDECIDED  # noqa: E731
            self._once(decided, self._judge_added, self._data)
        return self._scaled(part, total)

    def _judge_added(self, data: Any) -> None:
        """Find of which kind the model's additional losses are."""
        model = self._member.model
        x, _, _ = data_adapter_utils.unpack_x_y_sample_weight(data)
        is_noisy = any("seed" in each.path for each in model.non_trainable_variables)

        def evaluate(inputs: Any, is_moved: bool) -> list[float]:
            moved = [(each, _moved(each.value)) for each in model.trainable_variables]
            with keras.StatelessScope(moved if is_moved else None, collect_losses=True):
                training = {"training": True} if model._call_has_training_arg else {}
                model(inputs, **training)
                return [float(tf.reduce_sum(each)) for each in _added_losses(model)]

        kinds = _kinds(evaluate, x, _NOISE if is_noisy else _ROUNDING)
        parts = [self._added.get(position) for position in range(len(kinds))]
        self._decide(parts, kinds)
        for part in self._added.values():
            if part.kind is Kind.UNDECIDED and not kinds:  # the model cannot be called so
                part.kind = Kind.OTHER

    def _decide(self, parts: Sequence[_Part | None], kinds: Sequence[Kind]) -> None:
        """Take the kinds of some parts; refuse one that cannot be scaled."""
        for part, kind in zip(parts, kinds, strict=False):
            if part is None:
                continue
            part.kind = kind
            if kind is Kind.MIXED:
                self._refuse(
                    f"the {part.name} of {self._member.model.name!r} adds a sum over the rows of a "
                    "batch to a mean over them, and workers that share a batch cannot add up both "
                    "at once; expected one of both. Make it two losses, or divide the sum by the "
                    f"number of rows. {_REMEDY}"
                )
            elif kind is Kind.OTHER:
                logging.info("the %s is neither a sum nor a mean over rows", part.name)

    def _scaled(self, part: _Part, value: Any) -> Any:
        if tf.executing_eagerly():
            return value * tf.cast(self._factor(part), value.dtype)
        factor = tf.numpy_function(functools.partial(self._factor, part), [], tf.float32)
        return value * tf.cast(tf.ensure_shape(factor, []), value.dtype)

    def _factor(self, part: _Part) -> np.float32:
        """Return what a part of the loss is multiplied by in the present step."""
        if not part.is_sum:
            return np.float32(1)
        if self._repeats is not None:
            return np.float32(1 / self._repeats)
        if self._rounds is None or not self._rows:
            return np.float32(1)
        try:
            return np.float32(self._rounds.num_rows(self._step, self._rows) / self._rows)
        except ConfigurationError as error:
            self._refuse(
                f"the {part.name} of {self._member.model.name!r} is a sum over the rows of a "
                f"batch, which workers that share a batch have to scale by its size, and {error}. "
                "Expected batches of one size: choose a batch size that divides the rows, give a "
                "tf.data.Dataset .batch(n, drop_remainder=True), or let the loss be a mean over "
                f"the rows. {_REMEDY}"
            )
            return np.float32(1)

    # -- a train_step of the script's own ---------------------------------------------------------

    def _try_step(self, data: Any) -> None:
        """Refuse a train_step whose own loss is a sum over rows; see the module."""
        self._needs_trial = False
        trial = self._trial

        def gradients(repeats: int) -> Any:
            self._repeats = repeats
            with (
                running_eagerly(),
                recording(keeps_gradients=True) as recorder,
                keras.StatelessScope(collect_losses=True),
            ):
                trial.train_step(_repeated(data, repeats))
            return recorder.gradients

        try:
            kind = _kind_of_vectors(gradients)
        except ConfigurationError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a train_step of the script does
            logging.info("the train_step cannot be tried with repeated rows: %r", error)
            return
        finally:
            self._repeats = None
        if kind in (Kind.SUM, Kind.MIXED):
            what = "sums its loss over" if kind is Kind.SUM else "adds a sum to its loss over"
            self._refuse(
                f"the train_step of {self._member.model.name!r} {what} the rows of a batch, and "
                "workers that share a batch would step with a part of that sum; expected a mean "
                "over the rows, or a sum that Keras adds up: give compile a loss with "
                'reduction="sum" or call add_loss, and let the train_step call self.compute_loss. '
                f"{_REMEDY}"
            )

    # -- within a graph ---------------------------------------------------------------------------

    def _once(self, is_done: Callable[[], bool], act: Callable[[Any], None], value: Any) -> None:
        """Call a function in the order of the steps, with values at hand, unless it was called."""
        if tf.executing_eagerly():
            if not is_done():
                act(value)
            return
        leaves = tf.nest.flatten(value, expand_composites=True)
        tensors = [leaf for leaf in leaves if leaf is not None]

        def call(*given: Any) -> int:
            values = iter(given)
            full = [None if leaf is None else next(values) for leaf in leaves]
            try:
                act(tf.nest.pack_sequence_as(value, full, expand_composites=True))
            except ConfigurationError as error:
                self._exchange.keep(error)
            return 0

        done = tf.numpy_function(lambda: np.bool_(is_done()), [], tf.bool)
        stopped = [tf.stop_gradient(each) for each in tensors]
        tf.cond(
            tf.ensure_shape(done, []),
            lambda: tf.constant(0),
            lambda: tf.py_function(call, stopped, tf.int32),
        )

    def _refuse(self, text: str) -> None:
        """End the fit with an error, before the gradient of this step is sent."""
        self._exchange.keep(ConfigurationError(text))


class _CompiledLoss:
    """One of the losses that `compile` was given, scaled while batches are divided."""

    def __init__(self, loss: Any, name: str, owner: RowSums) -> None:
        self._loss, self._owner, self.name = loss, owner, loss.name
        usual = Kind.SUM if loss.reduction == "sum" else Kind.FIXED
        self.part = _Part(f"loss {name!r}", usual)
        is_mean = _is_of_keras(loss) and loss.reduction not in ("sum", "none", None)
        self._is_mean = is_mean

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = self._loss(y_true, y_pred, sample_weight)
        part = None if self._is_mean else self.part
        scale = _as_it_is(self._owner.scale_compiled)
        return scale(self._loss, part, value, y_true, y_pred, sample_weight)


def _is_of_keras(loss: Any) -> bool:
    """Return whether Keras computes a loss, for each row and then reduced as it says."""
    functions = [type(loss).call, type(loss).__call__]
    if isinstance(loss, LossFunctionWrapper):
        functions.append(loss.fn)
    return all(str(getattr(each, "__module__", "")).startswith("keras.") for each in functions)


def _added_losses(model: Any) -> list[Any]:
    """Return what layers have given to add_loss in the newest call, without regularizers."""
    layers = model._flatten_layers(include_self=True)
    return [loss for layer in layers for loss in layer._get_own_losses()]


def _is_at_hand(data: Any) -> bool:
    """Return whether a mini-batch belongs to what is executed or traced here."""
    if tf.executing_eagerly():
        return True
    here = tf.compat.v1.get_default_graph()
    leaves = tf.nest.flatten(data, expand_composites=True)
    return all(each is None or getattr(each, "graph", None) is here for each in leaves)


def _static_rows(data: Any) -> int | None:
    leaves = [each for each in tf.nest.flatten(data) if len(getattr(each, "shape", None) or ())]
    return leaves[0].shape[0] if leaves else None


def _repeated(data: Any, repeats: int) -> Any:
    """Return a mini-batch with all of its rows so often, one whole after the other."""

    def repeat(leaf: Any) -> Any:
        if leaf is None or repeats == 1 or not len(getattr(leaf, "shape", ())):
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            return tf.sparse.concat(0, [leaf] * repeats)
        return tf.concat([leaf] * repeats, 0)

    return tf.nest.map_structure(repeat, data)


def _kinds(
    evaluate: Callable[[Any, bool], Sequence[float]], data: Any, tolerance: float
) -> list[Kind]:
    """Return of which kind some values of a mini-batch are.

    Args:
        evaluate: Returns the values of a mini-batch; if its second argument is true, at another
            place, for a value that happens to be 0.
        data: The mini-batch.
        tolerance: By how much they may differ, relative to their size.

    Returns:
        A kind for each value; nothing if they cannot be computed for repeated rows.
    """
    try:
        kinds = _kinds_at(evaluate, data, False, tolerance)
        if Kind.UNDECIDED in kinds:
            moved = _kinds_at(evaluate, data, True, tolerance)
            pairs = zip(kinds, moved, strict=True)
            kinds = [other if kind is Kind.UNDECIDED else kind for kind, other in pairs]
    except Exception as error:  # noqa: BLE001 - whatever a loss of the script does
        logging.info("a loss cannot be computed for repeated rows: %r", error)
        return []
    return kinds


def _kinds_at(
    evaluate: Callable[[Any, bool], Sequence[float]], data: Any, is_moved: bool, tolerance: float
) -> list[Kind]:
    values = [evaluate(_repeated(data, repeats), is_moved) for repeats in (1, 2)]
    kinds = [_kind(each[0], each[1], math.nan, tolerance) for each in zip(*values, strict=True)]
    if Kind.OTHER in kinds:
        values.append(evaluate(_repeated(data, 3), is_moved))
        kinds = [_kind(each[0], each[1], each[2], tolerance) for each in zip(*values, strict=True)]
    return kinds


def _moved(values: Any) -> Any:
    """Return floats that differ a little from these, by the same amounts at each call."""
    if not (tf.is_tensor(values) and values.dtype.is_floating):
        return values
    seed = tf.constant([7, 1])
    noise = tf.random.stateless_uniform(tf.shape(values)[1:], seed, 0.1, 0.2, tf.float32)
    return values + tf.cast(noise, values.dtype)


def _kind(once: float, twice: float, thrice: float, tolerance: float) -> Kind:
    """Return the kind of a value by those for rows that are repeated.

    >>> [_kind(2.0, twice, thrice, 1e-3).name for twice, thrice in ((2, 2), (4, 6), (3, 4), (3, 9))]
    ['FIXED', 'SUM', 'MIXED', 'OTHER']
    """
    if not (once and math.isfinite(once) and math.isfinite(twice)):
        return Kind.UNDECIDED
    near = functools.partial(math.isclose, rel_tol=0, abs_tol=tolerance * abs(once))
    if near(twice, once):
        return Kind.FIXED
    if near(twice, 2 * once):
        return Kind.SUM
    is_exact = tolerance == _ROUNDING
    return Kind.MIXED if is_exact and near(thrice - twice, twice - once) else Kind.OTHER


def _kind_of_vectors(evaluate: Callable[[int], Sequence[Any]]) -> Kind:
    """Return the kind of gradients, given those for rows that are repeated so often."""
    once, twice = _joined(evaluate(1)), _joined(evaluate(2))
    size = float(np.linalg.norm(once))
    if not (size and once.shape == twice.shape and np.isfinite(twice).all()):
        return Kind.UNDECIDED
    if np.linalg.norm(twice - once) <= _ROUNDING * size:
        return Kind.FIXED
    if np.linalg.norm(twice - 2 * once) <= _ROUNDING * size:
        return Kind.SUM
    thrice = _joined(evaluate(3))
    is_linear = np.linalg.norm(thrice - 2 * twice + once) <= _ROUNDING * size
    return Kind.MIXED if is_linear else Kind.OTHER


def _joined(gradients: Sequence[Any]) -> Any:
    parts = [np.ravel(tf.convert_to_tensor(each).numpy()) for each in gradients if each is not None]
    return np.concatenate(parts, dtype=np.float64) if parts else np.zeros(0)
