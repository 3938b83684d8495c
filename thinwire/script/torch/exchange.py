"""The steps of torch optimizers in a run: push gradients or weights, load the servers' weights."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from absl import logging

from thinwire.ops.push_head import PushHead
from thinwire.ops.types import ConfigurationError
from thinwire.script.data.place import BatchParts, WorkerPlace
from thinwire.script.own_changes import (
    assigned_by_script,
    changed_by_script,
    takes_changes,
)
from thinwire.script.session import Session
from thinwire.script.settings import ScriptSettings
from thinwire.script.steps import EpochTraffic, RunOver, StepInfo
from thinwire.script.torch.groups import check_numbers, momentum_for, numbers_now
from thinwire.script.torch.modules import gradients_of
from thinwire.script.torch.optimizers import StepArguments, SteppedOptimizer
from thinwire.script.torch.phase import TorchPhase
from thinwire.worker.core.messages import ScriptFigures
from thinwire.worker.core.worker_round import MiniBatch

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: Number of local steps after which the weights are exchanged even if an optimizer of the script
#: has not stepped: a loop may call one of its optimizers rarely.
_MOST_PENDING = 8


class TorchExchange:
    """Takes the steps of a script's optimizers with the other workers.

    Attributes:
        last: Result of the newest exchange with the servers; None before the first step.
        traffic: Sums of the bytes and the staleness of all exchanges.

    Args:
        settings: Settings of the script.
        lock: Lock of the session with the servers.
    """

    def __init__(self, settings: ScriptSettings, lock: threading.Lock) -> None:
        self._settings, self._lock = settings, lock
        self.last: StepInfo | None = None
        self.traffic = EpochTraffic()
        # numbers of the optimizers, in the order of their first steps
        self._cycle: list[int] = []
        # number of steps on this worker since the last exchange of weights
        self._num_pending = 0
        self._num_batches = 0
        # momentum of SGD that the workers' codecs apply; None before the first step
        self._momentum: float | None = None
        self._has_warned = False

    def step(
        self,
        session: Session,
        phase: TorchPhase,
        number: int,
        given: StepArguments,
        is_valid: bool,
    ) -> Any:
        """Do a step of an optimizer with the other workers; return the closure's loss, if any.

        Args:
            session: Session with the servers, which has joined the run.
            phase: The parameters and optimizers that the run trains.
            number: Number of the optimizer in the phase.
            given: Arguments of the script's call of the step.
            is_valid: False if joining the run has replaced the weights of the gradients. The worker
                then takes part with no gradient.
        """
        run = self._step_here if session.takes_weights else self._push_gradients
        return run(session, phase, number, given, is_valid)

    def _push_gradients(
        self,
        session: Session,
        phase: TorchPhase,
        number: int,
        given: StepArguments,
        is_valid: bool,
    ) -> Any:
        """Push the gradients of a step; the PS takes the step."""
        step, groups, own = phase.steps[number], phase.groups[number], phase.own[number]
        if given.args or given.keywords:
            raise ConfigurationError(
                f"the script calls {step.kind.__name__}.step with further arguments, which a PS "
                "does not know; expected at most a closure."
            )
        loss = given.evaluated()
        is_skipped = step.unscale() or not is_valid
        change = changed_by_script(session, session.variables.read(), "the module", is_exact=True)
        gradient, without, touched = gradients_of(phase.view, phase.shared.variables)
        if is_skipped:
            gradient[:] = 0
        elif len(phase.steps) > 1:
            gradient = _part_of(gradient, phase, number)
        settings = numbers_now(step.optimizer, groups.kind)
        check_numbers(groups, settings)
        absent = set(own if is_skipped else without)
        head = self._head(
            is_repeated=number > 0,
            optimizer=number,
            settings=settings,
            without_gradient=tuple(n for n, variable in enumerate(own) if variable in absent),
        )
        rows = {variable: rows for variable, rows in touched.items() if variable in own}
        figures = ScriptFigures(head, rows, change)
        self._send(session, phase, number, gradient, None if is_skipped else loss, figures)
        return loss

    def _step_here(
        self,
        session: Session,
        phase: TorchPhase,
        number: int,
        given: StepArguments,
        is_valid: bool,
    ) -> Any:
        """Step on this worker, then exchange weights with the servers."""
        step, loss, change = phase.steps[number], None, self._own_change(session)
        is_skipped = step.unscale() or not is_valid
        if not is_skipped:
            self._pull_to_base(session, step)
            with self._without_momentum(phase, step):
                loss = step.step_alone(given)
        if self._is_due(number, len(phase.steps)):
            figures = ScriptFigures(self._head(), change=change)
            values = session.variables.read()
            self._send(session, phase, number, values, loss, figures, is_skipped)
        return loss

    def _send(
        self,
        session: Session,
        phase: TorchPhase,
        number: int,
        values: Float32,
        loss: Any,
        figures: ScriptFigures,
        is_skipped: bool = False,
    ) -> None:
        """Exchange the values of a step, and load the new weights into the modules."""
        whole = len(phase.own[number])
        is_skipped = is_skipped or len(figures.head.without_gradient) == whole
        statistics, samples = session.statistics.read(), 0 if is_skipped else 1
        batch = MiniBatch(values, samples, _number(loss), statistics, figures=figures)
        stepped = {id(parameter) for parameter in phase.steps[number].parameters}
        with self._lock:
            with contextlib.suppress(RunOver):
                self.last = session.part.step(batch)
                self.traffic.add(self.last)
            phase.view.assign(session.weights, stepped)
            session.statistics.assign(session.means)

    def _head(self, is_repeated: bool = False, **more: Any) -> PushHead:
        """Return the numbers of a step's push.

        Args:
            is_repeated: True if an earlier step of the loop's iteration counts the mini-batch.
            **more: Further fields of the head.
        """
        self._num_batches += not is_repeated
        parts = self._batch_parts.of_step(max(0, self._num_batches - 1))
        return PushHead(repeats_batch=is_repeated, batch_parts=parts, **more)

    @functools.cached_property
    def _batch_parts(self) -> BatchParts:
        return BatchParts.alike(WorkerPlace.of(self._settings.run, 1).in_loop())

    def _own_change(self, session: Session) -> Float32 | None:
        """Return by how much the script itself has changed weights since the newest exchange.

        In a round of local steps, the script's changes are part of the round's change of weights.
        """
        run = self._settings.run
        if run.method.takes_local_steps or self._num_pending or not takes_changes(run):
            return None
        held, known = session.variables.read(), session.part.sent_weights
        is_same = np.array_equal(held, known, equal_nan=True)
        return assigned_by_script(session, None if is_same else held - known, is_exact=True)

    def _pull_to_base(self, session: Session, step: SteppedOptimizer) -> None:
        """Add mu (w - b), the gradient of FedProx's mu / 2 |w - b|^2, to gradients.

        In the formula, w are a parameter's weights, and b its weights at the start of the round.
        """
        mu = self._settings.run.method.local.prox_mu
        if mu:
            own = {id(parameter) for parameter in step.parameters}
            for parameter, base in session.variables.parts(session.part.core.base.copy()):
                if parameter.grad is not None and id(parameter) in own:
                    parameter.grad.add_(parameter.detach() - base, alpha=mu)

    @contextlib.contextmanager
    def _without_momentum(self, phase: TorchPhase, step: SteppedOptimizer) -> Iterator[None]:
        """Set SGD's momentum to 0 in the `with` block if the training method applies it."""
        groups = step.optimizer.param_groups
        momenta = [group.get("momentum") for group in groups]
        taken = momentum_for(phase.steps, self._settings.run.method)
        if self._momentum is None:
            self._momentum = taken
        is_taken = self._momentum > 0
        if is_taken and taken != self._momentum and not self._has_warned:
            self._has_warned = True
            logging.warning(
                "the script has changed SGD's momentum from %g to %g, but with this method the "
                "workers' codecs keep the first one (OneCycleLR: cycle_momentum=False)",
                *(self._momentum, taken),
            )
        for group in groups if is_taken else ():
            group["momentum"] = 0.0
        try:
            yield
        finally:
            for group, momentum in zip(groups, momenta, strict=True) if is_taken else ():
                group["momentum"] = momentum

    def _is_due(self, number: int, num_optimizers: int) -> bool:
        """Return True if an exchange follows a step on this worker.

        Weights are exchanged once per iteration of the loop: after the step of the optimizer that
        was the last one to take its first step.
        """
        if number not in self._cycle:
            self._cycle.append(number)
        self._num_pending += 1
        is_whole = len(self._cycle) == num_optimizers
        is_due = (is_whole and number == self._cycle[-1]) or self._num_pending >= _MOST_PENDING
        if is_due:
            self._num_pending = 0
        return is_due


def _number(loss: Any) -> float | None:
    """Return the loss of a closure as a number; None if it is unknown or no scalar."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return float(loss.detach())
    return float(loss) if isinstance(loss, int | float) else None


def _part_of(gradient: Float32, phase: TorchPhase, number: int) -> Float32:
    """Return a gradient [num_parameters] with zeros for the parameters of other optimizers."""
    offsets, kept = phase.shared.spec.offsets, np.zeros_like(gradient)
    for variable in phase.own[number]:
        part = slice(offsets[variable], offsets[variable + 1])
        kept[part] = gradient[part]
    return kept
