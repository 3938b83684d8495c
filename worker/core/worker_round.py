"""Order of a worker's computing, exchanging and waiting: a state machine without I/O.

A driver carries out an action of the machine and reports its result as an event, which returns the
next action. The worker's process, the session of a script and the Simulator are
drivers. Only a worker with `--overlap` computes a mini-batch while a push is under way.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.runtime.run.settings import Diverged
from thinwire.worker.core.core import WorkerCore
from thinwire.worker.core.messages import (
    NO_FIGURES,
    PushRequest,
    ScriptFigures,
    ShardReply,
    was_accepted,
)

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: Largest number of successive mini-batches that may be skipped or rejected. If there are more, the
#: training counts as diverged.
_MOST_IN_A_ROW = 100


class RoundStage(enum.Enum):
    """Activities of a worker in its rounds."""

    READY = "the next mini-batch, or the push of a round of local steps, is to begin"
    COMPUTING = "a mini-batch is computed; no push is under way"
    SENDING = "a push is sent"
    WAITING = "a push is under way; nothing is computed"
    AHEAD = "a mini-batch is computed while a push is under way"
    HELD = "a mini-batch is computed, and waits for the replies to the push under way"
    LOADING = "new weights are loaded; nothing is computed"
    LOADING_AHEAD = "new weights are loaded while a mini-batch is computed"
    LOADING_HELD = "new weights are loaded; a computed mini-batch follows"
    OVER = "the run has ended"


class RoundAction(enum.Enum):
    """Action of the driver, with the event that reports its result."""

    POLL = "query the pacer whether the round of local steps ends: polled"
    COMPUTE = "compute a mini-batch at the core's weights: computed, computed_ahead or refused"
    WAIT = "wait for the replies to the push under way: replied"
    LOAD_STEP = "load the core's weights after a local step: done"
    LOAD_ROUND = "load the core's weights and statistics after an exchange: done"
    END = "leave the run"


@dataclasses.dataclass(frozen=True)
class SendPush:
    """Action of the driver: send a request to all shards, then report `done`.

    Attributes:
        request: Request to all shards.
        ends_step: True if the newest mini-batch is in the request.
    """

    request: PushRequest
    ends_step: bool


@dataclasses.dataclass(frozen=True)
class Restore:
    """Action of the driver: undo the mini-batch that the error rejects, then report `done`."""

    error: NonFiniteUpdate


Action = RoundAction | SendPush | Restore


@dataclasses.dataclass(frozen=True)
class MiniBatch:
    """Result of a mini-batch.

    Attributes:
        values: [num_parameters] float32 gradient of the mean loss at the core's weights. If the
            method `steps_on_workers`, the weights after the script's step.
        samples: Number of training examples in the mini-batch.
        loss: Mean loss of the mini-batch; None if unknown.
        statistics: [m] float32 moving statistics (of batch normalization) after the mini-batch.
        computed_at: For each shard, the version of the weights that the gradient was computed at;
            None for the worker's current versions.
        figures: Settings of the mini-batch (learning rate, loss scale) from the script's optimizer.
    """

    values: Float32
    samples: int
    loss: float | None
    statistics: Float32 | None = None
    computed_at: Sequence[int] | None = None
    figures: ScriptFigures = NO_FIGURES


class WorkerRound:
    """Order of one worker's mini-batches and exchanges.

    Attributes:
        stage: Present activity of the worker.
        under_way: Request that the shards have not all answered; None if there is none.
        num_steps: Number of mini-batches that the core has received.
        num_non_finite: Number of mini-batches that the core rejected as not finite.
        loss: Mean loss of the newest mini-batch; None if unknown.

    Args:
        core: Training engine of the worker.
        has_examples: False if the worker has no training examples, so that it pushes empty updates.
    """

    def __init__(self, core: WorkerCore, has_examples: bool = True) -> None:
        self.core, self._has_examples = core, has_examples
        # A background thread exchanges the change by a script's own optimizer: it waits for the
        # replies while the script computes its next step.
        self._overlaps = core.method.overlap and has_examples and core.own is None
        self.stage = RoundStage.READY
        self.under_way: PushRequest | None = None
        self.num_steps = self.num_non_finite = 0
        self.loss: float | None = None
        self._held: MiniBatch | None = None
        self._unusable_in_a_row = 0

    @property
    def diverged(self) -> Diverged | None:
        """The error of a training that has diverged; None if it has not.

        Training diverges if too many successive mini-batches are unusable: not finite, or rejected
        by a shard as too large.
        """
        if self._unusable_in_a_row <= _MOST_IN_A_ROW:
            return None
        return Diverged(
            f"{self._unusable_in_a_row} mini-batches in a row had NaN or infinite gradients, or "
            "were rejected for their size; the model has diverged, or this device is faulty. Lower "
            f"the learning rate (now {self.core.learning_rate:g}), or check --max_update_norm and "
            "--update_norm_factor if they are in use."
        )

    def begin(self) -> Action:
        """Return the first action, after the worker has pulled the model."""
        self._enter(RoundStage.READY, RoundStage.READY)
        return self._next()

    def polled(self, is_due: bool) -> Action:
        """Report the pacer's answer: True if the round of local steps ends before another step."""
        self._enter(RoundStage.READY, RoundStage.READY)
        if is_due:
            return self.end_round()
        if not self._has_examples:
            return self._push(self.core.begin_empty(), ends_step=False)
        self.stage = RoundStage.COMPUTING if self.under_way is None else RoundStage.AHEAD
        return RoundAction.COMPUTE

    def settle(self) -> Action | None:
        """Begin no further mini-batch for now; return WAIT if a push is under way, else None.

        After `settle` and the replies, `begin` continues the training.
        """
        if self.stage in (RoundStage.COMPUTING, RoundStage.AHEAD):
            self.stage = RoundStage.READY
        if self.under_way is None or self.stage is not RoundStage.READY:
            return None
        self.stage = RoundStage.WAITING
        return RoundAction.WAIT

    def abandon(self) -> None:
        """Report that an exchange has failed: the worker exchanges nothing any more."""
        self.stage, self.under_way, self._held = RoundStage.OVER, None, None

    def end_training(self) -> Action | None:
        """Return the push of the codec's whole residual (unsent changes); None without one."""
        self._enter(RoundStage.READY, RoundStage.READY)
        request = self.core.end_training()
        return None if request is None else self._push(request, ends_step=False)

    def end_round(self) -> Action:
        """Return the push of the local steps that no push has sent, between two mini-batches."""
        self._enter(RoundStage.READY, RoundStage.READY)
        try:
            return self._push(self.core.end_round(), ends_step=False)
        except NonFiniteUpdate as error:
            return self._reject(error)

    def computed(self, batch: MiniBatch) -> Action:
        """Report a computed mini-batch."""
        if self.stage is RoundStage.AHEAD:
            self.stage, self._held = RoundStage.HELD, batch
            return RoundAction.WAIT
        self._enter(RoundStage.COMPUTING, RoundStage.READY)
        return self._take_in(batch)

    def computed_ahead(self) -> Action:
        """Report a mini-batch that the core has received already: a local step."""
        self._enter(RoundStage.COMPUTING, RoundStage.LOADING)
        self.num_steps += 1
        self._record(is_usable=True)
        return RoundAction.LOAD_STEP

    def refused(self, error: NonFiniteUpdate) -> Action:
        """Report a mini-batch that the core has rejected already."""
        self._enter(RoundStage.COMPUTING, RoundStage.READY)
        self.num_steps += 1
        return self._reject(error)

    def done(self) -> Action | None:
        """Report that a push is sent, or that weights are loaded or restored.

        Returns:
            The next action; None if the next event is `computed` or `replied`.
        """
        if self.stage is RoundStage.SENDING:
            self.stage = RoundStage.READY if self._overlaps else RoundStage.WAITING
            return self._next() if self._overlaps else RoundAction.WAIT
        if self.stage is RoundStage.LOADING_AHEAD:
            self.stage = RoundStage.COMPUTING
            return None
        is_held = self.stage is RoundStage.LOADING_HELD
        held, self._held = self._held, None
        self.stage = RoundStage.READY
        if is_held and held is not None and not self.core.stopped:
            return self._take_in(held)
        return self._next()

    def replied(self, replies: Sequence[ShardReply | None]) -> Action:
        """Report the shards' replies to the push under way, in the order of the shards."""
        after = {
            RoundStage.WAITING: RoundStage.LOADING,
            RoundStage.READY: RoundStage.LOADING,
            RoundStage.AHEAD: RoundStage.LOADING_AHEAD,
            RoundStage.HELD: RoundStage.LOADING_HELD,
        }
        if self.under_way is None or self.stage not in after:
            raise RuntimeError(f"replies without a push ({self.stage})")
        self.under_way, self.stage = None, after[self.stage]
        self.core.settle(replies)
        self._record(was_accepted(replies))
        return RoundAction.LOAD_ROUND

    def _next(self) -> Action:
        if self.core.stopped or self.diverged is not None:
            self.stage = RoundStage.OVER
            return RoundAction.END
        return RoundAction.POLL

    def _take_in(self, batch: MiniBatch) -> Action:
        self.num_steps += 1
        self.loss = batch.loss
        try:
            request = self.core.begin(
                batch.values,
                batch.samples,
                batch.loss,
                batch.statistics,
                batch.computed_at,
                batch.figures,
            )
        except NonFiniteUpdate as error:
            return self._reject(error)
        if request is not None:
            return self._push(request, ends_step=True)
        self._record(is_usable=True)
        self.stage = RoundStage.LOADING
        return RoundAction.LOAD_STEP

    def _push(self, request: PushRequest, ends_step: bool) -> Action:
        if self.under_way is not None:
            raise RuntimeError("a push while another one is under way")
        self.under_way, self.stage = request, RoundStage.SENDING
        return SendPush(request, ends_step)

    def _reject(self, error: NonFiniteUpdate) -> Action:
        self.num_non_finite += 1
        self._record(is_usable=False)
        self.stage = RoundStage.LOADING
        return Restore(error)

    def _record(self, is_usable: bool) -> None:
        self._unusable_in_a_row = 0 if is_usable else self._unusable_in_a_row + 1

    def _enter(self, before: RoundStage, after: RoundStage) -> None:
        if self.stage is not before:
            raise RuntimeError(f"this event belongs to {before}, not to {self.stage}")
        self.stage = after
