"""Delay compensation: a stale gradient is carried on to where the weights are now."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.ops.types import ConfigurationError, State, Update, where_of
from thinwire.ops.weighting.base import Arrival, ReleaseContext

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: --dcasgd_variant value -> lambda when --dcasgd_lambda is not given.
DEFAULT_LAMBDAS = {"constant": 0.04, "adaptive": 2.0}
DEFAULT_DECAY = 0.95
BACKUPS = ("per_worker", "global_prev")

#: Whose mean square it is where all workers share one.
_EVERYBODY = "all"


@dataclasses.dataclass(frozen=True)
class DcAsgd:
    """Add L * g * g * (theta - base) to a gradient g that was computed at `base`.

    The diagonal of g g^T stands for the Hessian in a first-order step from `base` to theta. Of a
    sparse update the entries sent are compensated. An update whose base is not known (its worker
    had left, and returns with it) counts as it is.

    Attributes:
        dcasgd_lambda: Strength of the compensation; None takes the variant's default.
        dcasgd_variant: ``constant``: L = lambda. ``adaptive``: L = lambda / sqrt(m + 1e-7), m the
            running mean of g * g per entry and worker.
        dcasgd_decay: Of that mean, from 0 to below 1; None is 0.95.
        dcasgd_backup: What `base` is. ``per_worker``: the very weights that the gradient was
            computed at. ``global_prev``: the weights before the shard's latest step, whoever
            pushes; m is then one for all workers too.

    Source: Zheng et al. (ICML 2017), equations 10 and 14; docs/methods/grouping_sgd.md.
    """

    dcasgd_lambda: float | None = None
    dcasgd_variant: str = "constant"
    dcasgd_decay: float | None = None
    dcasgd_backup: str = "per_worker"

    def __post_init__(self) -> None:
        """Refuse unknown words, numbers out of range, and a decay that nothing would use."""
        _check_word("dcasgd_variant", self.dcasgd_variant, tuple(DEFAULT_LAMBDAS))
        _check_word("dcasgd_backup", self.dcasgd_backup, BACKUPS)
        if self.dcasgd_lambda is not None and not 0 <= self.dcasgd_lambda < float("inf"):
            raise ConfigurationError(
                f"--dcasgd_lambda={self.dcasgd_lambda}: expected a finite number from 0 on."
            )
        if self.dcasgd_decay is None:
            return
        if not 0 <= self.dcasgd_decay < 1:
            raise ConfigurationError(
                f"--dcasgd_decay={self.dcasgd_decay}: expected a number from 0 to below 1."
            )
        if self.dcasgd_variant != "adaptive":
            raise ConfigurationError(
                f"--dcasgd_decay={self.dcasgd_decay} is for --dcasgd_variant=adaptive, and this "
                f"is --dcasgd_variant={self.dcasgd_variant}; change one."
            )

    @property
    def strength(self) -> float:
        """Lambda."""
        given = self.dcasgd_lambda
        return DEFAULT_LAMBDAS[self.dcasgd_variant] if given is None else given

    @property
    def decay(self) -> float:
        """Of the running mean of squares."""
        return DEFAULT_DECAY if self.dcasgd_decay is None else self.dcasgd_decay

    @property
    def shares_backup(self) -> bool:
        """Whether one copy serves all workers."""
        return self.dcasgd_backup == "global_prev"

    @property
    def needs_copies(self) -> bool:
        """Whether the shard must keep the weights that each worker was last sent."""
        return self.strength > 0 and not self.shares_backup

    def init(self, size: int, version: int = 0) -> State:
        """Return the state before any update; arrays are made when they are first needed."""
        del size, version
        return {"mean_squares": {}}  # worker, or "all" -> [n] float32

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the arrivals, each compensated from its own base; nothing at lambda = 0."""
        if self.strength == 0:
            return list(arrivals), state
        compensated = [self._compensated(arrival, context, state) for arrival in arrivals]
        if self.shares_backup:  # from before the step that this release makes: w0 at the first
            state["previous"] = context.theta.copy()  # [n] float32
        return compensated, state

    def _compensated(self, arrival: Arrival, context: ReleaseContext, state: State) -> Arrival:
        strength = self._strength(arrival, context, state)
        base = self._base(arrival, context, state)
        if base is None:
            return arrival
        indices, values = arrival.update.indices, arrival.update.values
        where = where_of(indices)
        values = context.kernels.compensate(values, context.theta[where], base[where], strength)
        return dataclasses.replace(arrival, update=Update(indices, values))

    def _base(self, arrival: Arrival, context: ReleaseContext, state: State) -> Float32 | None:
        """Return the backup [n], or None where there is nothing to compensate."""
        if self.shares_backup:
            return state.get("previous")
        if arrival.worker in context.replicas:
            return context.replicas[arrival.worker]
        if arrival.base_version == context.version:
            return None
        return context.copies.get(arrival.base_version)

    def _strength(self, arrival: Arrival, context: ReleaseContext, state: State) -> float | Float32:
        """Return L, one number or one per entry sent; a fresh gradient counts in the mean too."""
        if self.dcasgd_variant == "constant":
            return self.strength
        import numpy as np

        owner = _EVERYBODY if self.shares_backup else str(arrival.worker)
        means = state["mean_squares"]
        if owner not in means:
            means[owner] = np.zeros(len(context.theta), np.float32)
        indices, values = arrival.update.indices, arrival.update.values
        where = where_of(indices)
        mean, strengths = context.kernels.adapt(
            means[owner][where], values, self.decay, self.strength
        )
        means[owner][where] = mean
        return strengths


def _check_word(flag: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ConfigurationError(f"--{flag}={value!r}: expected one of {', '.join(legal)}.")
