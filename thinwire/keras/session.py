"""The worker behind a distributed model: ``model.thinwire``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from thinwire import interrupts
from thinwire.gradient_sgd import RATE_TOLERANCE, warn_of_other_rate
from thinwire.keras.checks import (
    check_optimizer,
    check_rate_change,
    check_variables,
    momentum_of,
)
from thinwire.keras.step import ExchangeStep, WeightsChanged
from thinwire.models.flat_model import FlatVariables, SharedModel
from thinwire.ops.sharding.w_global import shared_variables
from thinwire.ops.types import ConfigurationError
from thinwire.session import LeavesOnExit, Session, StepInfo, part_of
from thinwire.settings import ScriptSettings, read_settings

if TYPE_CHECKING:
    import keras

    from thinwire.ops.types import Float32


class ModelSession(LeavesOnExit):
    """A model's part in a run, over all calls of its `fit`.

    Attributes:
        model: The Keras model.
        last: What became of the newest step; None before the first.
    """

    def __init__(
        self,
        model: keras.Model,
        settings: ScriptSettings | None = None,
        args: Any = None,
        keywords: Mapping[str, Any] | None = None,
        num_train: int | None = None,
    ) -> None:
        """Use `thinwire.distribute`; without settings the model trains alone."""
        self.model = model
        self.last: StepInfo | None = None
        self._settings = settings
        self._given, self._num_train = (args, dict(keywords or {})), num_train
        self._session: Session | None = None
        self._step: ExchangeStep | None = None
        self._lock = threading.Lock()  # of the session: TensorFlow's thread and the script's
        self._failure: Exception | None = None
        self._in_fit = False
        self._num_batches = 0  # begun in this `fit`
        self._num_calls = 0  # of `exchange`, in this `fit`
        self._rate = 0.0  # as last written into the optimizer, or compiled
        self._rate_factor = 1.0  # this worker's learning rate over the run's
        if settings is not None:
            self._prepare()

    @property
    def active(self) -> bool:
        """Whether the model trains with others."""
        return self._settings is not None

    @property
    def stopped(self) -> bool:
        """Whether the run has ended."""
        return self._session is not None and self._session.stopped

    @property
    def stop_reason(self) -> str:
        """Why it ended; empty while it goes on."""
        return "" if self._session is None else self._session.stop_reason

    @property
    def num_exchanges(self) -> int:
        """Exchanges begun, over all calls of `fit`."""
        return 0 if self._session is None else self._session.part.core.step

    def shard(self, *data: Any) -> Any:
        """Return this worker's part of a training set; all, where the model is alone.

        See `thinwire.session.part_of`.
        """
        if self._settings is None:
            return data[0] if len(data) == 1 else data
        return part_of(self._settings, data)

    def close(self, cause: str = "done") -> None:
        """Leave the run; the model stays usable, and `fit` joins again."""
        interrupts.remove_listener(self._interrupt)
        with self._lock:
            if self._session is not None:
                self._session.close(cause)

    # -- one `fit` ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def fitting(self) -> Iterator[None]:
        """Be ready for one call of `fit`; leave the run if it fails."""
        self._prepare()
        self._failure, self._num_batches, self._num_calls = None, 0, 0
        self._in_fit = True
        try:
            yield
        except BaseException:
            self.close("error")
            raise
        finally:
            self._in_fit = False

    def begin_fit(self) -> None:
        """Join before the first step."""
        self._join(self._new_session)

    def begin_batch(self) -> None:
        """Count a mini-batch, or several in one execution; raise what went wrong before."""
        self.raise_failure()
        self._num_batches += 1

    def raise_failure(self) -> None:
        """Raise what went wrong in an exchange, where TensorFlow would have swallowed it."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def end_fit(self) -> None:
        """Leave the run after the last step.

        Raises:
            ConfigurationError: There were steps, and none of them reached the run.
        """
        self.raise_failure()
        if self._num_batches and not self._num_calls:
            raise ConfigurationError(
                f"{self._num_batches} steps of {self.model.name!r} exchanged nothing: its "
                "train_step never reached the compiled optimizer, so this worker trained alone. "
                "Expected self.optimizer.apply_gradients(...) in each step."
            )
        self.close("done")
        if self.stopped:
            logging.info("fit ended with the run (%s)", self.stop_reason or "interrupted")

    def _prepare(self) -> None:
        """Stand in for the compiled optimizer, whichever that is now."""
        model, step = self.model, self._step
        optimizer = getattr(model, "optimizer", None)
        if optimizer is None or (step is not None and step.optimizer is optimizer):
            return
        self._settings = self._settings_for(optimizer)
        self._step = ExchangeStep(optimizer, self)
        self._rate = 0.0 if self._step.rate is None else float(self._step.rate.numpy())
        if model.jit_compile:
            logging.warning("jit_compile is switched off: XLA cannot compile an exchange")
        model.jit_compile = False

    def _settings_for(self, optimizer: Any) -> ScriptSettings:
        """Return the settings, with the compiled optimizer's momentum where the method has one."""
        args, keywords = self._given
        chosen = read_settings(args, keywords, type_node="Worker")
        momentum = momentum_of(optimizer)
        is_servers = momentum in (None, chosen.run.method.server.momentum)
        if not is_servers:
            chosen = read_settings(args, keywords, type_node="Worker", momentum=momentum)
        check_optimizer(optimizer, chosen.run.method, takes_momentum=not is_servers)
        return chosen

    # -- one step, traced or eager ------------------------------------------------------------

    @property
    def variables(self) -> list[Any]:
        """The shared variables, in order."""
        return self._joined.shared.variables

    @property
    def flat_variables(self) -> FlatVariables:
        """The same as one vector."""
        return self._joined.variables

    @property
    def flat_statistics(self) -> FlatVariables:
        """The moving statistics that are averaged over the workers; may be empty."""
        return self._joined.statistics

    def shared_variables(self) -> list[Any]:
        """Return the variables that are or will be shared."""
        if self._session is not None:
            return self.variables
        return shared_variables(self.model)

    def train_step(self, train_step: Callable[[Any], Any], data: Any) -> Any:
        """Call the model's own `train_step`, whose `apply` then comes here."""
        self.check_in_fit()
        step = self._step
        if step is None or step.optimizer is not self.model.optimizer:
            raise ConfigurationError(
                "the model was compiled while its fit was running; compile it before or after."
            )
        try:
            return step.run(train_step, data)
        except WeightsChanged:  # only where steps run eagerly: the first one of the first fit
            self.model.reset_metrics()
            return step.run(train_step, data)

    def check_in_fit(self) -> None:
        """Refuse steps outside of `fit`, which would have to train alone.

        Raises:
            ConfigurationError: No `fit` of the model is running.
        """
        if not self._in_fit:
            raise ConfigurationError(
                f"{self.model.name!r} is trained by train_on_batch or a loop of its own; expected "
                "model.fit(...). For such loops use thinwire.GradientSGD in the place of the "
                "optimizer, and leave thinwire.distribute() out."
            )

    def join(self, pairs: Sequence[tuple[Any, Any]]) -> bool:
        """Join at the first step, given its gradients, symbolic or not, and variables.

        Returns:
            Whether the model has other weights than before.
        """
        del pairs
        if self._session is not None:
            return False
        before = SharedModel.of(self.model).flat()
        self._join(self._new_session)
        return not np.array_equal(before, self._joined.weights)

    def exchange(
        self, gradient: Float32, rows: int, loss: float, statistics: Float32, rate: float
    ) -> tuple[Float32, Float32, np.float32]:
        """Step; called by TensorFlow, in a thread of its own, where an exception would be lost.

        Args:
            gradient: [num_parameters] float32, a view into TensorFlow's own.
            rows: Examples in the mini-batch.
            loss: Its mean loss.
            statistics: [m] float32 moving statistics after it.
            rate: The optimizer's learning rate; a callback may have changed it.

        Returns:
            weights [num_parameters], statistics [m] and learning rate to go on from.
        """
        session = self._joined
        with self._lock:
            if not self.model.stop_training:  # else the rest of several steps in one execution
                self._try_step(np.array(gradient), int(rows), float(loss), statistics, float(rate))
            self._rate = session.part.core.learning_rate * self._rate_factor
            return session.weights.copy(), session.means.copy(), np.float32(self._rate)

    def _try_step(self, *arguments: Any) -> None:
        session = self._joined
        self._num_calls += 1
        try:
            if not session.stopped:
                self._one_step(session, *arguments)
        except Exception as error:  # noqa: BLE001 - `fit` raises it before its next batch
            self._failure = error
        finally:
            if self._failure is not None or session.stopped:
                self.model.stop_training = True

    def _one_step(
        self,
        session: Session,
        gradient: Float32,
        rows: int,
        loss: float,
        statistics: Float32,
        rate: float,
    ) -> None:
        if abs(rate - self._rate) > RATE_TOLERANCE * abs(self._rate):
            self._take_rate(session, rate)
        self.last = session.step(gradient, rows, loss, statistics, self._rate_factor)

    def _take_rate(self, session: Session, rate: float) -> None:
        """Step with a learning rate that a callback or the script has set."""
        factor = rate / session.part.core.learning_rate
        if abs(factor - 1) <= RATE_TOLERANCE:
            factor = 1.0
        if factor != self._rate_factor:
            check_rate_change(rate, session.settings.run.method)
        self._rate_factor = factor

    # -- joining ------------------------------------------------------------------------------

    @property
    def _joined(self) -> Session:
        if self._session is None:
            raise RuntimeError("the model has not joined a run yet")
        return self._session

    def _new_session(self) -> Session:
        shared = SharedModel.of(self.model)
        check_variables(shared.variables)
        if self._settings is None:
            raise RuntimeError("the model trains alone")
        return Session(self._settings, shared, self._num_train)

    def _join(self, make: Callable[[], Session]) -> None:
        """Join or join again, and take over the server's weights."""
        with self._lock:
            session = self._session
            if session is not None and session.part.closing.is_set():  # `fit` was interrupted
                session.close("interrupted")
                session.renew()
            is_first = session is None
            session = session or make()
            if not session.stopped and session.open():
                interrupts.add_listener(self._interrupt)
            self._session = session
            session.assign()
        if is_first and self._step is not None and self._step.rate is not None:
            self._adopt_rate(session, self._step)

    def _adopt_rate(self, session: Session, step: ExchangeStep) -> None:
        """Go on with the server's learning rate, unless the script has set one since `compile`."""
        now = float(step.rate.numpy())
        if abs(now - self._rate) > RATE_TOLERANCE * abs(self._rate):
            return
        warn_of_other_rate("the optimizer's learning_rate", now, session)
        self._rate = session.part.core.learning_rate
        step.assign_rate(self._rate)

    def _interrupt(self) -> None:
        if self._session is not None:
            self._session.part.interrupt()
