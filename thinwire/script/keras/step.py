"""Replaces an optimizer's `apply` by an exchange with the servers, in a graph or eagerly.

Instead of an optimizer's step, the gradients are pushed to the parameter server and the new weights
are pulled. The optimizer remains the script's own object, so callbacks and saving work as without
Thinwire. Only the methods `apply`, `scale_loss` and `finalize_variable_values` of the optimizer
object are replaced.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

from thinwire.script.keras.held_weights import Assignments
from thinwire.script.keras.plan import Calls, Pairs
from thinwire.script.keras.traces import (
    have_values,
    refuse_compiling,
    refuse_first_trace,
    trace_without_xla,
)

if TYPE_CHECKING:
    from thinwire.ops.types import Float32
    from thinwire.script.keras.clock import RunClock
    from thinwire.script.session import Session


class _ThreadState(threading.local):
    """One thread's state: whether optimizers may step, and the recorded calls.

    Attributes:
        calls: Calls of optimizers, recorded while a train_step is tried; None outside
            of such a trial.
        is_allowed: True while optimizers may step without a check, for example because an
            `ExchangeStep` calls the optimizer.
    """

    calls: list[tuple[Any, Pairs]] | None = None
    is_allowed = False


_LOCAL = _ThreadState()
#: Objects that own shared variables, and check the steps of optimizers that are not part of their
#: run.
_WATCHERS: weakref.WeakSet[StepOwner] = weakref.WeakSet()


def watch_steps(watcher: StepOwner) -> None:
    """Check every Keras optimizer before it steps, and record the script's assignments.

    Args:
        watcher: Object that owns shared variables, to which the process holds only a weak
            reference.
    """
    _WATCHERS.add(watcher)
    _guard_optimizers()
    _record_assignments()
    trace_without_xla()


@contextlib.contextmanager
def recording() -> Iterator[Calls]:
    """Record all optimizer calls of this thread in the `with` block, where no optimizer steps."""
    before, _LOCAL.calls = _LOCAL.calls, []
    try:
        yield _LOCAL.calls
    finally:
        _LOCAL.calls = before


@contextlib.contextmanager
def steps_allowed() -> Iterator[None]:
    """In the `with` block, let this thread's optimizers step without a check or an exchange."""
    before, _LOCAL.is_allowed = _LOCAL.is_allowed, True
    try:
        yield
    finally:
        _LOCAL.is_allowed = before


@functools.cache
def _guard_optimizers() -> None:
    """Patch all Keras optimizer classes to check each of their steps first, once per process."""
    optimizers = keras.optimizers
    for kind in (optimizers.Optimizer, optimizers.LossScaleOptimizer, optimizers.MultiOptimizer):
        kind.apply = _guarded(kind.apply)


@functools.cache
def _record_assignments() -> None:
    """Patch Keras' variable class to record the script's assignments, once per process."""
    alone = keras.Variable.assign

    @functools.wraps(alone)
    def assign(variable: Any, value: Any) -> Any:
        watchers = [] if _LOCAL.is_allowed or _LOCAL.calls is not None else list(_WATCHERS)
        assignment_records = [watcher.assignments_to(variable) for watcher in watchers]
        recorders = [record for record in assignment_records if record is not None]
        before = tf.convert_to_tensor(variable.value) if recorders else None
        result = alone(variable, value)
        for recorder in recorders:
            recorder.record(variable, before)
        return result

    keras.Variable.assign = tf.autograph.experimental.do_not_convert(assign)


def _guarded(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def guarded(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if _LOCAL.is_allowed:
            return apply(optimizer, grads, trainable_variables)
        variables = trainable_variables
        if variables is None:
            variables = inner(optimizer)._trainable_variables
        variables, grads = list(variables), list(grads)
        if _LOCAL.calls is not None:
            _LOCAL.calls.append((optimizer, list(zip(grads, variables, strict=True))))
            return None
        for watcher in tuple(_WATCHERS):
            watcher.refuse_step(optimizer, variables)
        with steps_allowed():
            return apply(optimizer, grads, trainable_variables)

    return guarded


class StepValues(NamedTuple):
    """Values of a training step before its exchange: tensors in the graph, arrays in Python.

    Attributes:
        pushed: [num_parameters] float32 gradient, or weights if the optimizer updates them on this
            worker. In Python, the array is a view of TensorFlow's memory.
        rows: Number of examples in the mini-batch of the step.
        statistics: [m] float32 moving statistics (of BatchNormalization) after the step.
        rate: Learning rate of the optimizer, which a callback may have changed.
        scale: Loss scale by which the loss was multiplied; 0 if the loss is not scaled, or if the
            optimizer itself unscales the gradients.
        held: [num_parameters] float32 weights of the model if `pushed` is a gradient; an empty
            array if `pushed` are the weights.
        loss: [1] float32 mean loss of the mini-batch; an empty array if the loss is unknown.
        has_stepped: False if an optimizer on this worker skipped the step, because its scaled
            gradients overflowed.
        has_assigned: True if the script has set weights itself and `pushed` are weights.
        touched: Index of a shared variable with a sparse gradient (IndexedSlices) -> row numbers
            of the gradient, unordered and with duplicates.
    """

    pushed: Any
    rows: Any
    statistics: Any
    rate: Any
    scale: Any
    held: Any
    loss: Any
    has_stepped: Any
    has_assigned: Any
    touched: Mapping[int, Any]


class StepAnswer(NamedTuple):
    """Values with which the next step starts: arrays in Python, tensors in the graph.

    Attributes:
        weights: [num_parameters] float32 weights.
        statistics: [m] float32 moving statistics.
        rate: Learning rate, float32.
        scale: Loss scale, float32.
        counts: [k] int64 batch counts of all learning-rate schedules.
    """

    weights: Any
    statistics: Any
    rate: Any
    scale: Any
    counts: Any


#: Data types of the fields of `StepAnswer`.
_TYPES = (tf.float32, tf.float32, tf.float32, tf.float32, tf.int64)


def _exchange_in_python(
    exchange: Callable[[StepValues], StepAnswer], values: StepValues
) -> StepAnswer:
    """Call a Python function with the values of a step as arrays, from a graph or eagerly."""
    # The function below lives as long as the graph. It must not refer to the graph's tensors,
    # because the graph would then be freed only by a garbage collection.
    numbers, num_passed = tuple(values.touched), len(values) - 1

    def call(*arrays: Any) -> StepAnswer:
        touched = dict(zip(numbers, arrays[num_passed:], strict=True))
        return exchange(StepValues._make([*arrays[:num_passed], touched]))

    tensors = [*values[:num_passed], *values.touched.values()]
    return StepAnswer(*tf.numpy_function(call, tensors, _TYPES))


class StepOwner(Protocol):
    """Interface of the object that exchanges a model's steps; implemented by `ModelSession`.

    Attributes:
        call: Data of the current train_step, or of a whole training loop: rows, loss, optimizers.
        exchange: Function that pushes a step's values and returns the pulled values: the method
            `exchange` of `StepExchange`.
        raise_failure: Function that raises the error that an exchange has stored, if there is one.
    """

    call: StepCall
    exchange: Callable[[ExchangeStep, bool, bool, StepValues], StepAnswer]
    raise_failure: Callable[[], None]

    @property
    def joined(self) -> Session:
        """The session with the servers."""

    @property
    def takes_momentum(self) -> bool:
        """True if the training method, not the optimizer, applies the momentum of SGD."""

    @property
    def clocks(self) -> Sequence[RunClock | None]:
        """For each optimizer, the run's batch count for its rate schedule; None if not used."""

    @property
    def assignments(self) -> Assignments:
        """Record of the script's own assignments to shared variables."""

    def ends_fit(self) -> bool:
        """Leave the run after the last step of a `fit`.

        Returns:
            True if the optimizer has the moving averages of this run.
        """

    def begin_step(self, step: ExchangeStep, pairs: Pairs) -> bool:
        """Join the run at the first step, and check which variables the optimizer updates.

        Args:
            step: Object that replaces the optimizer that is about to step.
            pairs: Pairs (gradient, variable) with which the script calls the optimizer.

        Returns:
            True if joining the run has not changed the weights, so that gradients which were
            computed before the call are still valid.
        """

    def refuse_step(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Raise ConfigurationError if an optimizer outside of the run updates a shared variable."""

    def assignments_to(self, variable: Any) -> Assignments | None:
        """Return the record of a script's assignments to a Keras variable; None without a record.

        Raises:
            ConfigurationError: An assignment to the variable would be lost during training.
        """


class WeightsChanged(Exception):
    """Raised if joining the run has replaced the weights at which a gradient was computed."""


class StepCall:
    """Data that one call of a train_step, or a whole training loop, keeps for its exchanges.

    Attributes:
        rows: Number of examples in the mini-batch: a scalar tensor, or 1 in a script's own training
            loop.
        ends_later: True in a train_step, which sends the local steps of several optimizers together
            at its end. False in a script's own training loop.
        loss: Loss of the mini-batch; None if it is not computed yet, or was already sent.
        applied: Replacements (`ExchangeStep`) of those optimizers that have stepped, in the order
            of the optimizers' steps.
    """

    def __init__(self, rows: Any, ends_later: bool) -> None:
        self.rows, self.ends_later = rows, ends_later
        self.loss: Any = None
        self.applied: list[ExchangeStep] = []

    def note(self, step: ExchangeStep) -> bool:
        """Record that an optimizer has stepped in the present call of the train_step.

        Returns:
            True if an earlier step has used the same mini-batch.
        """
        repeats = bool(self.applied) and (self.ends_later or step is not self.applied[0])
        if self.ends_later or step not in self.applied:
            self.applied.append(step)
        return repeats


class ExchangeStep:
    """Replaces the step of one optimizer by an exchange with the servers.

    The optimizer itself still updates the variables that the workers do not share.

    Attributes:
        optimizer: The script's optimizer, or the LossScaleOptimizer that Keras put around it.
        number: Position of the optimizer in the offer (the model's description for the PS), from 0.
        known_rate: Learning rate of the optimizer that was last compiled, loaded from the run, or
            sent to the PS. If the optimizer has a different rate, the script has set it.
        clock: Batch count of the run at which the optimizer's learning-rate schedule is evaluated;
            None if the optimizer has no schedule, or evaluates it at its own step count.
    """

    def __init__(self, optimizer: Any, owner: StepOwner) -> None:
        """Replace `apply`, `scale_loss` and `finalize_variable_values` of the optimizer object."""
        self.optimizer, self.number = optimizer, 0
        self.clock: RunClock | None = None
        self._owner = owner
        self._apply_alone, self._scale_alone = optimizer.apply, optimizer.scale_loss
        self._finalize_alone = optimizer.finalize_variable_values
        # Prevents AutoGraph from converting Thinwire's code within a `tf.function` of the script.
        unconverted = tf.autograph.experimental.do_not_convert
        optimizer.apply, optimizer.scale_loss = (
            unconverted(self._apply),
            unconverted(self._scale_loss),
        )
        optimizer.finalize_variable_values = self._finalize
        self.known_rate = 0.0 if self.rate is None else float(self.rate.numpy())

    @property
    def rate(self) -> Any:
        """The optimizer's learning-rate variable; None if the rate is a schedule or function.

        Callbacks and scripts set the learning rate by an assignment to this variable of the
        optimizer.
        """
        rate = self.inner._learning_rate
        return rate if isinstance(rate, keras.Variable) else None

    @property
    def state(self) -> list[Any]:
        """All variables of the optimizer except the learning rate."""
        rate = self.rate
        return [variable for variable in self.optimizer.variables if variable is not rate]

    @property
    def has_schedule(self) -> bool:
        """True if the optimizer's learning rate is a schedule, a function of a step count."""
        schedule = keras.optimizers.schedules.LearningRateSchedule
        return isinstance(self.inner._learning_rate, schedule)

    def assign_rate(self, rate: float) -> None:
        """Write a learning rate to the optimizer's variable, which callbacks read."""
        if self.rate is not None:
            self.rate.assign(rate)

    def adopt_rate(self, rate: float) -> None:
        """Write the server's learning rate to the optimizer's variable."""
        self.known_rate = rate
        self.assign_rate(rate)

    @property
    def inner(self) -> Any:
        """The optimizer without the LossScaleOptimizer around it."""
        return inner(self.optimizer)

    def build(self, variables: Sequence[Any]) -> None:
        """Create the optimizer's variables (moments and others) if they do not exist yet."""
        if variables and not self.optimizer.built:
            self.optimizer.build(list(variables))

    def _finalize(self, var_list: Any) -> None:
        """Leave the run at `fit`'s end; let the optimizer write its moving averages to the weights.

        Keras calls `finalize_variable_values`, which `_finalize` replaces, at the end of `fit`. The
        optimizer writes its moving averages to the weights only if the optimizer has the moving
        averages of the run.
        """
        if self._owner.ends_fit():
            self._finalize_alone(var_list)

    def _scale_loss(self, loss: Any) -> Any:
        """Store the mini-batch's loss, which the next exchange reports; return the scaled loss."""
        if _LOCAL.calls is None:
            self._owner.call.loss = loss
        return self._scale_alone(loss)

    def _apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Push gradients instead of the optimizer's step, or step and then exchange weights."""
        owner, variables = self._owner, trainable_variables
        if variables is None:
            variables = self.inner._trainable_variables
        pairs = list(zip(grads, variables, strict=True))
        if _LOCAL.calls is not None:
            _LOCAL.calls.append((self.optimizer, pairs))
            return
        is_eager = tf.executing_eagerly()
        if not is_eager:
            refuse_compiling()
            if not have_values(variables):
                # The variables have no values in the first trace of a step, so the trace exchanges
                # nothing. The optimizer's variables are created in it, because TensorFlow forbids a
                # later trace to create variables. TensorFlow traces the function again before it
                # executes the function.
                self.build(variables)
                tf.numpy_function(refuse_first_trace, [], [])
                return
        with tf.init_scope():
            # A graph computes its gradients when it is executed, which is at the weights after
            # joining the run. Only an eager gradient can be computed before the worker has joined
            # the run.
            is_valid = owner.begin_step(self, pairs) or not is_eager
        if not is_valid and owner.call.ends_later:
            raise WeightsChanged
        session = owner.joined
        if not is_valid:
            # joining the run has changed the gradient's weights, so the worker pushes no update
            owner.call.note(self)
            flat = session.variables
            values = flat.joined() if session.takes_weights else tf.zeros([flat.size])
            self._exchange(values, [], tf.constant(0))
        elif session.takes_weights:
            with self._as_a_worker():
                self._step_alone(self._pulled_to_base(pairs))
            owner.call.note(self)
            if not owner.call.ends_later:
                self.exchange_weights()
        else:
            self._send_gradients(pairs)

    def exchange_weights(self) -> None:
        """Exchange weights with the servers, after optimizers have stepped on this worker."""
        owner = self._owner
        self._exchange(owner.joined.variables.joined(), [], owner.call.rows)

    def _step_alone(self, pairs: Pairs) -> None:
        with steps_allowed():
            self._apply_alone(*zip(*pairs, strict=True))

    def _pulled_to_base(self, pairs: Pairs) -> Pairs:
        """Add mu (w - b), the gradient of FedProx's mu / 2 |w - b|^2, to gradients.

        In the formula of FedProx, mu is the coefficient, w the weights of a shared variable, and b
        these weights at the start of the round of local steps. FedProx's gradient is multiplied by
        the loss scale, because the optimizer divides all gradients by the loss scale.
        """
        session = self._owner.joined
        mu, flat = session.settings.run.method.local.prox_mu, session.variables
        if not mu:
            return pairs
        base = tf.numpy_function(self._round_base, [], tf.float32)
        starts = {id(variable): b for variable, b in flat.parts(tf.ensure_shape(base, [flat.size]))}
        pulled = []
        for gradient, variable in pairs:
            if gradient is not None and id(variable) in starts:
                pull = self._scale_alone(mu * (variable.value - starts[id(variable)]))
                gradient = tf.convert_to_tensor(gradient) + tf.cast(pull, gradient.dtype)
            pulled.append((gradient, variable))
        return pulled

    def _round_base(self) -> Float32:
        """Return a copy of the shared weights from the start of the round of local steps."""
        return self._owner.joined.part.core.base.copy()

    def _send_gradients(self, pairs: Pairs) -> None:
        """Push the gradients of shared variables; let the optimizer update all other variables."""
        by_variable = {id(variable): gradient for gradient, variable in pairs}
        shared = self._owner.joined.shared.variables
        sent = [by_variable.pop(id(variable), None) for variable in shared]
        unshared = [(g, v) for g, v in pairs if id(v) in by_variable and g is not None]
        flat = [
            flat_gradient(gradient, variable)
            for gradient, variable in zip(sent, shared, strict=True)
        ]
        call = self._owner.call
        repeats = call.note(self)
        self._exchange(tf.concat(flat, 0), sent, call.rows, repeats)
        if unshared:
            self._step_alone(unshared)
        else:
            with steps_allowed():
                self.inner._iterations.assign_add(1)

    def _exchange(
        self, values: Any, gradients: Sequence[Any], rows: Any, repeats: bool = False
    ) -> None:
        """Push gradients, or weights after a local step, and assign the pulled weights.

        Args:
            values: [num_parameters] float32 gradient, or weights after a local step.
            gradients: Gradients from which `values` was made, whose sparse rows are needed; empty
                if `values` are weights.
            rows: Number of training examples from which the gradients or the local step were
                computed.
            repeats: True if an earlier exchange has already counted the `rows` examples.
        """
        owner, rate, scale = self._owner, self.rate, self._scale
        session, call = owner.joined, owner.call
        flat, statistics = session.variables, session.statistics
        loss, call.loss = call.loss, None
        takes_weights, nothing = session.takes_weights, tf.zeros([0])
        used_scale = tf.constant(0.0)
        if scale is not None:
            used_scale = tf.cast(scale.value, tf.float32)
            values = values / used_scale
        if loss is not None:
            loss = tf.reshape(tf.reduce_mean(tf.cast(loss, tf.float32)), [1])
        touched = {number: _touched(gradient) for number, gradient in enumerate(gradients)}
        clocks = list(owner.clocks)
        sent = StepValues(
            pushed=values,
            rows=tf.cast(rows, tf.int64),
            statistics=statistics.joined(),
            rate=tf.constant(0.0) if rate is None else tf.cast(rate.value, tf.float32),
            scale=used_scale,
            held=nothing if takes_weights else flat.joined(),
            loss=nothing if loss is None else loss,
            has_stepped=self._has_stepped(clocks),
            has_assigned=owner.assignments.has_any if takes_weights else tf.constant(False),
            touched={number: rows for number, rows in touched.items() if rows is not None},
        )
        in_turn = takes_weights and not call.ends_later
        exchange = functools.partial(owner.exchange, self, repeats, in_turn)
        try:
            answer = _exchange_in_python(exchange, sent)
        except tf.errors.OpError:  # the error of an eager step, whose cause is stored
            owner.raise_failure()
            raise
        flat.assign(tf.ensure_shape(answer.weights, [flat.size]))
        statistics.assign(tf.ensure_shape(answer.statistics, [statistics.size]))
        if rate is not None:
            rate.assign(tf.reshape(answer.rate, []))
        if scale is not None:
            with steps_allowed():
                scale.assign(tf.reshape(answer.scale, []))
        counts = tf.ensure_shape(answer.counts, [len(clocks)])
        for number, clock in enumerate(clocks):
            if clock is not None:
                clock.variable.assign(tf.cast(counts[number], clock.variable.dtype))

    def _has_stepped(self, clocks: Sequence[RunClock | None]) -> Any:
        """Return a bool tensor: False if the optimizer skipped a step with overflowed gradients."""
        is_scaled = isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)
        clock = clocks[self.number] if is_scaled and self._owner.joined.takes_weights else None
        if clock is None:
            return tf.constant(True)
        count = tf.identity(self.inner._iterations.value)
        has_stepped = tf.not_equal(count, clock.own.value)
        clock.own.assign(count)
        return has_stepped

    @property
    def _scale(self) -> Any:
        """The optimizer's variable of the loss scale, if the server sets the scale; else None.

        A fixed `loss_scale_factor` of an optimizer is not kept in a variable: the optimizer itself
        divides the gradients by the factor.
        """
        is_scaled = isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)
        by_server = is_scaled and not self._owner.joined.takes_weights
        return self.optimizer.dynamic_scale if by_server else None

    def assign_scale(self, scale: float) -> None:
        """Scale the next losses by the server's loss scale; 0 keeps the present loss scale."""
        if self._scale is not None and scale:
            with steps_allowed():
                self._scale.assign(scale)

    def assign_streak(self, streak: int) -> None:
        """Set the LossScaleOptimizer's count of steps without overflow to the server's count."""
        if self._scale is not None:
            with steps_allowed():
                self.optimizer.step_counter.assign(streak)

    @contextlib.contextmanager
    def _as_a_worker(self) -> Iterator[None]:
        """Set SGD's momentum to 0 in the `with` block if the training method applies momentum."""
        optimizer = self.inner
        if not self._owner.takes_momentum:
            yield
            return
        momentum, optimizer.momentum = optimizer.momentum, 0.0
        try:
            yield
        finally:
            optimizer.momentum = momentum


def inner(optimizer: Any) -> Any:
    """Return the optimizer inside a LossScaleOptimizer, or the optimizer itself."""
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if is_scaled else optimizer


def _touched(gradient: Any) -> Any:
    """Return a sparse gradient's row numbers, with duplicates; None for a dense gradient."""
    return tf.cast(gradient.indices, tf.int64) if isinstance(gradient, tf.IndexedSlices) else None


def flat_gradient(gradient: Any, variable: Any) -> Any:
    """Return a gradient as a float32 vector, which has only zeros if the gradient is None."""
    if gradient is None:
        return tf.zeros([int(np.prod(variable.shape))], tf.float32)
    return tf.reshape(tf.cast(tf.convert_to_tensor(gradient), tf.float32), [-1])
