"""Connects a script as a worker: pushes gradients or weights as flat vectors, pulls weights."""

from __future__ import annotations

import abc
import atexit
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from thinwire.models.flat_view import FlatView, SharedWeights
from thinwire.ops.codecs.base import Codec
from thinwire.ops.codecs.error_feedback import wrappers_of
from thinwire.ops.codecs.wrappers import WarmUp
from thinwire.ops.offer import Offer
from thinwire.ops.optimizers.slots import Slot
from thinwire.ops.types import ConfigurationError, State
from thinwire.script.central_state import SlotsOf, own_slots_of
from thinwire.script.data.fit_counts import FitNumber
from thinwire.script.data.place import WorkerPlace
from thinwire.script.settings import ScriptSettings
from thinwire.script.steps import ScriptWorker
from thinwire.worker.client.offering import Offering
from thinwire.worker.client.shard_client import ShardGone
from thinwire.worker.script import RECORD

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class LeavesOnExit(contextlib.AbstractContextManager[Any]):
    """Base class of objects of a worker that leave the run at the end of a ``with`` block."""

    @abc.abstractmethod
    def close(self, cause: str = "done") -> None:
        """End this worker's membership in the run; the model keeps its current weights."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close("done" if kind is None else "error")


class Session:
    """Worker of a script, which joins the run, takes training steps, leaves, and may join again.

    Args:
        settings: Settings of the training run and of this worker.
        shared: The script's model, with the variables that all workers train as one flat vector.
        num_train: Number of examples in the whole training set, by which a codec's warm-up counts
            epochs; None if unknown.
        momentum: Momentum of the script's SGD if the training method applies momentum itself. The
            script's optimizer then steps without momentum.
        offer: Description of the script's model that the worker sends to shards without a model;
            None if the shards build the model from their flags.
        optimizers: Optimizers of the script that a PS runs, without their loss-scaling wrappers, in
            the order in which the PS knows them. Empty: the optimizers run on the worker.
        before: Session of this worker in the previous phase of the run; None in the first phase. In
            a phase, the model and its optimizers do not change.
        phase: Number of the run's phase that this script is in, from 0, which the worker sends in
            its Hello message.
        check_offer: Function that is called with the session before the worker sends the model's
            description to a shard, and that raises an error to forbid it.
        kept: Function of the session and the number of the last step that the shards applied. It
            returns the saved engine state of the previous process after that step, or None if no
            such state was saved.
        slots_of: Function that returns the slots (state arrays) of the script's optimizers, from
            the offer, the optimizers and the shared variables.

    Raises:
        ConfigurationError: The codec warms up over epochs, and `num_train` is missing. Or this
            worker sends weights, and its settings request weight decay or clipping, which apply to
            gradients.
    """

    def __init__(
        self,
        settings: ScriptSettings,
        shared: SharedWeights,
        num_train: int | None = None,
        momentum: float = 0.0,
        offer: Offer | None = None,
        optimizers: Sequence[Any] = (),
        before: Session | None = None,
        phase: int = 0,
        kept: Callable[[Session, int], State | None] = lambda session, last_step: None,
        check_offer: Callable[[Session], None] = lambda session: None,
        slots_of: SlotsOf = own_slots_of,
    ) -> None:
        self.settings, self.shared = settings, shared
        self.own = settings.worker()
        run = settings.run
        self.variables: FlatView = shared.view(shared.variables)
        statistics = shared.statistics if run.method.bn_sync else []
        self.statistics: FlatView = shared.view(statistics)
        self._num_train = needed_size(run.method.codec, num_train)
        self._momentum = momentum
        self._offering: Offering | None = None
        if offer is not None:
            described = offer.optimizers
            if not optimizers:
                described = tuple(
                    dataclasses.replace(each, iterations=0, has_slots=False) for each in described
                )
            made = dataclasses.replace(offer, statistics=self.statistics.size, optimizers=described)

            def weights() -> Float32:
                check_offer(self)
                return self.variables.read()

            def slots() -> list[list[Slot]]:
                found = slots_of(made, optimizers, shared.variables)
                return [own_slots.collect() for own_slots in found]

            self._offering = Offering(
                made,
                weights,
                self.statistics.read,
                slots,
                phase,
                before.part.run_id if before is not None else "",
                RECORD.program,
            )
        if self.takes_weights and (self.own.weight_decay or self.own.clip_norm):
            raise ConfigurationError(
                "--worker_weight_decay and --clip_norm change gradients, but with "
                "--local_optimizer=script the script's optimizer has already applied the "
                "unchanged gradients. Leave the two flags out, and give that optimizer "
                "weight_decay, clipnorm or global_clipnorm."
            )
        self._present = False
        # saved engine state of this worker's previous incarnation (process)
        self._saved: State | None = None
        self._kept = kept
        self.part: ScriptWorker = self._new_part(self.statistics.read())
        if before is not None:
            self.part.before, self.part.steps.loss = before.part.metrics(), before.part.steps.loss

    @property
    def stopped(self) -> bool:
        """True if the run has ended or this worker's process was interrupted."""
        return self.part.stopped

    @property
    def stop_reason(self) -> str:
        """Reason why the run ended, as reported by a shard; an empty text before the run's end."""
        return self.part.stop_reason

    @property
    def weights(self) -> Float32:
        """Weights [num_parameters] float32 for the next gradient; the array may not be a copy."""
        return self.part.weights

    @property
    def means(self) -> Float32:
        """Averaged moving statistics at the start of the next step: [m] float32, not a copy."""
        return self.part.means

    @property
    def offer(self) -> Offer | None:
        """Description of the model for shards without a model; None if the shards have a model."""
        return None if self._offering is None else self._offering.offer

    @property
    def has_run_s_values(self) -> bool:
        """True if the script has not changed weights and statistics since the run wrote them."""
        values = ((self.variables, self.weights), (self.statistics, self.means))
        return all(
            np.array_equal(flat.read(), run_values, equal_nan=True) for flat, run_values in values
        )

    @property
    def phase(self) -> int:
        """Number of the run's phase that this script is in, from 0, sent in its Hello message."""
        return 0 if self._offering is None else self._offering.phase

    def go_to_phase(self, phase: int) -> None:
        """Start a new incarnation of this worker, in the phase of the run with number `phase`."""
        if self._offering is not None:
            self._offering = dataclasses.replace(self._offering, phase=phase)
        self.renew()

    def stay_behind(self) -> None:
        """Use the model's own values as weights: the run is in a later phase than this script."""
        self.part.unsent_change = None
        np.copyto(self.part.core.weights, self.variables.read())
        np.copyto(self.means, self.statistics.read())

    def end_as(self, before: Session) -> None:
        """Use the model's own values without joining: the run ended in the session `before`."""
        self.stay_behind()
        self.part.core.stopped = True
        self.part.core.stop_reason = before.stop_reason

    def open(self) -> bool:
        """Join the run, or join it again after `close`; do nothing if this worker has joined.

        Returns:
            True if joining has replaced the weights. Gradients computed at the weights before the
            call are then useless.

        Raises:
            Unreachable: No parameter server answers this worker.
            Refused: The parameter server rejects this worker.
            ConfigurationError: The server averages different moving statistics than this worker
                has.
        """
        if self._present:
            return False
        if self.part.run_id:
            self.renew()
        last = self.part.join()
        saved = self._kept(self, last) if self._saved is None else self._saved
        if saved is not None and not self.part.core.restore(saved, last):
            logging.warning(
                "this worker's saved state is from step %d, but the PS shards have applied step "
                "%d: dropping the codec's residual (the unsent part of earlier updates)",
                *(saved["step"], last),
            )
        self._present = True
        atexit.register(self.close, "error")
        try:
            self.part.begin()
        except ShardGone:
            self.part.core.stopped = True
        except BaseException:
            self.close("error")
            raise
        return True

    def shard(self, *data: Any) -> Any:
        """Return this worker's part of a training set, by the function `part_of`."""
        return part_of(self.settings, data)

    def assign(self, values: tuple[Float32, Float32] | None = None) -> None:
        """Write weights and averaged statistics into the model.

        Args:
            values: Weights [num_parameters] and statistics [m] to write; None: this worker's own
                values.
        """
        weights, statistics = (self.weights, self.means) if values is None else values
        self.variables.assign(weights)
        self.statistics.assign(statistics)

    @property
    def takes_weights(self) -> bool:
        """True if `step` takes weights instead of gradients: the optimizer runs on this worker."""
        return self.settings.run.method.steps_on_workers

    def close(self, cause: str = "done") -> None:
        """Leave the run and report the cause to the PS; do nothing before this worker joins."""
        if not self._present:
            return
        self._present = False
        atexit.unregister(self.close)
        if self.part.steps.diverged is not None:
            cause = "diverged"
        elif cause == "error" and self.stopped:
            cause = "interrupted" if self.part.closing.is_set() else "done"
        self.part.cut()
        self._saved = self.part.core.save()
        self.part.leave(cause)
        logging.info("this worker left the run after %d exchanges (%s)", self.part.core.step, cause)

    def _new_part(self, statistics: Float32) -> ScriptWorker:
        """Return the session of a new incarnation (one process) of this worker, not joined yet.

        Most scripts' gradients arrive as arrays in host memory, from any thread, so by default the
        codec's kernels run on the host. `GradientSGD` leaves gradients on the device if --kernels
        names the framework that computes them.
        """
        return ScriptWorker(
            self.settings.run,
            self.own,
            self.shared.spec,
            statistics,
            num_examples=self._num_train,
            momentum=self._momentum,
            offering=self._offering,
        )

    def renew(self) -> None:
        """Give this worker a new incarnation id, as if its process had been restarted."""
        old = self.part
        self.part = self._new_part(self.means)
        # weights that are used until the PS sends its weights
        np.copyto(self.part.core.weights, old.core.weights)
        self.part.before, self.part.steps.loss = old.metrics(), old.steps.loss
        self.part.left_out, self.part.background = old.left_out, old.background


def part_of(settings: ScriptSettings, data: Sequence[Any], fit: FitNumber | None = None) -> Any:
    """Return a worker's part of a training set; the parts of all workers are disjoint.

    Args:
        settings: Settings of the training run and of this worker.
        data: Training data, equal on all workers: arrays [N, ...] in any nesting, or one
            tf.data.Dataset, keras.utils.PyDataset, torch DataLoader or ray.data.Dataset. Some
            values of --partition use the last arrays as labels.
        fit: Position of this use of the data among the script's uses, which enters the seeds of
            shuffles; None if unknown.

    Returns:
        A tuple with the part of each array; for one array or dataset, its part alone.

    Raises:
        ConfigurationError: Thinwire cannot show that the workers' parts are disjoint and complete,
            or a part is empty.
    """
    from thinwire.script.data.data import part_of_data

    place = WorkerPlace.of(settings.run, settings.worker().id_worker)
    return part_of_data(tuple(data), dataclasses.replace(place, fit=fit))


def needed_size(codec: Codec, num_train: int | None) -> int:
    """Return the number of training examples; 0 if it is unknown and the codec does not need it.

    Raises:
        ConfigurationError: The codec warms up over epochs, and the number of training examples is
            missing.
    """
    warms_up = any(isinstance(wrapper, WarmUp) for wrapper in wrappers_of(codec))
    if warms_up and not num_train:
        raise ConfigurationError(
            f"num_train={num_train}: the codec sends more entries in the first epochs, so it "
            "needs the size of the training set; give all nodes num_train, or warmup_epochs=0."
        )
    return num_train or 0
