"""Delay compensation: correct a stale gradient for later changes of the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from thinwire.ops.options import choice, decay_factor, number
from thinwire.ops.policy import Policy, setting
from thinwire.ops.types import ConfigurationError, Float32, State, Update, where_of
from thinwire.ops.weighting.base import Arrival, ReleaseContext

#: Value of the flag --dcasgd_variant -> strength lambda of the compensation if --dcasgd_lambda is
#: not given.
DEFAULT_LAMBDAS = {"constant": 0.04, "adaptive": 2.0}
DEFAULT_DECAY = 0.95

#: Key of the running means of squared gradients that all workers share with
#: --dcasgd_backup=global_prev.
_EVERYBODY = "all"


@dataclasses.dataclass(frozen=True)
class DcAsgd(Policy):
    """Delay compensation: add L g g (theta - base) to a gradient g computed at weights `base`.

    Delay compensation is a first-order step from weights `base` to theta that approximates the
    Hessian by the diagonal of g g^T, with g the gradient. Delay compensation changes only the sent
    entries of a sparse update. DcAsgd does not compensate an update if the weights at which it was
    computed are unknown. The weights at which an update was computed are unknown if its worker has
    left and returns with an older update.

    Attributes:
        dcasgd_lambda: Strength lambda of the delay compensation; None: the default strength of the
            variant.
        dcasgd_variant: Variant of the compensation strength L. ``constant``: L = lambda.
            ``adaptive``: L = lambda / sqrt(m + 1e-7), with m the running mean of g * g per entry
            and worker.
        dcasgd_decay: Decay of the running mean m of squared gradients, from 0 to below 1; None
            means 0.95.
        dcasgd_backup: Weights `base` from which the delay is compensated. ``per_worker``: the
            weights at which the gradient was computed. ``global_prev``: the weights before the
            shard server's latest update, for every worker; all workers then share one running mean
            of squared gradients.

    Source: Zheng et al. (ICML 2017), equations 10 and 14; docs/methods/grouping_sgd.md.
    """

    dcasgd_lambda: float | None = setting(
        number(
            "dcasgd_lambda",
            None,
            "Strength (lambda) of the delay compensation of --weighting=dc_asgd.",
            "factor",
            low=0.0,
            unset="0.04, or 2 if adaptive",
        )
    )
    dcasgd_variant: str = setting(
        choice(
            "dcasgd_variant",
            "constant",
            "Strength of --weighting=dc_asgd: the same for every entry, or scaled by the running "
            "mean square of the entry's gradient.",
            DEFAULT_LAMBDAS,
        )
    )
    dcasgd_decay: float | None = setting(
        decay_factor(
            "dcasgd_decay",
            "Decay of the running mean square of --dcasgd_variant=adaptive.",
            unset="0.95",
        )
    )
    dcasgd_backup: str = setting(
        choice(
            "dcasgd_backup",
            "per_worker",
            "Weights with which --weighting=dc_asgd compares the current weights: those at which "
            "the worker computed its gradient, or the weights before the shard's latest update.",
            ("per_worker", "global_prev"),
        )
    )

    def __post_init__(self) -> None:
        """Raise an error for an unknown variant or backup, or a number out of range."""
        super().__post_init__()
        if self.dcasgd_decay is None:
            return
        if self.dcasgd_variant != "adaptive":
            raise ConfigurationError(
                f"--dcasgd_decay={self.dcasgd_decay} is for --dcasgd_variant=adaptive, but this "
                f"run has --dcasgd_variant={self.dcasgd_variant}; change one of the two flags."
            )

    @property
    def strength(self) -> float:
        """Strength lambda of the delay compensation: `dcasgd_lambda`, or the variant's default."""
        strength = self.dcasgd_lambda
        return DEFAULT_LAMBDAS[self.dcasgd_variant] if strength is None else strength

    @property
    def decay(self) -> float:
        """Decay of the running mean of squared gradients, from 0 to below 1."""
        return DEFAULT_DECAY if self.dcasgd_decay is None else self.dcasgd_decay

    @property
    def shares_backup(self) -> bool:
        """True if one backup of the weights is the base for the gradients of all workers."""
        return self.dcasgd_backup == "global_prev"

    @property
    def needs_copies(self) -> bool:
        """True if the shard server must store the weights that it sent last to each worker."""
        return self.strength > 0 and not self.shares_backup

    def init(self, size: int, version: int = 0) -> State:
        """Return the initial state, without arrays, which are created when they are needed."""
        # Worker id as text, or "all" -> running mean of squared gradients, [n] float32.
        return {"mean_squares": {}}

    def weigh(
        self, arrivals: Sequence[Arrival], context: ReleaseContext, state: State
    ) -> tuple[list[Arrival], State]:
        """Return the updates with delay-compensated gradients, unchanged if lambda is 0."""
        if self.strength == 0:
            return list(arrivals), state
        compensated = [self._compensated(arrival, context, state) for arrival in arrivals]
        if self.shares_backup:
            # The backup of the weights is stored after compensating: the base of the next round's
            # gradients is the weights before this round's update. The first round has no backup and
            # is not compensated.
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
        """Return the weights [n] from which to compensate; None if unknown or still current."""
        if self.shares_backup:
            return state.get("previous")
        if arrival.worker in context.replicas:
            return context.replicas[arrival.worker]
        if arrival.base_version == context.version:
            return None
        return context.copies.get(arrival.base_version)

    def _strength(self, arrival: Arrival, context: ReleaseContext, state: State) -> float | Float32:
        """Return the compensation strength; update the mean of squared gradients."""
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
