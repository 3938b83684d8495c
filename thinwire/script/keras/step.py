"""What stands in the place of an optimizer's `apply`, within the graph of a step or eagerly.

Where the optimizer would step, the gradients go to the parameter server and its weights come back.
The optimizer object stays the script's own, for callbacks and for saving; only three of its methods
are replaced, on this one instance.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from thinwire.ops.optimizers.described import own_schedule
from thinwire.script.keras.assignments import Assignments
from thinwire.script.keras.plan import Pairs, StepRecorder
from thinwire.script.keras.traces import (
    have_values,
    refuse_compiling,
    refuse_first_trace,
    trace_without_xla,
)

if TYPE_CHECKING:
    from thinwire.models.flat_model import FlatVariables
    from thinwire.ops.types import Float32
    from thinwire.script.keras.clock import RunClock


class _ThreadState(threading.local):
    """What the steps of one thread are subject to.

    Attributes:
        recorder: Stands in the place of all optimizers, while a step is tried.
        is_allowed: Whether an optimizer steps on behalf of one of ours.
    """

    recorder: StepRecorder | None = None
    is_allowed = False


_LOCAL = _ThreadState()
#: Those who watch over variables that no other optimizer may step.
_WATCHERS: weakref.WeakSet[StepWatcher] = weakref.WeakSet()


class StepWatcher(Protocol):
    """Whoever has variables that only optimizers of theirs may step."""

    def refuse_step(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Raise ConfigurationError if an optimizer that is not theirs steps one of them."""

    def assignments_to(self, variable: Any) -> Assignments | None:
        """Return what adds up the script's own assignments to a variable; None: nothing does.

        Raises:
            ConfigurationError: An assignment to this variable would be lost.
        """


def watch_steps(watcher: StepWatcher) -> None:
    """Let every optimizer of Keras that steps by itself be checked before, from now on.

    Assignments of the script to variables are recorded.
    """
    _WATCHERS.add(watcher)
    _guard_optimizers()
    _record_assignments()
    trace_without_xla()


@contextlib.contextmanager
def recording(keeps_gradients: bool = False) -> Iterator[StepRecorder]:
    """Let no optimizer step in this thread, and record what each is given."""
    before, _LOCAL.recorder = _LOCAL.recorder, StepRecorder(keeps_gradients)
    try:
        yield _LOCAL.recorder
    finally:
        _LOCAL.recorder = before


@contextlib.contextmanager
def steps_allowed() -> Iterator[None]:
    """Let optimizers step by themselves in this thread."""
    before, _LOCAL.is_allowed = _LOCAL.is_allowed, True
    try:
        yield
    finally:
        _LOCAL.is_allowed = before


@functools.cache
def _guard_optimizers() -> None:
    """Let every optimizer of Keras be checked before it steps, once for the process."""
    optimizers = keras.optimizers
    for kind in (optimizers.Optimizer, optimizers.LossScaleOptimizer, optimizers.MultiOptimizer):
        kind.apply = _guarded(kind.apply)


@functools.cache
def _record_assignments() -> None:
    """Let assignments to Keras' variables be recorded, once for the process."""
    alone = keras.Variable.assign

    @functools.wraps(alone)
    def assign(variable: Any, value: Any) -> Any:
        watchers = [] if _LOCAL.is_allowed or _LOCAL.recorder is not None else list(_WATCHERS)
        found = [each.assignments_to(variable) for each in watchers]
        recorders = [each for each in found if each is not None]
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
        if _LOCAL.recorder is not None:
            _LOCAL.recorder.record(optimizer, list(zip(grads, variables, strict=True)))
            return None
        for watcher in tuple(_WATCHERS):
            watcher.refuse_step(optimizer, variables)
        with steps_allowed():
            return apply(optimizer, grads, trainable_variables)

    return guarded


class StepOwner(Protocol):
    """What a step needs of the worker behind the model; `thinwire.script.keras.session` has it."""

    @property
    def variables(self) -> list[Any]:
        """The shared variables, in order."""

    @property
    def flat_variables(self) -> FlatVariables:
        """The same as one vector."""

    @property
    def flat_statistics(self) -> FlatVariables:
        """The moving statistics that are averaged over the workers; may be empty."""

    @property
    def takes_weights(self) -> bool:
        """Whether the script's optimizers step here, and weights are exchanged, not gradients."""

    @property
    def takes_momentum(self) -> bool:
        """Whether the method has taken an SGD's momentum over."""

    @property
    def prox_mu(self) -> float:
        """The mu of FedProx, for steps that are made here; 0: none."""

    def round_base(self) -> Float32:
        """Return the shared weights that the round of local steps began at; a copy."""

    @property
    def clocks(self) -> Sequence[RunClock | None]:
        """The clock of each optimizer's schedule; None: it has none, or reads its own count."""

    @property
    def call(self) -> StepCall:
        """What is known of the call of a step that is under way."""

    @property
    def assignments(self) -> Assignments:
        """Of the script, to shared variables."""

    def ends_fit(self) -> bool:
        """Leave after the last step; return whether the optimizer's averages are of this run."""

    def begin_step(self, step: ExchangeStep, pairs: Pairs) -> bool:
        """Join at the first step, and check what each is given.

        Returns:
            Whether gradients that were computed before are of use: the weights are the same.
        """

    def exchange(
        self, step: ExchangeStep, repeats: bool, in_turn: bool, *values: Any
    ) -> tuple[Any, ...]:
        """Exchange one step's values, as `ExchangeStep` gives them; return the answer."""

    def raise_failure(self) -> None:
        """Raise what went wrong in an exchange."""


class WeightsChanged(Exception):
    """Joining brought other weights than those that a gradient was computed at."""


class StepCall:
    """One call of a train_step, or an endless one of a loop: what its exchanges have in common.

    Attributes:
        rows: Examples of its mini-batch, a scalar tensor.
        ends_later: Whether the weights of all its local steps are exchanged together at its end.
        loss: Of the mini-batch, as far as it is known.
        applied: The optimizers that have stepped, one entry for each step.
    """

    def __init__(self, rows: Any, ends_later: bool) -> None:
        self.rows, self.ends_later = rows, ends_later
        self.loss: Any = None
        self.applied: list[ExchangeStep] = []

    def note(self, step: ExchangeStep) -> bool:
        """Note that an optimizer steps; return whether another step had this mini-batch before."""
        repeats = bool(self.applied) and (self.ends_later or step is not self.applied[0])
        if self.ends_later or step not in self.applied:
            self.applied.append(step)
        return repeats


class ExchangeStep:
    """Stands in for one optimizer.

    Variables that are not shared are stepped by the optimizer itself.

    Attributes:
        optimizer: The script's; a LossScaleOptimizer where Keras put one around it.
        number: Among the optimizers of the script, as the PS counts them.
        known_rate: Its learning rate as last written here, or compiled, or sent.
    """

    def __init__(self, optimizer: Any, session: StepOwner) -> None:
        """Take the place of three of `optimizer`'s methods."""
        self.optimizer, self.number = optimizer, 0
        self._session = session
        self._apply_alone, self._scale_alone = optimizer.apply, optimizer.scale_loss
        self._finalize_alone = optimizer.finalize_variable_values
        as_it_is = tf.autograph.experimental.do_not_convert  # in a loop's tf.function
        optimizer.apply, optimizer.scale_loss = as_it_is(self._apply), as_it_is(self._scale_loss)
        optimizer.finalize_variable_values = self._finalize
        self.known_rate = 0.0 if self.rate is None else float(self.rate.numpy())

    @property
    def rate(self) -> Any:
        """The variable of the learning rate; None where a schedule or a function is in its place.

        Callbacks and scripts assign to it.
        """
        rate = inner(self.optimizer)._learning_rate
        return rate if isinstance(rate, keras.Variable) else None

    @property
    def state(self) -> list[Any]:
        """All variables of the optimizer but the learning rate."""
        rate = self.rate
        return [each for each in self.optimizer.variables if each is not rate]

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate is read at the optimizer's count of steps."""
        schedule = keras.optimizers.schedules.LearningRateSchedule
        return isinstance(inner(self.optimizer)._learning_rate, schedule)

    @property
    def own_schedule(self) -> Any:
        """The schedule of the learning rate, if no PS can build it; else None."""
        return own_schedule(inner(self.optimizer))

    def assign_rate(self, rate: float) -> None:
        """Write a learning rate where callbacks read it."""
        if self.rate is not None:
            self.rate.assign(rate)

    def adopt_rate(self, rate: float) -> None:
        """Go on with the server's learning rate."""
        self.known_rate = rate
        self.assign_rate(rate)

    @property
    def inner(self) -> Any:
        """The optimizer without a loss scaling around it."""
        return inner(self.optimizer)

    def build(self, variables: Sequence[Any]) -> None:
        """Create the optimizer's variables, which Keras may only do while it traces a step."""
        if variables and not self.optimizer.built:
            self.optimizer.build(list(variables))

    def _finalize(self, var_list: Any) -> None:
        """End the exchanges of a `fit`, and let the optimizer then write what it averages."""
        if self._session.ends_fit():
            self._finalize_alone(var_list)

    def _scale_loss(self, loss: Any) -> Any:
        """Keep the loss of the mini-batch for reports."""
        if _LOCAL.recorder is None:
            self._session.call.loss = loss
        return self._scale_alone(loss)

    def _apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchange in the place of a step, or after it."""
        session = self._session
        variables = trainable_variables
        if variables is None:
            variables = inner(self.optimizer)._trainable_variables
        pairs = list(zip(grads, variables, strict=True))
        if (recorder := _LOCAL.recorder) is not None:
            recorder.record(self.optimizer, pairs)
            return
        is_eager = tf.executing_eagerly()
        if not is_eager:
            refuse_compiling()
            if not have_values(variables):
                self.build(variables)  # no later trace may make variables
                tf.numpy_function(refuse_first_trace, [], [])
                return
        with tf.init_scope():
            is_of_use = session.begin_step(self, pairs) or not is_eager
        if not is_of_use and session.call.ends_later:
            raise WeightsChanged
        if not is_of_use:
            session.call.note(self)
            self._sit_out()
        elif session.takes_weights:
            with self._as_a_worker():
                self._step_alone(self._pulled_to_base(pairs))
            session.call.note(self)
            if not session.call.ends_later:
                self.exchange_weights()
        else:
            self._send_gradients(pairs)

    def exchange_weights(self) -> None:
        """Exchange what the script's own steps have made of the weights."""
        weights = self._session.flat_variables.joined()
        self._exchange(weights, [], self._session.call.rows, repeats=False)

    def _sit_out(self) -> None:
        """Take part with nothing: the gradient is one of other weights than there are now."""
        flat = self._session.flat_variables
        values = flat.joined() if self._session.takes_weights else tf.zeros([flat.size])
        self._exchange(values, [], tf.constant(0), repeats=False)

    def _step_alone(self, pairs: Pairs) -> None:
        with steps_allowed():
            self._apply_alone(*zip(*pairs, strict=True))

    def _pulled_to_base(self, pairs: Pairs) -> Pairs:
        """Add mu (w - b) to the gradients of shared variables, as that of mu / 2 |w - b|^2."""
        mu, flat = self._session.prox_mu, self._session.flat_variables
        if not mu:
            return pairs
        base = tf.numpy_function(self._session.round_base, [], tf.float32)
        starts = {id(each): b for each, b in flat.parts(tf.ensure_shape(base, [flat.size]))}
        pulled = []
        for gradient, variable in pairs:
            if gradient is not None and id(variable) in starts:
                pull = self._scale_alone(mu * (variable.value - starts[id(variable)]))
                gradient = tf.convert_to_tensor(gradient) + tf.cast(pull, gradient.dtype)
            pulled.append((gradient, variable))
        return pulled

    def _send_gradients(self, pairs: Pairs) -> None:
        """Send the shared variables' gradients, and step the others here."""
        by_variable = {id(variable): gradient for gradient, variable in pairs}
        shared = self._session.variables
        sent = [by_variable.pop(id(each), None) for each in shared]
        own = [(g, v) for g, v in pairs if id(v) in by_variable and g is not None]
        flat = [flat_gradient(gradient, each) for gradient, each in zip(sent, shared, strict=True)]
        repeats = self._session.call.note(self)
        self._exchange(tf.concat(flat, 0), sent, self._session.call.rows, repeats)
        if own:
            self._step_alone(own)
        else:
            with steps_allowed():
                inner(self.optimizer)._iterations.assign_add(1)

    def _exchange(self, values: Any, gradients: Sequence[Any], rows: Any, repeats: bool) -> None:
        """Give gradients, or weights after a step, to the session, and take over its answer.

        Args:
            values: [num_parameters] float32.
            gradients: What `values` were made of, if gradients; rows of sparse ones are named.
            rows: Examples behind them.
            repeats: Whether the examples were counted before.
        """
        session, rate, scale = self._session, self.rate, self._scale
        loss, session.call.loss = session.call.loss, None
        used = tf.constant(0.0)
        if scale is not None:
            used = tf.cast(scale.value, tf.float32)
            values = values / used
        touched = [_touched(gradient) for gradient in gradients]
        clocks = list(session.clocks)
        values = [
            values,
            tf.cast(rows, tf.int64),
            self._has_stepped(clocks),
            tf.zeros([0])
            if loss is None
            else tf.reshape(tf.reduce_mean(tf.cast(loss, tf.float32)), [1]),
            tf.zeros([0]) if session.takes_weights else session.flat_variables.joined(),
            session.assignments.has_any if session.takes_weights else tf.constant(False),
            session.flat_statistics.joined(),
            tf.constant(0.0) if rate is None else tf.cast(rate.value, tf.float32),
            used,
            tf.constant([n for n, each in enumerate(touched) if each is not None], tf.int64),
            *(each for each in touched if each is not None),
        ]
        types = [tf.float32, tf.float32, tf.float32, tf.float32, tf.int64]
        in_turn = session.takes_weights and not session.call.ends_later
        exchange = functools.partial(session.exchange, self, repeats, in_turn)
        try:
            answer = tf.numpy_function(exchange, values, types)
        except tf.errors.OpError:  # of eager steps: the recorded error explains more
            session.raise_failure()
            raise
        weights, means, new_rate, new_scale, counts = answer
        flat, statistics = session.flat_variables, session.flat_statistics
        flat.assign(tf.ensure_shape(weights, [flat.size]))
        statistics.assign(tf.ensure_shape(means, [statistics.size]))
        if rate is not None:
            rate.assign(tf.reshape(new_rate, []))
        if scale is not None:
            with steps_allowed():
                scale.assign(tf.reshape(new_scale, []))
        counts = tf.ensure_shape(counts, [len(clocks)])
        for number, clock in enumerate(clocks):
            if clock is not None:
                clock.variable.assign(tf.cast(counts[number], clock.variable.dtype))

    def _has_stepped(self, clocks: Sequence[RunClock | None]) -> Any:
        """Return whether the optimizer counts the mini-batch: not if it overflows at its scale."""
        is_scaled = isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)
        clock = clocks[self.number] if is_scaled and self._session.takes_weights else None
        if clock is None:
            return tf.constant(True)
        count = tf.identity(inner(self.optimizer)._iterations.value)
        has_stepped = tf.not_equal(count, clock.own.value)
        clock.own.assign(count)
        return has_stepped

    @property
    def _scale(self) -> Any:
        """The variable of the loss scale that the server keeps; None: the optimizer keeps its own.

        A fixed `loss_scale_factor` is not one: whoever steps divides by it.
        """
        is_scaled = isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)
        return (
            self.optimizer.dynamic_scale if is_scaled and not self._session.takes_weights else None
        )

    def assign_scale(self, scale: float) -> None:
        """Scale the next losses as the server does."""
        if self._scale is not None and scale:
            with steps_allowed():
                self._scale.assign(scale)

    def assign_streak(self, streak: int) -> None:
        """Let the LossScaleOptimizer have counted what the server has."""
        if self._scale is not None:
            with steps_allowed():
                self.optimizer.step_counter.assign(streak)

    @contextlib.contextmanager
    def _as_a_worker(self) -> Iterator[None]:
        """Let a step be traced without the momentum that the method has taken over."""
        optimizer = inner(self.optimizer)
        if not self._session.takes_momentum:
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
    """Return the rows, some perhaps twice, that a gradient is not 0 in; None: perhaps all."""
    return tf.cast(gradient.indices, tf.int64) if isinstance(gradient, tf.IndexedSlices) else None


def flat_gradient(gradient: Any, variable: Any) -> Any:
    """Return a gradient, or zeros for none, as one float32 vector."""
    if gradient is None:
        return tf.zeros([int(np.prod(variable.shape))], tf.float32)
    return tf.reshape(tf.cast(tf.convert_to_tensor(gradient), tf.float32), [-1])
