"""Replaces an optimizer's `apply` by an exchange with the servers, in a graph or eagerly.

Instead of an optimizer's step, the gradients are pushed to the parameter server and the new weights
are pulled. The optimizer remains the script's own object, so callbacks and saving work as without
Thinwire. Only the methods `apply`, `scale_loss` and `finalize_variable_values` of the optimizer
object are replaced.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import keras
from keras import ops
from keras.src.backend.common.stateless_scope import in_stateless_scope

from thinwire.models import flat_tensors
from thinwire.ops.types import ConfigurationError
from thinwire.script.backends.base import Result
from thinwire.script.backends.present import backend
from thinwire.script.keras.held_weights import Assignments
from thinwire.script.keras.plan import Calls, Pairs

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
    backend().begin(steps_allowed)


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
    scaled = optimizers.LossScaleOptimizer
    for kind in (optimizers.Optimizer, scaled, optimizers.MultiOptimizer):
        kind.apply = _guarded(kind.apply)
    # On JAX, a LossScaleOptimizer calls `apply` of the optimizer inside it only.
    scaled.stateless_apply = _recorded_stateless(scaled.stateless_apply)


@functools.cache
def _record_assignments() -> None:
    """Patch Keras' variable class to record the script's assignments, once per process."""
    alone = keras.Variable.assign

    @functools.wraps(alone)
    def assign(variable: Any, value: Any) -> Any:
        watchers = [] if _LOCAL.is_allowed or _LOCAL.calls is not None else list(_WATCHERS)
        assignment_records = [watcher.assignments_to(variable) for watcher in watchers]
        recorders = [record for record in assignment_records if record is not None]
        before = backend().value_of(variable) if recorders else None
        result = alone(variable, value)
        for recorder in recorders:
            recorder.record(variable, before)
        return result

    keras.Variable.assign = backend().unconverted(assign)


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


def _recorded_stateless(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def stateless_apply(optimizer: Any, slots: Any, grads: Any, weights: Any) -> Any:
        if _LOCAL.calls is None or _LOCAL.is_allowed:
            return apply(optimizer, slots, grads, weights)
        variables = inner(optimizer)._trainable_variables
        _LOCAL.calls.append((optimizer, list(zip(grads, variables, strict=True))))
        return weights, slots

    return stateless_apply


class StepValues(NamedTuple):
    """Values of a training step before its exchange: tensors in the graph, arrays in Python.

    Attributes:
        pushed: [num_parameters] float32 gradient, or weights if the optimizer updates them on this
            worker. In Python, the array is a view of the framework's memory.
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


def joined(values: StepValues, join: Callable[[list[Any]], Any]) -> StepValues:
    """Return the values of a step with its lists of tensors or arrays joined to vectors.

    Args:
        values: Values with lists in place of `pushed`, `statistics` and `held`.
        join: Function that joins a list to one float32 vector.
    """
    vectors = (join(each) for each in (values.pushed, values.statistics, values.held))
    pushed, statistics, held = vectors
    return values._replace(pushed=pushed, statistics=statistics, held=held)


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


def _exchange_in_python(
    exchange: Callable[[StepValues], StepAnswer], values: StepValues, results: Sequence[Result]
) -> StepAnswer:
    """Call a Python function with the values of a step as arrays, from a graph or eagerly."""
    # The function below lives as long as the graph. It must not refer to the graph's tensors,
    # because the graph would then be freed only by a garbage collection.
    numbers, num_passed = tuple(values.touched), len(values) - 1

    def call(*arrays: Any) -> StepAnswer:
        touched = dict(zip(numbers, arrays[num_passed:], strict=True))
        return exchange(StepValues._make([*arrays[:num_passed], touched]))

    tensors = [*values[:num_passed], *values.touched.values()]
    return StepAnswer(*backend().call_host(call, tensors, results))


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
        is_postponed: True if gradients, too, are sent at the end of the train_step: in a compiled
            step of a stateless backend, where the moving statistics are known only then.
        pairs: Pairs (gradient, variable) of a postponed exchange; empty if none is postponed.
        stepped: Weights after a step of the optimizer on this worker, by the variable's id, in a
            compiled step of a stateless backend.
        loss: Loss of the mini-batch; None if it is not computed yet, or was already sent.
        applied: Replacements (`ExchangeStep`) of those optimizers that have stepped, in the order
            of the optimizers' steps.
    """

    def __init__(self, rows: Any, ends_later: bool, is_postponed: bool = False) -> None:
        self.rows, self.ends_later, self.is_postponed = rows, ends_later, is_postponed
        self.pairs: Pairs = ()
        self.stepped: dict[int, Any] = {}
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
        is_stale: True if joining the run, within the trace of a stateless step, has replaced the
            weights from which the step's first execution computes its gradient.
    """

    def __init__(self, optimizer: Any, owner: StepOwner) -> None:
        """Replace `apply`, `scale_loss` and `finalize_variable_values` of the optimizer object."""
        self.optimizer, self.number = optimizer, 0
        self.is_stale = False
        self.clock: RunClock | None = None
        self._owner = owner
        self._apply_alone, self._scale_alone = optimizer.apply, optimizer.scale_loss
        self._finalize_alone = optimizer.finalize_variable_values
        # Prevents AutoGraph from converting Thinwire's code within a `tf.function` of the script.
        unconverted = backend().unconverted
        optimizer.apply, optimizer.scale_loss = (
            unconverted(self._apply),
            unconverted(self._scale_loss),
        )
        optimizer.finalize_variable_values = self._finalize
        if backend().is_stateless:
            self._stateless_alone = optimizer.stateless_apply
            optimizer.stateless_apply = self._stateless_apply
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
        # In a stateless step the loss is an intermediate value of its gradient, which ends with it.
        if _LOCAL.calls is None and not backend().is_stateless:
            self._owner.call.loss = loss
        return self._scale_alone(loss)

    def _apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Push gradients instead of the optimizer's step, or step and then exchange weights."""
        if _LOCAL.is_allowed:  # called by the optimizer's own `stateless_apply`
            self._apply_alone(grads, trainable_variables)
            return
        owner, variables = self._owner, trainable_variables
        if variables is None:
            variables = self.inner._trainable_variables
        pairs = list(zip(grads, variables, strict=True))
        if _LOCAL.calls is not None:
            _LOCAL.calls.append((self.optimizer, pairs))
            return
        is_valid = owner.call.is_postponed or self._begin(pairs)
        if is_valid is None:
            return
        if not is_valid and owner.call.ends_later:
            raise WeightsChanged
        session = owner.joined
        if not is_valid:
            # joining the run has changed the gradient's weights, so the worker pushes no update
            owner.call.note(self)
            flat = session.variables
            values = flat.values if session.takes_weights else [ops.zeros([flat.size])]
            self._exchange(values, [], 0)
        elif session.takes_weights:
            with self._as_a_worker():
                self._step_alone(self._pulled_to_base(pairs))
            owner.call.note(self)
            if not owner.call.ends_later:
                self.exchange_weights()
        elif owner.call.is_postponed:
            owner.call.note(self)
            owner.call.pairs = pairs
            self._step_unshared(pairs)
        else:
            self._send_gradients(pairs)

    def _begin(self, pairs: Pairs) -> bool | None:
        """Join the run at the first step, and check the optimizer's variables.

        Returns:
            True if the gradients are of the weights after joining; None if the present trace cannot
            exchange, because it creates the model's variables.
        """
        owner, frame = self._owner, backend()
        is_traced = frame.is_traced()
        if is_traced:
            frame.refuse_compiling()
            variables = [variable for _, variable in pairs]
            if not frame.has_values(variables, lambda: self.build(variables)):
                return None
        is_unchanged = frame.outside_of_step(lambda: owner.begin_step(self, pairs))
        if not is_traced:
            return is_unchanged
        # A graph computes its gradients when it is executed, which is at the weights after joining
        # the run. But the first execution of a stateless step has the weights as an argument, whose
        # values are from before: that execution pushes no update.
        self.is_stale = frame.is_stateless and not is_unchanged
        return True

    def _stateless_apply(self, slots: Any, grads: Any, weights: Any) -> tuple[Any, Any]:
        """Exchange or step as `_apply` does; return new weights and optimizer variables."""
        variables = self.inner._trainable_variables
        own = self.optimizer.variables
        mapping = [*zip(variables, weights, strict=True), *zip(own, slots, strict=True)]
        with keras.StatelessScope(mapping) as scope:
            self._apply(grads, variables)
        new_weights = [scope.get_current_value(variable) for variable in variables]
        if self._owner.call.is_postponed:
            stepped = zip(variables, new_weights, strict=True)
            self._owner.call.stepped = {id(variable): value for variable, value in stepped}
        return new_weights, [scope.get_current_value(variable) for variable in own]

    def postponed_values(self) -> StepValues:
        """Return the values to exchange at the end of a compiled step of a stateless backend.

        Pushed values, statistics and held weights are lists of tensors, for `joined`: compiled code
        of JAX joins tensors far more slowly than NumPy.
        """
        call, session = self._owner.call, self._owner.joined
        if session.takes_weights:
            return self._values(session.variables.values, [], call.rows)
        sent, dense = self._shared_gradients(call.pairs)
        return self._values(dense, sent, call.rows)

    def exchange_weights(self) -> None:
        """Exchange weights with the servers, after optimizers have stepped on this worker."""
        owner = self._owner
        self._exchange(owner.joined.variables.values, [], owner.call.rows)

    def _step_alone(self, pairs: Pairs) -> None:
        with steps_allowed():
            if backend().is_stateless and in_stateless_scope():
                self._step_in_scope(pairs)
            else:
                self._apply_alone(*zip(*pairs, strict=True))

    def _step_in_scope(self, pairs: Pairs) -> None:
        """Step by the optimizer's own `stateless_apply`, and assign the result in the scope."""
        variables, own = self.inner._trainable_variables, self.optimizer.variables
        gradients = {id(variable): gradient for gradient, variable in pairs}
        results = self._stateless_alone(
            [variable.value for variable in own],
            [gradients.get(id(variable)) for variable in variables],
            [variable.value for variable in variables],
        )
        for variable, value in zip([*variables, *own], itertools.chain(*results), strict=True):
            variable.assign(value)

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
        (base,) = backend().call_host(self._round_base, [], [Result((flat.size,), "float32")])
        starts = {id(variable): b for variable, b in flat.parts(base)}
        pulled = []
        for gradient, variable in pairs:
            if gradient is not None and id(variable) in starts:
                pull = self._scale_alone(mu * (variable.value - starts[id(variable)]))
                gradient = backend().dense(gradient) + ops.cast(pull, gradient.dtype)
            pulled.append((gradient, variable))
        return pulled

    def _round_base(self) -> list[Float32]:
        """Return a copy of the shared weights from the start of the round of local steps."""
        return [self._owner.joined.part.core.base.copy()]

    def _send_gradients(self, pairs: Pairs) -> None:
        """Push the gradients of shared variables; let the optimizer update all other variables."""
        sent, dense = self._shared_gradients(pairs)
        call = self._owner.call
        repeats = call.note(self)
        self._exchange(dense, sent, call.rows, repeats)
        self._step_unshared(pairs)

    def _shared_gradients(self, pairs: Pairs) -> tuple[list[Any], list[Any]]:
        """Return the gradients of the shared variables, as they are and as dense tensors."""
        by_variable = {id(variable): gradient for gradient, variable in pairs}
        shared = self._owner.joined.shared.variables
        sent = [by_variable.get(id(variable)) for variable in shared]
        return sent, dense_gradients(sent, shared)

    def _step_unshared(self, pairs: Pairs) -> None:
        """Let the optimizer update the variables that the workers do not share, or only count."""
        shared = {id(variable) for variable in self._owner.joined.shared.variables}
        unshared = [(g, v) for g, v in pairs if id(v) not in shared and g is not None]
        if unshared:
            self._step_alone(unshared)
        else:
            with steps_allowed():
                self.inner._iterations.assign_add(1)

    def _exchange(
        self, values: list[Any], gradients: Sequence[Any], rows: Any, repeats: bool = False
    ) -> None:
        """Push gradients, or weights after a local step, and assign the pulled weights.

        Args:
            values: Gradients, or weights after a local step; together num_parameters entries.
            gradients: Gradients from which `values` was made, whose sparse rows are needed; empty
                if `values` are weights.
            rows: Number of training examples from which the gradients or the local step were
                computed.
            repeats: True if an earlier exchange has already counted the `rows` examples.
        """
        owner = self._owner
        if backend().is_stateless:
            refuse_statistics(owner.joined, "a loop with optimizer.stateless_apply")
        sent = joined(self._values(values, gradients, rows), flat_tensors.join)
        in_turn = owner.joined.takes_weights and not owner.call.ends_later
        exchange = functools.partial(owner.exchange, self, repeats, in_turn)
        session, number = owner.joined, Result((), "float32")
        results = (
            Result((session.variables.size,), "float32"),
            Result((session.statistics.size,), "float32"),
            number,
            number,
            Result((len(owner.clocks),), "int64"),
        )
        try:
            answer = _exchange_in_python(exchange, sent, results)
        except backend().step_errors:  # the error of an eager step, whose cause is stored
            owner.raise_failure()
            raise
        self.take(answer)

    def _values(self, values: list[Any], gradients: Sequence[Any], rows: Any) -> StepValues:
        """Return the values of a step that an exchange sends, before `joined`; see `_exchange`."""
        owner, rate, scale = self._owner, self.rate, self._scale
        session, call = owner.joined, owner.call
        loss, call.loss = call.loss, None
        takes_weights = session.takes_weights
        used_scale = ops.zeros([])
        if scale is not None:
            used_scale = ops.cast(scale.value, "float32")
            values = [ops.cast(value, "float32") / used_scale for value in values]
        if loss is not None:
            loss = ops.reshape(ops.mean(ops.cast(loss, "float32")), [1])
        touched = {
            number: backend().rows_of_gradient(gradient)
            for number, gradient in enumerate(gradients)
            if gradient is not None
        }
        return StepValues(
            pushed=values,
            rows=ops.cast(rows, "int32"),
            statistics=session.statistics.values,
            rate=ops.zeros([]) if rate is None else ops.cast(rate.value, "float32"),
            scale=used_scale,
            held=[] if takes_weights else session.variables.values,
            loss=ops.zeros([0]) if loss is None else loss,
            has_stepped=self._has_stepped(list(owner.clocks)),
            has_assigned=owner.assignments.has_any if takes_weights else False,
            touched={number: rows for number, rows in touched.items() if rows is not None},
        )

    def take(self, answer: StepAnswer) -> None:
        """Assign the servers' answer to the model's and the optimizer's variables."""
        owner, rate, scale = self._owner, self.rate, self._scale
        owner.joined.variables.assign(answer.weights)
        owner.joined.statistics.assign(answer.statistics)
        if rate is not None:
            _assign_number(rate, answer.rate)
        if scale is not None:
            with steps_allowed():
                _assign_number(scale, answer.scale)
        for number, clock in enumerate(owner.clocks):
            if clock is not None:
                clock.variable.assign(ops.cast(answer.counts[number], clock.variable.dtype))

    def _has_stepped(self, clocks: Sequence[RunClock | None]) -> Any:
        """Return a bool tensor: False if the optimizer skipped a step with overflowed gradients."""
        is_scaled = isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)
        clock = clocks[self.number] if is_scaled and self._owner.joined.takes_weights else None
        if clock is None:
            return True
        count = backend().value_of(self.inner._iterations)
        has_stepped = ops.not_equal(count, clock.own.value)
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


def _assign_number(variable: Any, number: Any) -> None:
    """Assign a scalar, unless it is known to be equal: on JAX, a transfer takes 0.1 ms."""
    if backend().is_traced() or float(variable.value) != float(number):
        variable.assign(ops.reshape(number, []))


def inner(optimizer: Any) -> Any:
    """Return the optimizer inside a LossScaleOptimizer, or the optimizer itself."""
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if is_scaled else optimizer


def refuse_statistics(session: Session, where: str) -> None:
    """Reject moving statistics that an exchange within `stateless_apply` cannot read or write.

    Raises:
        ConfigurationError: The run averages moving statistics, and the model has some.
    """
    if session.statistics.size:
        raise ConfigurationError(
            "the run averages the moving statistics of BatchNormalization (--bn_sync), and on JAX "
            f"{where} exchanges where the optimizer steps, which does not see them; expected fit "
            "or train_on_batch with a train_step that only applies gradients. Or give "
            "--bn_sync=false, with which each worker keeps its own statistics, or set "
            "KERAS_BACKEND=torch or KERAS_BACKEND=tensorflow."
        )


def dense_gradients(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return the variables' gradients as dense tensors, with zeros for None."""
    return [
        ops.zeros(variable.shape) if gradient is None else backend().dense(gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
