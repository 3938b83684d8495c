"""An ordinary Keras script as a worker: `distribute(model)` between `compile` and `fit`.

`fit` stays Keras' own. Only the compiled optimizer is replaced: where it would step, the gradients
go to the parameter server and its weights come back, within the same graph. So callbacks, metrics,
validation, weights of classes and samples, and several steps per execution work as they do alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from models.shared import SharedModel
from ops.types import ConfigurationError
from thinwire import arguments
from thinwire.compiled import (
    check_model,
    check_optimizer,
    check_rate_change,
    check_variables,
    momentum_of,
    rate_of,
)
from thinwire.gradient_sgd import RATE_TOLERANCE, warn_of_other_rate
from thinwire.joined import Joined, LeavesInOrder, StepInfo
from thinwire.wakeup import forget, hear_interrupts

if TYPE_CHECKING:
    from ops.types import Float32


def distribute(
    model: keras.Model, args: Any = None, *, num_train: int | None = None, **settings: Any
) -> Distributed:
    """Make a compiled model a worker of a run: its `fit` trains together with the others'.

    Joins the run, so the model has the server's weights from here on. `fit` ends when the server
    ends the run, or by itself; then this worker leaves, and joins again if `fit` is called again.

    Args:
        model: Compiled, with plain SGD or with what the server steps with. Its learning rate does
            not count, the server's does.
        args: See thinwire.arguments.
        num_train: Size of the whole training set, which dgc's warm-up needs.
        **settings: Further flags by name, such as ``id_worker=2``.

    Raises:
        ConfigurationError: Settings, model or optimizer that cannot work.
        Unreachable, Refused: No server, or one of another model or method.
    """
    check_model(model)
    if isinstance(model.optimizer, ServerOptimizer):
        raise ConfigurationError("distribute() was called twice on a model; expected once.")
    chosen = arguments.read(args, settings, type_node="Worker")
    if chosen.local:
        raise ConfigurationError("mode msgd trains without a server; leave distribute() out.")
    momentum = momentum_of(model)
    is_servers = momentum in (None, chosen.run.method.server.momentum)
    if not is_servers:
        chosen = arguments.read(args, settings, type_node="Worker", momentum=momentum)
    check_optimizer(model.optimizer, chosen.run.method, takes_momentum=not is_servers)
    shared = SharedModel.of(model)
    check_variables(shared.variables)
    worker = Distributed(model, Joined(chosen, shared, num_train))
    worker.take_over()
    return worker


class Distributed(LeavesInOrder):
    """A model whose `fit` trains with others; what `distribute` returns.

    Attributes:
        last: What became of the newest step; None before the first.
    """

    def __init__(self, model: keras.Model, joined: Joined) -> None:
        """Use `distribute`."""
        self.model = model
        self.last: StepInfo | None = None
        self._joined = joined
        self._lock = threading.Lock()  # of the joined: TensorFlow's thread and the script's
        self._failure: Exception | None = None
        hear_interrupts(self._interrupt)

    @property
    def stopped(self) -> bool:
        """Whether the run has ended."""
        return self._joined.stopped

    @property
    def stop_reason(self) -> str:
        """Why it ended; empty while it goes on."""
        return self._joined.stop_reason

    @property
    def num_exchanges(self) -> int:
        """Exchanges begun, over all calls of `fit`."""
        return self._joined.part.core.step

    def take_over(self) -> None:
        """Join, and put the server into the place of the model's optimizer."""
        joined, model = self._joined, self.model
        joined.open()
        joined.assign()
        warn_of_other_rate("the optimizer's learning_rate", rate_of(model.optimizer), joined)
        model.optimizer = ServerOptimizer(model.optimizer, joined, self._exchange, self._finish)
        if model.jit_compile:
            logging.warning("jit_compile is switched off: XLA cannot compile an exchange")
        model.jit_compile = False
        model.train_step = _count_examples(model, model.optimizer)
        model.make_train_function(force=True)

    def shard(self, *arrays: Any) -> Any:
        """Return this worker's part of a training set; see ``Joined.shard``."""
        return self._joined.shard(*arrays)

    def close(self, cause: str = "done") -> None:
        """Leave the run; the model stays usable, and `fit` joins again."""
        forget(self._interrupt)
        with self._lock:
            self._joined.close(cause)

    def _interrupt(self) -> None:
        self._joined.part.interrupt()

    def _exchange(
        self, gradient: Float32, samples: int, loss: float, statistics: Float32
    ) -> tuple[Float32, Float32, np.float32]:
        """Step; called by TensorFlow, in a thread of its own, where an exception would be lost."""
        joined = self._joined
        with self._lock:
            if not self.model.stop_training:  # else the rest of several steps in one execution
                mine = np.array(gradient)  # what TensorFlow gives is a view into its own
                self._step(mine, int(samples), float(loss), statistics)
            rate = np.float32(joined.part.core.learning_rate * self.model.optimizer.rate_factor)
            return joined.weights.copy(), joined.means.copy(), rate

    def _step(self, gradient: Float32, samples: int, loss: float, statistics: Float32) -> None:
        joined, self._failure = self._joined, None
        try:
            if joined.part.closing.is_set():  # an earlier `fit` was interrupted
                joined.close("interrupted")
                joined.renew()
            if joined.stopped:
                return
            if joined.open():  # for another `fit`
                hear_interrupts(self._interrupt)
            else:
                factor = self.model.optimizer.rate_factor
                self.last = joined.step(gradient, samples, loss, statistics, factor)
        except Exception as error:  # noqa: BLE001 - `fit` raises it when it ends
            self._failure = error
        finally:
            self.model.stop_training = self._failure is not None or joined.stopped

    def _finish(self) -> None:
        """End a `fit`: leave, and say what went wrong."""
        failure, self._failure = self._failure, None
        self.close("done" if failure is None else "error")
        if failure is not None:
            raise failure
        if self.stopped:
            logging.info("fit ended with the run (%s)", self.stop_reason or "interrupted")


class ServerOptimizer(keras.optimizers.Optimizer):
    """Stands where the compiled optimizer stood; the server does its work.

    Trainable variables that are not in W_global are stepped by the compiled optimizer itself.

    Attributes:
        rate_factor: This worker's learning rate over the run's: callbacks may change it.
    """

    def __init__(
        self,
        compiled: keras.optimizers.Optimizer,
        joined: Joined,
        exchange: Callable[..., Any],
        finish: Callable[[], None],
    ) -> None:
        """Begin with the server's learning rate."""
        super().__init__(learning_rate=float(joined.part.core.learning_rate), name=compiled.name)
        self.rate_factor = 1.0
        self._compiled = compiled
        self._joined = joined  # and not its variables: they would be saved as the optimizer's
        self._call, self._finish = exchange, finish
        self._loss: Any = None  # of the mini-batch being traced, like the next
        self._examples: Any = None
        self.build(list(joined.shared.variables))

    @property
    def learning_rate(self) -> Any:
        """The server's rate of now, times what a callback made of it."""
        return self._get_current_learning_rate()

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        servers, rate = self._joined.part.core.learning_rate, float(value)
        factor = rate / servers
        if abs(factor - 1) <= RATE_TOLERANCE:
            factor = 1.0
        if factor != self.rate_factor:
            check_rate_change(rate, self._joined.settings.run.method)
        self.rate_factor = factor
        self._learning_rate.assign(rate)
        self._compiled.learning_rate = rate  # of the variables that are stepped here

    def scale_loss(self, loss: Any) -> Any:
        """Note the loss of the mini-batch."""
        self._loss = loss
        return loss

    def note_examples(self, count: Any) -> None:
        """Note the size of the mini-batch: a scalar tensor."""
        self._examples = count

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Send the gradients, take over weights, statistics and learning rate."""
        joined, shared = self._joined, self._joined.shared.variables
        gradients = {
            id(v): (g, v) for g, v in zip(grads, trainable_variables or shared, strict=True)
        }
        sent = [_flat(gradients.pop(id(v), (None, v))[0], v) for v in shared]
        own = [pair for pair in gradients.values() if pair[0] is not None]
        loss, self._loss = self._loss, None
        weights, means, rate = tf.numpy_function(
            self._call,
            [
                tf.concat(sent, 0),
                tf.cast(self._examples, tf.int64),
                tf.constant(0.0) if loss is None else tf.cast(loss, tf.float32),
                joined.statistics.joined(),
            ],
            [tf.float32, tf.float32, tf.float32],
        )
        joined.variables.assign(tf.ensure_shape(weights, [joined.variables.size]))
        joined.statistics.assign(tf.ensure_shape(means, [joined.statistics.size]))
        self._learning_rate.assign(tf.reshape(rate, []))
        self._iterations.assign_add(1)
        if own:
            self._compiled.apply(*zip(*own, strict=True))

    def finalize_variable_values(self, var_list: Any) -> None:
        """Hear that `fit` is over."""
        del var_list
        self._finish()


def _flat(gradient: Any, variable: Any) -> Any:
    """Return a gradient, or zeros for none, as one float32 vector."""
    if gradient is None:
        return tf.zeros([int(np.prod(variable.shape))], tf.float32)
    return tf.reshape(tf.cast(tf.convert_to_tensor(gradient), tf.float32), [-1])


def _count_examples(model: keras.Model, optimizer: ServerOptimizer) -> Callable[[Any], Any]:
    """Return the model's train_step, telling the optimizer how large the mini-batch is."""
    train_step = model.train_step

    def counted(data: Any) -> Any:
        if model.optimizer is not optimizer:
            raise ConfigurationError(
                "the model was compiled again after thinwire.distribute(), which put another "
                "optimizer into the server's place; call distribute() after compile()."
            )
        first = next(each for each in tf.nest.flatten(data) if each is not None)
        optimizer.note_examples(tf.shape(first)[0])
        return train_step(data)

    return counted
