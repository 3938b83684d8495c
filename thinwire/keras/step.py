"""What stands in the place of a compiled optimizer's `apply`, within the graph of Keras' step.

Where the optimizer would step, the gradients go to the parameter server and its weights come back.
The optimizer object stays the model's own, for callbacks and for saving; only three of its methods
are replaced, on this one instance.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import keras
import numpy as np
import tensorflow as tf

from thinwire.ops.types import ConfigurationError

if TYPE_CHECKING:
    from thinwire.keras.clock import RunClock
    from thinwire.models.flat_model import FlatVariables

_Pairs = Sequence[tuple[Any, Any]]  # gradient or None, variable


#: `check` of the train_step that runs in this thread, if any.
_GUARD = threading.local()


@functools.cache
def _guard_optimizers() -> None:
    """Let every optimizer of Keras be checked before it steps, once for the process."""
    base, apply = keras.optimizers.Optimizer, keras.optimizers.Optimizer.apply

    @functools.wraps(apply)
    def guarded(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        check = getattr(_GUARD, "check", None)
        if check is not None:
            check(optimizer, trainable_variables)
        return apply(optimizer, grads, trainable_variables)

    base.apply = guarded


class StepOwner(Protocol):
    """What a step needs of the worker behind the model; `thinwire.keras.session` has it."""

    model: Any

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
        """Whether the compiled optimizer steps here, and weights are exchanged, not gradients."""

    @property
    def takes_momentum(self) -> bool:
        """Whether the method has taken the compiled SGD's momentum over."""

    @property
    def clock(self) -> RunClock | None:
        """What a schedule is read at where the optimizer steps here; None: its own count."""

    def shared_variables(self) -> list[Any]:
        """Return the variables that are or will be shared."""

    def check_in_fit(self) -> None:
        """Refuse steps outside of `fit`."""

    def ends_fit(self) -> bool:
        """Leave after the last step; return whether the optimizer's averages are of this run."""

    def join(self, pairs: _Pairs) -> bool:
        """Join at the first step; return whether the model has other weights than before."""

    def exchange(self, *values: Any) -> tuple[Any, ...]:
        """Exchange one step's values, as `ExchangeStep._exchange` gives them; return the answer."""


class WeightsChanged(Exception):
    """Joining brought other weights than those that a gradient was computed at."""


class ExchangeStep:
    """Stands in for one compiled optimizer.

    Trainable variables that are not shared are stepped by the optimizer itself.

    Attributes:
        optimizer: The compiled one; a LossScaleOptimizer where Keras put one around it.
        only_builds: Whether steps are traced for the variables that they create, and nothing else.
    """

    def __init__(self, optimizer: Any, session: StepOwner) -> None:
        """Take the place of three of `optimizer`'s methods."""
        _guard_optimizers()
        self.optimizer = optimizer
        self._session = session
        self._apply_alone, self._scale_alone = optimizer.apply, optimizer.scale_loss
        self._loss: Any = None  # of the mini-batch being traced, like the next
        self._rows: Any = None
        self._was_applied = False
        self.only_builds = False
        self._finalize_alone = optimizer.finalize_variable_values
        optimizer.apply, optimizer.scale_loss = self._apply, self._scale_loss
        optimizer.finalize_variable_values = self._finalize

    @property
    def rate(self) -> Any:
        """The variable of the learning rate; None where a schedule or a function is in its place.

        Callbacks and scripts assign to it.
        """
        rate = inner(self.optimizer)._learning_rate
        return rate if isinstance(rate, keras.Variable) else None

    def run(self, train_step: Callable[[Any], Any], data: Any) -> Any:
        """Call a model's `train_step`, and refuse one that would train alone.

        Raises:
            ConfigurationError: It does not step with the compiled optimizer, or with another one.
        """
        self._rows, self._loss, self._was_applied = count_rows(data), None, False
        with self._guarding_others():
            logs = train_step(data)
        if not self._was_applied:
            raise ConfigurationError(
                f"the train_step of {self._session.model.name!r} does not step with the optimizer "
                f"that the model is compiled with ({_named(self.optimizer)}), so each worker would "
                "train alone; expected self.optimizer.apply_gradients(...) of all shared variables "
                "there. Compile the model with the optimizer that train_step uses, or leave "
                "thinwire.distribute() out."
            )
        return logs

    def assign_rate(self, rate: float) -> None:
        """Write a learning rate where callbacks read it."""
        if self.rate is not None:
            self.rate.assign(rate)

    def _finalize(self, var_list: Any) -> None:
        """End the exchanges of a `fit`, and let the optimizer then write what it averages."""
        if self._session.ends_fit():
            self._finalize_alone(var_list)

    def _scale_loss(self, loss: Any) -> Any:
        """Keep the loss of the mini-batch for reports."""
        self._loss = loss
        return self._scale_alone(loss)

    def _apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchange in the place of a step, or after it."""
        session = self._session
        session.check_in_fit()
        self._was_applied = True
        if self.only_builds:
            return
        variables = trainable_variables
        if variables is None:
            variables = inner(self.optimizer)._trainable_variables
        pairs = list(zip(grads, variables, strict=True))
        is_eager = tf.executing_eagerly()
        with tf.init_scope():
            if session.join(pairs) and is_eager:
                raise WeightsChanged
        if session.takes_weights:
            with self._as_a_worker():
                self._apply_alone(*zip(*pairs, strict=True))
            self._exchange(session.flat_variables.joined(), [])
        else:
            self._send_gradients(pairs)

    def _send_gradients(self, pairs: _Pairs) -> None:
        """Send the shared variables' gradients, and step the others here."""
        by_variable = {id(variable): gradient for gradient, variable in pairs}
        shared = self._session.variables
        sent = [by_variable.pop(id(each), None) for each in shared]
        own = [(g, v) for g, v in pairs if id(v) in by_variable and g is not None]
        flat = [_flat(gradient, each) for gradient, each in zip(sent, shared, strict=True)]
        self._exchange(tf.concat(flat, 0), sent)
        if own:
            self._apply_alone(*zip(*own, strict=True))
        else:
            inner(self.optimizer)._iterations.assign_add(1)

    def _exchange(self, values: Any, gradients: Sequence[Any]) -> None:
        """Give gradients, or weights after a step, to the session, and take over its answer.

        Args:
            values: [num_parameters] float32.
            gradients: What `values` were made of, if gradients; rows of sparse ones are named.
        """
        session, rate, scale = self._session, self.rate, self._scale
        loss, self._loss = self._loss, None
        used = tf.constant(0.0)
        if scale is not None:
            used = tf.cast(scale.value, tf.float32)
            values = values / used
        rows = [_touched(gradient) for gradient in gradients]
        weights, means, new_rate, new_scale, count = tf.numpy_function(
            session.exchange,
            [
                values,
                tf.cast(self._rows, tf.int64),
                tf.constant(0.0) if loss is None else tf.cast(loss, tf.float32),
                session.flat_statistics.joined(),
                tf.constant(0.0) if rate is None else tf.cast(rate.value, tf.float32),
                used,
                tf.constant([n for n, each in enumerate(rows) if each is not None], tf.int64),
                *(each for each in rows if each is not None),
            ],
            [tf.float32, tf.float32, tf.float32, tf.float32, tf.int64],
        )
        flat, statistics = session.flat_variables, session.flat_statistics
        flat.assign(tf.ensure_shape(weights, [flat.size]))
        statistics.assign(tf.ensure_shape(means, [statistics.size]))
        if rate is not None:
            rate.assign(tf.reshape(new_rate, []))
        if scale is not None:
            scale.assign(tf.reshape(new_scale, []))
        if session.clock is not None:
            session.clock.variable.assign(tf.cast(tf.reshape(count, []), tf.int64))

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
            self._scale.assign(scale)

    def assign_streak(self, streak: int) -> None:
        """Let the LossScaleOptimizer have counted what the server has."""
        if self._scale is not None:
            self.optimizer.step_counter.assign(streak)

    @contextlib.contextmanager
    def _as_a_worker(self) -> Iterator[None]:
        """Let the optimizer's step be traced without the momentum that the method has taken over.

        Its schedule is read at the run's count.
        """
        session, optimizer = self._session, inner(self.optimizer)
        with contextlib.ExitStack() as stack:
            if session.clock is not None:
                stack.enter_context(session.clock.reading(optimizer))
            if session.takes_momentum:
                momentum = optimizer.momentum
                optimizer.momentum = 0.0
                stack.callback(setattr, optimizer, "momentum", momentum)
            yield

    @contextlib.contextmanager
    def _guarding_others(self) -> Iterator[None]:
        """Refuse another optimizer that steps shared variables meanwhile, in this thread."""
        before, _GUARD.check = getattr(_GUARD, "check", None), self._check_other
        try:
            yield
        finally:
            _GUARD.check = before

    def _check_other(self, other: Any, variables: Any) -> None:
        if other is self.optimizer or other is inner(self.optimizer):
            return
        shared = {id(each) for each in self._session.shared_variables()}
        touched = [v for v in variables or other._trainable_variables if id(v) in shared]
        if touched:
            self._refuse(other, touched)

    def _refuse(self, other: Any, touched: Sequence[Any]) -> NoReturn:
        raise ConfigurationError(
            f"the train_step of {self._session.model.name!r} steps {touched[0].path} and "
            f"{len(touched) - 1} more shared variables with {_named(other)}, but the model is "
            f"compiled with {_named(self.optimizer)}: each worker would train them alone. Expected "
            "one optimizer, the compiled one. Several, as in a GAN, are not supported yet; leave "
            "thinwire.distribute() out, or put only the variables of the compiled optimizer into "
            "thinwire.W_global."
        )


def count_rows(data: Any) -> Any:
    """Return the number of examples in a mini-batch, a scalar tensor.

    It is the first dimension of the first leaf that has one; ragged and sparse ones count too.
    """
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, tf.RaggedTensor):
            return leaf.nrows()
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        if leaf is not None and len(getattr(leaf, "shape", ())):
            return tf.shape(leaf)[0]
    return tf.constant(1)


def inner(optimizer: Any) -> Any:
    """Return the optimizer inside a LossScaleOptimizer, or the optimizer itself."""
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if is_scaled else optimizer


def _named(optimizer: Any) -> str:
    return f"{type(optimizer).__name__} {optimizer.name!r}"


def _touched(gradient: Any) -> Any:
    """Return the rows, some perhaps twice, that a gradient is not 0 in; None: perhaps all."""
    return tf.cast(gradient.indices, tf.int64) if isinstance(gradient, tf.IndexedSlices) else None


def _flat(gradient: Any, variable: Any) -> Any:
    """Return a gradient, or zeros for none, as one float32 vector."""
    if gradient is None:
        return tf.zeros([int(np.prod(variable.shape))], tf.float32)
    return tf.reshape(tf.cast(tf.convert_to_tensor(gradient), tf.float32), [-1])
