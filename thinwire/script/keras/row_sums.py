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
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from absl import logging
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers.data_adapters import data_adapter_utils

from thinwire.ops.types import ConfigurationError
from thinwire.script.backends.present import backend
from thinwire.script.data.place import StepRows
from thinwire.script.data.rows import count_rows
from thinwire.script.keras.exchange import StepExchange
from thinwire.script.keras.row_kinds import RowKind, kinds_of, moved, repeated, rows_of
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.step import recording
from thinwire.script.keras.trial import StepTrial

_REMEDY = (
    "Or give --batch=worker, with which each worker takes batches of the script's size and the "
    "server takes the mean over the workers."
)


@dataclasses.dataclass
class _Part:
    """One part of a model's loss, for example the loss of one output.

    Attributes:
        name: Name of this part of the model's loss, for error messages.
        usual: Kind that is assumed for this part of the loss if `kind` is `UNDECIDED` or `OTHER`
            (no sum and no mean).
        kind: Kind of this part of the loss, a sum or a mean over rows; `UNDECIDED` before it is
            known.
    """

    name: str
    usual: RowKind
    kind: RowKind = RowKind.UNDECIDED

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
        self._parts: list[_Part] = []
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
        # loss of the script's own train_step
        self._whole = self._new_part("train_step", RowKind.FIXED)

    # -- position in the fit ----------------------------------------------------------------------

    def begin_fit(self, rounds: StepRows | None) -> None:
        """Begin a `fit`, and forget which parts of the model's loss are sums over rows.

        Args:
            rounds: Number of rows of all workers in each step; None if workers do not divide the
                script's batches.
        """
        self._rounds = rounds
        for part in self._parts:
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
        if self._adds_losses_itself:
            self._once(self._whole, self._try_step, data)
        backend().note_on_host(self.begin_step, count_rows(data))
        try:
            yield
        finally:
            self._data = None
        backend().note_on_host(self.end_step)

    def begin_step(self, rows: Any) -> None:
        """Begin a step with `rows` rows of this worker; a stateless step's caller calls it."""
        self._rows = None if self._rounds is None else int(rows)

    def end_step(self) -> None:
        """End a step, and count it."""
        self._rows = None
        self._step += 1

    @property
    def needs_trial(self) -> bool:
        """True if a stateless train_step must be tried with a batch, to know its sums over rows."""
        settings = self._member.settings
        if self._rounds is None or settings is None or settings.run.nb_workers == 1:
            return False
        self._watch_losses()
        may_add = any(map(_may_add_losses, self._member.model._flatten_layers()))
        return bool(self._adds_losses_itself or may_add or len(self._parts) > 1)

    def try_losses(self, data: Any) -> None:
        """Find out which parts of the loss are sums over rows, for a stateless train_step.

        The losses of a traced step have no values. So the model's loss is computed once with the
        values of its variables, outside of the step.
        """
        model, self._data = self._member.model, data
        try:
            if self._adds_losses_itself:
                self._once(self._whole, self._try_step, data)
            x, y, weight = data_adapter_utils.unpack_x_y_sample_weight(data)
            (trainable, others, slots, metrics) = backend().state_of(model)[0]
            model.compute_loss_and_updates(
                trainable, others, metrics, x, y, weight, training=True, optimizer_variables=slots
            )
        except Exception as error:  # noqa: BLE001 - a script's model may raise any error
            logging.info("the model's loss cannot be computed outside of its step: %r", error)
        finally:
            self._data = None

    @property
    def _adds_losses_itself(self) -> bool:
        """True if code of the script adds up the loss: its train_step or its compute_loss."""
        compute_loss = getattr(self._member.model.compute_loss, "__func__", None)
        return not (self._trial.is_standard and compute_loss is keras.Model.compute_loss)

    # -- parts of the loss ------------------------------------------------------------------------

    def _new_part(self, name: str, usual: RowKind) -> _Part:
        self._parts.append(_Part(name, usual))
        return self._parts[-1]

    def _watch_losses(self) -> None:
        model = self._member.model
        if "_aggregate_additional_loss" not in vars(model):
            alone = model._aggregate_additional_loss
            aggregate = functools.partial(self._aggregate, alone)
            model._aggregate_additional_loss = backend().unconverted(aggregate)
        if (compile_loss := getattr(model, "_compile_loss", None)) is not None:
            self._watch(compile_loss)

    def _watch(self, compile_loss: Any) -> None:
        """Wrap each loss that `compile` got and that may be a sum, once Keras has built the losses.

        A loss of Keras is a mean over the rows if its `reduction` does not show otherwise.
        """
        if not compile_loss.built:
            if "build" not in vars(compile_loss):
                build = compile_loss.build

                def build_watched(y_true: Any, y_pred: Any) -> None:
                    build(y_true, y_pred)
                    self._watch(compile_loss)

                compile_loss.build = build_watched
            return
        for number, entry in enumerate(compile_loss._flat_losses):
            loss = entry.loss
            if isinstance(loss, _CompiledLoss):
                continue
            if loss.reduction in ("sum", "none", None) or not _is_of_keras(loss):
                usual = RowKind.SUM if loss.reduction == "sum" else RowKind.FIXED
                part = self._new_part(f"loss {loss.name!r} of output {entry.name!r}", usual)
                watched = _CompiledLoss(loss, part, self)
                compile_loss._flat_losses[number] = entry._replace(loss=watched)

    def scale_compiled(self, watched: _CompiledLoss, value: Any, arguments: Any) -> Any:
        """Return the value of a compiled loss, scaled if the value is a sum over a batch's rows.

        Args:
            watched: Loss of Keras or of the script, and the part of the model's loss to which its
                value belongs.
            value: Value of the loss: a scalar, or one value for each row.
            arguments: Target values, predictions and sample weights (None without weights) with
                which the loss was called.
        """
        part = watched.part
        if self._data is None:
            return value
        if len(value.shape):
            self._once(part, lambda arguments: self._refuse_rows(part), arguments)
            return value

        def decide(arguments: Any) -> None:
            def evaluate(is_moved: bool, repeats: int) -> list[float]:
                y, y_pred, sample_weight = repeated(arguments, repeats)
                if is_moved:
                    y_pred = keras.tree.map_structure(moved, y_pred)
                # a tf.function would need a second TensorFlow thread to compute eagerly
                with backend().run_eagerly():
                    return [float(watched.loss(y, y_pred, sample_weight))]

            attempts = (functools.partial(evaluate, is_moved) for is_moved in (False, True))
            kinds = kinds_of(rows_of(arguments), *attempts)
            self._decide(part, kinds[0] if kinds else RowKind.OTHER)

        self._once(part, decide, arguments)
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
        added = enumerate(_added_losses(self._member.model))
        found = next(((number, layer) for number, (layer, own) in added if own is loss), None)
        # a weight regularizer needs no scaling, because it is equal on all workers
        if found is None:
            return total
        position, layer = found
        if position not in self._added:
            is_by_row = len(loss.shape) > 0 and loss.shape[0] == rows_of(self._data)
            usual = RowKind.SUM if is_by_row else RowKind.FIXED
            name = f"value that layer {layer.name!r} adds to the loss"
            self._added[position] = self._new_part(name, usual)
        part = self._added[position]
        if backend().is_at_hand(self._data):
            self._once(part, self._decide_added, self._data)
        return self._scaled(part, total)

    def _decide_added(self, data: Any) -> None:
        """Find out which losses added by the model's layers are sums over the rows."""
        model = self._member.model
        x, _, _ = data_adapter_utils.unpack_x_y_sample_weight(data)
        training = {"training": True} if model._call_has_training_arg else {}

        def evaluate(is_moved: bool, repeats: int) -> list[float]:
            variables = model.trainable_variables if is_moved else []
            values = [(variable, moved(variable.value)) for variable in variables]
            with backend().run_eagerly(), keras.StatelessScope(values, collect_losses=True):
                model(repeated(x, repeats), **training)
                return [float(keras.ops.sum(added)) for _, added in _added_losses(model)]

        attempts = (functools.partial(evaluate, is_moved) for is_moved in (False, True))
        kinds = dict(enumerate(kinds_of(rows_of(x), *attempts)))
        for position, part in self._added.items():
            self._decide(part, kinds.get(position, RowKind.OTHER))

    def _decide(self, part: _Part, kind: RowKind) -> None:
        """Store if a part of the loss is a sum or a mean; reject a part that cannot be scaled."""
        part.kind = kind
        if kind is RowKind.MIXED:
            self._refuse(
                f"the {part.name} of {self._member.model.name!r} adds a sum over the rows of a "
                "batch to a mean over the rows, and workers that share a batch scale only sums; "
                "expected a sum or a mean. Make it two losses, or divide the sum by the number of "
                f"rows. {_REMEDY}"
            )
        elif kind is RowKind.OTHER:
            logging.info("the %s is neither a sum nor a mean over batch rows", part.name)

    def _scaled(self, part: _Part, value: Any) -> Any:
        factor = backend().host_number(functools.partial(self._factor, part))
        return value * keras.ops.cast(factor, value.dtype)

    def _factor(self, part: _Part) -> float:
        """Return the factor by which a part of the loss is multiplied in the present step."""
        if not part.is_sum:
            return 1.0
        if self._repeats is not None:
            return 1 / self._repeats
        if self._rounds is None or not self._rows:
            return 1.0
        try:
            return self._rounds.num_rows(self._step, self._rows) / self._rows
        except ConfigurationError as error:
            self._refuse(
                f"the {part.name} of {self._member.model.name!r} is a sum over the rows of a "
                f"batch. Workers that share a batch scale it by the batch's size, and {error}. "
                "Expected batches of one size: choose a batch size that divides the rows, give a "
                "tf.data.Dataset .batch(n, drop_remainder=True), or let the loss be a mean over "
                f"the rows. {_REMEDY}"
            )
            return 1.0

    # -- a train_step of the script's own ---------------------------------------------------------

    def _try_step(self, data: Any) -> None:
        """Reject a train_step whose own code sums the loss over the rows.

        To find a sum over rows in a train_step's own code, the train_step is called with repeated
        rows. The method `_factor` divides every part of the loss that can be scaled by the number
        of repeats. So repeated rows leave the gradients unchanged, unless a part of the loss that
        cannot be scaled is a sum over rows. During the call with repeated rows, no optimizer steps
        and no Keras variable changes.
        """
        before = self._data

        def gradient(repeats: int) -> list[Any]:
            self._repeats, self._data = repeats, repeated(data, repeats)
            with (
                backend().run_eagerly(),
                recording() as calls,
                keras.StatelessScope(collect_losses=True),
            ):
                self._trial.call(self._data)
            gradients = (g for _, pairs in calls for g, _ in pairs if g is not None)
            dense = (keras.ops.convert_to_numpy(backend().dense(g)) for g in gradients)
            parts = [np.ravel(gradient) for gradient in dense]
            return [np.concatenate(parts, dtype=np.float64) if parts else np.zeros(0)]

        try:
            kinds = kinds_of(rows_of(data), gradient)
        finally:
            self._repeats, self._data = None, before
        self._whole.kind = kinds[0] if kinds else RowKind.OTHER
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

    def _once(self, part: _Part, decide: Callable[[Any], None], value: Any) -> None:
        """Find out, only once, if a part of the model's loss is a sum over the mini-batch's rows.

        Args:
            part: Part of the model's loss. Its kind is unknown before the first step of a `fit` in
                which the workers divide the script's batches.
            decide: Function that finds the kind of the part of the loss and stores it in `part`.
            value: Nested structure of tensors; `decide` gets this structure with the tensors'
                values.
        """

        def is_known() -> bool:
            return self._rounds is None or part.kind is not RowKind.UNDECIDED

        backend().call_until(is_known, decide, value)

    def _refuse(self, text: str) -> None:
        """End the `fit` with a ConfigurationError, before the gradient of this step is sent."""
        self._exchange.keep(ConfigurationError(text))


@dataclasses.dataclass
class _CompiledLoss:
    """Wrapper of a loss that `compile` got; scales the loss if workers divide the batches."""

    loss: Any
    part: _Part
    sums: RowSums

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        value = self.loss(y_true, y_pred, sample_weight)
        scale = backend().unconverted(self.sums.scale_compiled)
        return scale(self, value, (y_true, y_pred, sample_weight))


def _is_of_keras(loss: Any) -> bool:
    """Return True if only Keras' code computes a loss: a value for each row, then a reduction."""
    functions = [type(loss).call, type(loss).__call__]
    if isinstance(loss, LossFunctionWrapper):
        functions.append(loss.fn)
    return all(
        str(getattr(function, "__module__", "")).startswith("keras.") for function in functions
    )


def _added_losses(model: Any) -> list[tuple[Any, Any]]:
    """Return pairs (layer, loss that it added in the model's last call) without regularizers."""
    layers = model._flatten_layers()
    losses, scope = model._losses_override, get_stateless_scope()
    if losses and not (scope is not None and scope.collect_losses):
        # A stateless step has collected the losses before it adds them up.
        return [(layer, loss) for layer in layers for loss in losses if id(loss) in layer._loss_ids]
    return [(layer, loss) for layer in layers for loss in layer._get_own_losses()]


def _may_add_losses(layer: Any) -> bool:
    """Return True if a layer may call add_loss: one of the script, or an activity regularizer."""
    is_of_script = not type(layer).__module__.startswith("keras.")
    return is_of_script or getattr(layer, "activity_regularizer", None) is not None
