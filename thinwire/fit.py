"""An ordinary Keras script as a worker: `distribute(model)` between `compile` and `fit`.

`fit` stays Keras' own. Only the compiled optimizer is replaced: where it would step, the gradients
go to the parameter server and its weights come back, within the same graph. So callbacks, metrics,
validation, weights of classes and samples, and several steps per execution work as they do alone.
What of a compiled model the server cannot stand in for is refused before anything is sent.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from thinwire import interrupts
from thinwire.gradient_sgd import RATE_TOLERANCE, warn_of_other_rate
from thinwire.models.flat_model import SharedModel
from thinwire.ops.methods.method import Method
from thinwire.ops.methods.validation import refuse_script_steps
from thinwire.ops.optimizers.server import keras_optimizer
from thinwire.ops.types import ConfigurationError
from thinwire.ops.weighting.dc_asgd import DcAsgd
from thinwire.session import LeavesOnExit, Session, StepInfo
from thinwire.settings import read_settings

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: Setting of a Keras optimizer -> what does the same here.
_INSTEAD = {
    "momentum": "mode dgs or dgc, whose momentum it then is; or `momentum` for all nodes",
    "weight_decay": "`worker_weight_decay` for the worker",
    "global_clipnorm": "`clip_norm` for the worker",
    "clipnorm": "`clip_norm` for the worker, which clips all gradients together",
}
_FREE = ("name", "learning_rate")


def distribute(
    model: keras.Model, args: Any = None, *, num_train: int | None = None, **settings: Any
) -> Distributed:
    """Make a compiled model a worker of a run: its `fit` trains together with the others'.

    Joins the run, so the model has the server's weights from here on. `fit` ends when the server
    ends the run, or by itself; then this worker leaves, and joins again if `fit` is called again.

    Args:
        model: Compiled, with plain SGD or with what the server steps with. Its learning rate does
            not count, the server's does.
        args: See thinwire.settings.
        num_train: Size of the whole training set, which dgc's warm-up needs.
        **settings: Further flags by name, such as ``id_worker=2``.

    Raises:
        ConfigurationError: Settings, model or optimizer that cannot work.
        Unreachable, Refused: No server, or one of another model or method.
    """
    check_model(model)
    if isinstance(model.optimizer, ServerOptimizer):
        raise ConfigurationError("distribute() was called twice on a model; expected once.")
    chosen = read_settings(args, settings, type_node="Worker")
    if chosen.local:
        raise ConfigurationError("mode msgd trains without a server; leave distribute() out.")
    momentum = momentum_of(model)
    is_servers = momentum in (None, chosen.run.method.server.momentum)
    if not is_servers:
        chosen = read_settings(args, settings, type_node="Worker", momentum=momentum)
    refuse_script_steps(chosen.run.method, "a worker of this form of distribute()")
    check_optimizer(model.optimizer, chosen.run.method, takes_momentum=not is_servers)
    shared = SharedModel.of(model)
    check_variables(shared.variables)
    worker = Distributed(model, Session(chosen, shared, num_train))
    worker.take_over()
    return worker


class Distributed(LeavesOnExit):
    """A model whose `fit` trains with others; what `distribute` returns.

    Attributes:
        last: What became of the newest step; None before the first.
    """

    def __init__(self, model: keras.Model, session: Session) -> None:
        """Use `distribute`."""
        self.model = model
        self.last: StepInfo | None = None
        self._session = session
        self._lock = threading.Lock()  # of the session: TensorFlow's thread and the script's
        self._failure: Exception | None = None
        interrupts.add_listener(self._interrupt)

    @property
    def stopped(self) -> bool:
        """Whether the run has ended."""
        return self._session.stopped

    @property
    def stop_reason(self) -> str:
        """Why it ended; empty while it goes on."""
        return self._session.stop_reason

    @property
    def num_exchanges(self) -> int:
        """Exchanges begun, over all calls of `fit`."""
        return self._session.part.core.step

    def take_over(self) -> None:
        """Join, and put the server into the place of the model's optimizer."""
        session, model = self._session, self.model
        session.open()
        session.assign()
        warn_of_other_rate("the optimizer's learning_rate", rate_of(model.optimizer), session)
        model.optimizer = ServerOptimizer(model.optimizer, session, self._exchange, self._finish)
        if model.jit_compile:
            logging.warning("jit_compile is switched off: XLA cannot compile an exchange")
        model.jit_compile = False
        model.train_step = _count_examples(model, model.optimizer)
        model.make_train_function(force=True)

    def shard(self, *arrays: Any) -> Any:
        """Return this worker's part of a training set; see `Session.shard`."""
        return self._session.shard(*arrays)

    def close(self, cause: str = "done") -> None:
        """Leave the run; the model stays usable, and `fit` joins again."""
        interrupts.remove_listener(self._interrupt)
        with self._lock:
            self._session.close(cause)

    def _interrupt(self) -> None:
        self._session.part.interrupt()

    def _exchange(
        self, gradient: Float32, samples: int, loss: float, statistics: Float32
    ) -> tuple[Float32, Float32, np.float32]:
        """Step; called by TensorFlow, in a thread of its own, where an exception would be lost."""
        session = self._session
        with self._lock:
            if not self.model.stop_training:  # else the rest of several steps in one execution
                mine = np.array(gradient)  # what TensorFlow gives is a view into its own
                self._step(mine, int(samples), float(loss), statistics)
            rate = np.float32(session.part.core.learning_rate * self.model.optimizer.rate_factor)
            return session.weights.copy(), session.means.copy(), rate

    def _step(self, gradient: Float32, samples: int, loss: float, statistics: Float32) -> None:
        session, self._failure = self._session, None
        try:
            if session.part.closing.is_set():  # an earlier `fit` was interrupted
                session.close("interrupted")
                session.renew()
            if session.stopped:
                return
            if session.open():  # for another `fit`
                interrupts.add_listener(self._interrupt)
            else:
                factor = self.model.optimizer.rate_factor
                self.last = session.step(gradient, samples, loss, statistics, factor)
        except Exception as error:  # noqa: BLE001 - `fit` raises it when it ends
            self._failure = error
        finally:
            self.model.stop_training = self._failure is not None or session.stopped

    def _finish(self) -> None:
        """End a `fit`: leave the run, and raise what went wrong."""
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
        session: Session,
        exchange: Callable[..., Any],
        finish: Callable[[], None],
    ) -> None:
        """Begin with the server's learning rate."""
        super().__init__(learning_rate=float(session.part.core.learning_rate), name=compiled.name)
        self.rate_factor = 1.0
        self._compiled = compiled
        self._session = session  # and not its variables: they would be saved as the optimizer's
        self._call, self._finish = exchange, finish
        self._loss: Any = None  # of the mini-batch being traced, like the next
        self._examples: Any = None
        self.build(list(session.shared.variables))

    @property
    def learning_rate(self) -> Any:
        """The server's rate of now, times what a callback made of it."""
        return self._get_current_learning_rate()

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        servers, rate = self._session.part.core.learning_rate, float(value)
        factor = rate / servers
        if abs(factor - 1) <= RATE_TOLERANCE:
            factor = 1.0
        if factor != self.rate_factor:
            check_rate_change(rate, self._session.settings.run.method)
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
        session, shared = self._session, self._session.shared.variables
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
                session.statistics.joined(),
            ],
            [tf.float32, tf.float32, tf.float32],
        )
        session.variables.assign(tf.ensure_shape(weights, [session.variables.size]))
        session.statistics.assign(tf.ensure_shape(means, [session.statistics.size]))
        self._learning_rate.assign(tf.reshape(rate, []))
        self._iterations.assign_add(1)
        if own:
            self._compiled.apply(*zip(*own, strict=True))

    def finalize_variable_values(self, var_list: Any) -> None:
        """Leave the run: Keras calls this when `fit` is over."""
        del var_list
        self._finish()


def _flat(gradient: Any, variable: Any) -> Any:
    """Return a gradient, or zeros for none, as one float32 vector."""
    if gradient is None:
        return tf.zeros([int(np.prod(variable.shape))], tf.float32)
    return tf.reshape(tf.cast(tf.convert_to_tensor(gradient), tf.float32), [-1])


def _count_examples(model: keras.Model, optimizer: ServerOptimizer) -> Callable[[Any], Any]:
    """Return the model's train_step, which first gives the optimizer the mini-batch's size."""
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


def momentum_of(model: keras.Model) -> float | None:
    """Return the momentum of a compiled model's SGD, if it has one."""
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, keras.optimizers.SGD) or not optimizer.momentum:
        return None
    return float(optimizer.momentum)


def rate_of(optimizer: Any) -> float:
    """Return the learning rate that a compiled optimizer has now."""
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def check_model(model: Any) -> None:
    """Refuse what cannot be trained by exchanges at all.

    Raises:
        ConfigurationError: Another backend, no compiled model, several replicas, or loss scaling.
    """
    if keras.backend.backend() != "tensorflow":
        raise ConfigurationError(
            f"Keras runs on {keras.backend.backend()}; expected KERAS_BACKEND=tensorflow."
        )
    if getattr(model, "optimizer", None) is None:
        raise ConfigurationError(
            "the model is not compiled with an optimizer; call model.compile(...) first."
        )
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigurationError(
            "the model scales its loss, as mixed_float16 does; expected float32 or mixed_bfloat16."
        )
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise ConfigurationError(
            f"the model has {replicas} replicas by tf.distribute; expected one device a worker. "
            "Start a worker for each."
        )


def check_optimizer(optimizer: Any, method: Method, takes_momentum: bool) -> None:
    """Refuse an optimizer that does what neither the server nor the method will do.

    Plain SGD stands for whatever they do; else it must be what the server steps with.

    Args:
        optimizer: Compiled.
        method: Of the run.
        takes_momentum: Whether the method has taken over the optimizer's momentum.

    Raises:
        ConfigurationError: A setting that would have no effect.
    """
    compiled = optimizer.get_config()
    if not isinstance(compiled["learning_rate"], float):
        raise ConfigurationError(
            "the optimizer has a learning-rate schedule, which would count the steps of this "
            "worker alone; expected a number. Give the server --lr_schedule, or fit the callback "
            "LearningRateScheduler."
        )
    if takes_momentum:
        compiled["momentum"] = 0.0
    plain, server = keras.optimizers.SGD(), keras_optimizer(method.server)
    for known in (plain, server):
        if type(known) is type(optimizer) and not _differences(compiled, known.get_config()):
            return
    like = server if type(server) is type(optimizer) else plain
    if type(like) is not type(optimizer):
        raise ConfigurationError(
            f"the model is compiled with {type(optimizer).__name__}, but the server steps with "
            f"{type(server).__name__}; compile it with that or with SGD, or give all nodes a "
            "`server_optimizer`."
        )
    name = _differences(compiled, like.get_config())[0]
    instead = f"; instead there is {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise ConfigurationError(
        f"the optimizer's {name}={compiled[name]!r} would have no effect: the server steps. "
        f"Expected {like.get_config()[name]!r} here{instead}."
    )


def check_rate_change(rate: float, method: Method) -> None:
    """Refuse a learning rate that this worker's gradients cannot be scaled to.

    Raises:
        ConfigurationError: Not a rate, or the method does not step in proportion to gradients.
    """
    if not 0 <= rate < math.inf:
        raise ConfigurationError(f"learning_rate={rate:g}: expected a finite number from 0 on.")
    blind = (
        (method.server.optimizer == "adam", "--server_optimizer=adam"),
        (isinstance(method.weighting, DcAsgd), "--weighting=dc_asgd"),
        (method.takes_local_steps and method.local.optimizer == "adam", "--local_optimizer=adam"),
    )
    for is_used, flag in blind:
        if is_used:
            raise ConfigurationError(
                f"learning_rate={rate:g}: a worker changes its own rate by scaling its gradients, "
                f"to which steps are not in proportion with {flag}; expected none of "
                "LearningRateScheduler, ReduceLROnPlateau or the like. Give the server "
                "--lr_schedule."
            )


def check_variables(variables: Iterable[Any]) -> None:
    """Refuse constraints, which the server does not know of. Raises ConfigurationError."""
    for variable in variables:
        if variable.constraint is not None:
            raise ConfigurationError(
                f"{variable.path} has a constraint, which the server would not keep; expected "
                "none. Leave it out of the layer, or the variable out of W_global."
            )


def _differences(compiled: dict[str, Any], known: dict[str, Any]) -> list[str]:
    return [name for name in compiled if name not in _FREE and compiled[name] != known.get(name)]
