"""Scales losses that are sums over rows, if a worker trains on a part of each batch.

A server averages the workers' gradients, weighted by the workers' numbers of rows. If each worker's
loss is a mean over its rows, the server's average is the mean over all rows, so most losses need no
scaling. If each worker's loss is a sum over its rows, the server's average is too small: with N
workers it is 1/N of the sum. So a part of the loss that is a sum is multiplied by R / r, with R the
number of rows of all workers in the step and r the number of rows of this worker. A weight
regularizer is equal on all workers and needs no scaling by rows.

A model's loss has three sources, and each source is watched where Keras adds up the loss:

- The first source is the losses that `compile` got. The `reduction` of a Keras loss shows whether
  the loss is a sum over rows.
- The second source is the values of `add_loss` and `activity_regularizer`, which Keras sums over
  the batch.
- The third source is a loss that the script's own `train_step` or `compute_loss` adds up. Thinwire
  cannot see the parts of a loss that a script's own code adds up, so it cannot scale them.

If the code does not show whether a loss is a sum over rows, the loss is computed twice: for the
batch, and for the batch with each row repeated. If each row of the batch occurs twice, a loss that
is a mean stays equal, and a loss that is a sum doubles. The loss is computed for repeated rows once
in each `fit`, in the first step, before the step's gradient is sent. TensorFlow calls the module
`row_sums` within the graph of a step, one step after the other, so Python attributes may hold the
state of a step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers.data_adapters import data_adapter_utils

from thinwire.ops.types import ConfigurationError
from thinwire.script.data.place import StepRows
from thinwire.script.data.rows import count_rows
from thinwire.script.keras.exchange import StepExchange
from thinwire.script.keras.plan import running_eagerly
from thinwire.script.keras.row_kinds import (
    RowKind,
    kind_of_gradients,
    kinds_of,
    moved,
    repeated,
    rows_of,
)
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.step import recording
from thinwire.script.keras.traces import call_with_values
from thinwire.script.keras.trial import StepTrial

#: Prevents AutoGraph from converting this module's code in a `tf.function` of the script.
_as_it_is = tf.autograph.experimental.do_not_convert

_REMEDY = (
    "Or give --batch=worker, with which each worker takes batches of the script's size and the "
    "server takes the mean over the workers."
)


class _Part:
    """One part of a model's loss, for example the loss of one output.

    Attributes:
        name: Name of this part of the model's loss, for error messages.
        kind: Kind of this part of the loss, a sum or a mean over rows; `UNDECIDED` before it is
            known.
        usual: Kind that is assumed for this part of the loss if `kind` is `UNDECIDED` or `OTHER`
            (no sum and no mean).
    """

    def __init__(self, name: str, usual: RowKind) -> None:
        self.name, self.kind, self.usual = name, RowKind.UNDECIDED, usual

    @property
    def is_sum(self) -> bool:
        kind = self.usual if self.kind in (RowKind.UNDECIDED, RowKind.OTHER) else self.kind
        return kind is RowKind.SUM


class RowSums:
    """Scales those parts of a model's loss that are sums over rows, if workers divide batches.

    Args:
        member: Membership of the model in a run, which holds the script's settings, the session
            with the servers, and the barriers with other workers' scripts.
        exchange: Object that exchanges with the servers and stores errors that occur within a
            TensorFlow graph.
        trial: Object that calls the model's train_step before training, in a trial without updates.
    """

    def __init__(self, member: RunMember, exchange: StepExchange, trial: StepTrial) -> None:
        self._member, self._exchange, self._trial = member, exchange, trial
        self._rounds: StepRows | None = None
        self._compiled: list[_CompiledLoss] = []
        # Maps the position among the losses that layers added with `add_loss` to the part of the
        # model's loss.
        self._added: dict[int, _Part] = {}
        self._step = 0  # number of the step within the epoch, from 0
        # number of this worker's rows in the present step; None between steps
        self._rows: int | None = None
        # Number of copies of each row while a train_step is tried with repeated rows; None
        # otherwise.
        self._repeats: int | None = None
        self._data: Any = None  # mini-batch of the train_step in progress; None between steps
        self._whole = _Part("train_step", RowKind.FIXED)  # loss of the script's own train_step

    # -- position in the fit ----------------------------------------------------------------------

    def begin_fit(self, rounds: StepRows | None) -> None:
        """Begin a `fit`, and forget which parts of the model's loss are sums over rows.

        Args:
            rounds: Number of rows of all workers in each step; None if workers do not divide the
                script's batches.
        """
        self._rounds = rounds
        compiled = [loss.part for loss in self._compiled]
        for part in (self._whole, *self._added.values(), *compiled):
            part.kind = RowKind.UNDECIDED

    def begin_epoch(self) -> None:
        """Set the number of the current step in the epoch to 0."""
        self._step = 0

    def end_fit(self) -> None:
        """Stop scaling losses until the next `fit` begins."""
        self._rounds, self._rows, self._data = None, None, None

    @contextlib.contextmanager
    def step(self, data: Any) -> Iterator[None]:
        """Scale losses that are sums over rows, within one call of the model's train_step.

        A graph that is traced in a loop of train_on_batch may run in a later `fit`. So each
        training step checks at run time if its losses must be scaled.

        Args:
            data: Mini-batch with which the train_step is called.
        """
        settings = self._member.settings
        if settings is None or settings.run.nb_workers == 1:
            yield
            return
        self._data = data
        self._watch_losses()
        if not self._is_standard:
            self._once(self._whole, self._try_step, data)
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
        """True if Keras' own train_step and compute_loss add up the loss."""
        model = self._member.model
        is_own = getattr(model.compute_loss, "__func__", None) is keras.Model.compute_loss
        return is_own and self._trial.is_standard

    # -- parts of the loss ------------------------------------------------------------------------

    def _watch_losses(self) -> None:
        model = self._member.model
        if "_aggregate_additional_loss" not in vars(model):
            alone = model._aggregate_additional_loss
            model._aggregate_additional_loss = _as_it_is(functools.partial(self._aggregate, alone))
        self._watch(getattr(model, "_compile_loss", None))

    def _watch(self, compile_loss: Any) -> None:
        """Wrap each loss that `compile` got, once Keras has built the losses."""
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
                self._compiled.append(watched)
                compile_loss._flat_losses[number] = entry._replace(loss=watched)

    def scale_compiled(
        self, loss: Any, part: _Part | None, value: Any, y: Any, y_pred: Any, sample_weight: Any
    ) -> Any:
        """Return the value of a compiled loss, scaled if the value is a sum over a batch's rows.

        Args:
            loss: Loss object of Keras or of the script.
            part: Part of the model's loss to which the value belongs; None if the loss is known to
                be a mean.
            value: Value of the loss: a scalar, or one value for each row.
            y: Target values with which the loss was called.
            y_pred: Predictions with which the loss was called.
            sample_weight: Sample weights that the loss was called with; None without weights.
        """
        if self._data is None or part is None:
            return value
        if len(value.shape):
            self._once(part, lambda arguments: self._refuse_rows(part), (y, y_pred, sample_weight))
            return value

        def evaluate(arguments: Any, is_moved: bool) -> list[float]:
            y, y_pred, sample_weight = arguments
            if is_moved:
                y_pred = tf.nest.map_structure(moved, y_pred)
            # a tf.function would need a second TensorFlow thread to compute eagerly
            with running_eagerly():
                return [float(loss(y, y_pred, sample_weight))]

        def decide(arguments: Any) -> None:
            self._decide([part], kinds_of(evaluate, arguments) or [RowKind.OTHER])

        self._once(part, decide, (y, y_pred, sample_weight))
        return self._scaled(part, value)

    def _refuse_rows(self, part: _Part) -> None:
        part.kind = RowKind.OTHER
        self._refuse(
            f"the {part.name} of {self._member.model.name!r} gives a value for each row "
            "(reduction=None). Keras takes the gradient of the sum of these values but reports "
            "their mean as the loss in History; expected a sum or a mean where workers share a "
            'batch. Give the loss reduction="sum" or reduction="sum_over_batch_size".'
        )

    def _aggregate(self, alone: Callable[[Any], Any], loss: Any) -> Any:
        """Return the total of a layer's added losses, scaled if they are sums over the rows."""
        total = alone(loss)
        if self._data is None:
            return total
        added = _added_losses(self._member.model)
        position = next((n for n, layer_loss in enumerate(added) if layer_loss is loss), None)
        # a weight regularizer needs no scaling, because it is equal on all workers
        if position is None:
            return total
        part = self._added.get(position)
        if part is None:
            layer = next(
                layer
                for layer in self._member.model._flatten_layers()
                if any(loss is layer_loss for layer_loss in layer._get_own_losses())
            )
            is_by_row = len(loss.shape) > 0 and loss.shape[0] == rows_of(self._data)
            usual = RowKind.SUM if is_by_row else RowKind.FIXED
            name = f"value that layer {layer.name!r} adds to the loss"
            part = self._added[position] = _Part(name, usual)
        if _is_at_hand(self._data):
            self._once(part, self._decide_added, self._data)
        return self._scaled(part, total)

    def _decide_added(self, data: Any) -> None:
        """Find out which losses added by the model's layers are sums over the rows."""
        model = self._member.model
        x, _, _ = data_adapter_utils.unpack_x_y_sample_weight(data)
        training = {"training": True} if model._call_has_training_arg else {}

        def evaluate(inputs: Any, is_moved: bool) -> list[float]:
            variables = model.trainable_variables if is_moved else []
            values = [(variable, moved(variable.value)) for variable in variables]
            with running_eagerly(), keras.StatelessScope(values, collect_losses=True):
                model(inputs, **training)
                return [float(tf.reduce_sum(layer_loss)) for layer_loss in _added_losses(model)]

        kinds = kinds_of(evaluate, x) or [RowKind.OTHER] * len(self._added)
        self._decide([self._added.get(position) for position in range(len(kinds))], kinds)

    def _decide(self, parts: Sequence[_Part | None], kinds: Sequence[RowKind]) -> None:
        """Store which parts of the loss are sums or means; reject a part that cannot be scaled.

        Args:
            parts: Parts of the model's loss; None for a part that needs no check.
            kinds: For each part of the loss, its kind: a sum or a mean over rows.
        """
        for part, kind in zip(parts, kinds, strict=False):
            if part is None:
                continue
            part.kind = kind
            if kind is RowKind.MIXED:
                self._refuse(
                    f"the {part.name} of {self._member.model.name!r} adds a sum over the rows of a "
                    "batch to a mean over the rows, and workers that share a batch scale only "
                    "sums; expected a sum or a mean. Make it two losses, or divide the sum by the "
                    f"number of rows. {_REMEDY}"
                )
            elif kind is RowKind.OTHER:
                logging.info("the %s is neither a sum nor a mean over batch rows", part.name)

    def _scaled(self, part: _Part, value: Any) -> Any:
        if tf.executing_eagerly():
            return value * tf.cast(self._factor(part), value.dtype)
        factor = tf.numpy_function(functools.partial(self._factor, part), [], tf.float32)
        return value * tf.cast(tf.ensure_shape(factor, []), value.dtype)

    def _factor(self, part: _Part) -> np.float32:
        """Return the factor by which a part of the loss is multiplied in the present step."""
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
                f"batch. Workers that share a batch scale it by the batch's size, and {error}. "
                "Expected batches of one size: choose a batch size that divides the rows, give a "
                "tf.data.Dataset .batch(n, drop_remainder=True), or let the loss be a mean over "
                f"the rows. {_REMEDY}"
            )
            return np.float32(1)

    # -- a train_step of the script's own ---------------------------------------------------------

    def _try_step(self, data: Any) -> None:
        """Reject a train_step whose own code sums the loss over the rows.

        To find a sum over rows in a train_step's own code, the train_step is called with repeated
        rows. The method `_factor` divides every part of the loss that can be scaled by the number
        of repeats. So repeated rows leave the gradients unchanged, unless a part of the loss that
        cannot be scaled is a sum over rows. During the call with repeated rows, no optimizer steps
        and no Keras variable changes.
        """
        trial, before = self._trial, self._data

        def gradients(repeats: int) -> list[Any]:
            self._repeats, self._data = repeats, repeated(data, repeats)
            with (
                running_eagerly(),
                recording(keeps_gradients=True) as recorder,
                keras.StatelessScope(collect_losses=True),
            ):
                trial.train_step(self._data)
            return recorder.gradients

        try:
            self._whole.kind = kind_of_gradients(gradients, rows_of(data))
        finally:
            self._repeats, self._data = None, before
        if self._whole.kind in (RowKind.SUM, RowKind.MIXED):
            method = "compute_loss" if self._trial.is_standard else "train_step"
            verb = "sums its loss" if self._whole.kind is RowKind.SUM else "adds a sum to its loss"
            self._refuse(
                f"the {method} of {self._member.model.name!r} {verb} over the rows of a batch, and "
                "workers that share a batch would step with a part of that sum; expected a mean "
                "over the rows, or a sum that Keras adds up: give compile a loss with "
                'reduction="sum" or call add_loss, and let the train_step call self.compute_loss. '
                f"{_REMEDY}"
            )

    # -- within a graph ---------------------------------------------------------------------------

    def _once(self, part: _Part, decide: Callable[[Any], None], value: Any) -> None:
        """Find out, only once, if a part of the model's loss is a sum over the mini-batch's rows.

        Args:
            part: Part of the model's loss. Its kind is unknown before the first step of a `fit` in
                which the workers divide the script's batches.
            decide: Function that finds the kind of the part of the loss and stores it in `part`.
            value: Nested structure of tensors; `decide` gets this structure with the tensors'
                values.
        """
        if tf.executing_eagerly():
            if not self._is_known(part):
                decide(value)
            return

        def call(values: Any) -> int:
            decide(values)
            return 0

        is_known = tf.numpy_function(lambda: np.bool_(self._is_known(part)), [], tf.bool)
        tf.cond(
            tf.ensure_shape(is_known, []),
            lambda: tf.constant(0),
            lambda: call_with_values(call, value),
        )

    def _is_known(self, part: _Part) -> bool:
        return self._rounds is None or part.kind is not RowKind.UNDECIDED

    def _refuse(self, text: str) -> None:
        """End the `fit` with a ConfigurationError, before the gradient of this step is sent."""
        self._exchange.keep(ConfigurationError(text))


class _CompiledLoss:
    """Wrapper of a loss that `compile` got; scales the loss if workers divide the batches."""

    def __init__(self, loss: Any, name: str, owner: RowSums) -> None:
        self._loss, self._owner, self.name = loss, owner, loss.name
        usual = RowKind.SUM if loss.reduction == "sum" else RowKind.FIXED
        self.part = _Part(f"loss {loss.name!r} of output {name!r}", usual)
        is_mean = _is_of_keras(loss) and loss.reduction not in ("sum", "none", None)
        self._is_mean = is_mean

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = self._loss(y_true, y_pred, sample_weight)
        part = None if self._is_mean else self.part
        scale = _as_it_is(self._owner.scale_compiled)
        return scale(self._loss, part, value, y_true, y_pred, sample_weight)


def _is_of_keras(loss: Any) -> bool:
    """Return True if only Keras' code computes a loss: a value for each row, then a reduction."""
    functions = [type(loss).call, type(loss).__call__]
    if isinstance(loss, LossFunctionWrapper):
        functions.append(loss.fn)
    return all(
        str(getattr(function, "__module__", "")).startswith("keras.") for function in functions
    )


def _added_losses(model: Any) -> list[Any]:
    """Return the losses that layers added in the model's last call, without weight regularizers."""
    layers = model._flatten_layers(include_self=True)
    return [loss for layer in layers for loss in layer._get_own_losses()]


def _is_at_hand(data: Any) -> bool:
    """Return True if a mini-batch's tensors are eager or belong to the graph in progress."""
    if tf.executing_eagerly():
        return True
    graph = tf.compat.v1.get_default_graph()
    leaves = tf.nest.flatten(data, expand_composites=True)
    return all(leaf is None or getattr(leaf, "graph", None) is graph for leaf in leaves)
