"""Trains several models of one script in turn: a run trains the script's newest model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from thinwire.ops.types import ConfigurationError
from thinwire.script.data.fit_counts import FitNumber
from thinwire.script.keras.early_stop import EarlyStop
from thinwire.script.keras.run_member import RunMember
from thinwire.worker.script import RECORD


class Succession:
    """Decides which of a script's models the run trains.

    Args:
        member: Membership of the model in a run, which holds the script's settings, the session
            with the servers, and the barriers with other workers' scripts.
        stop: Object that agrees with the other workers' scripts on an early end of the model's
            `fit`.
        others: Function that returns the memberships in the run of the other models of this
            worker's script.
    """

    def __init__(
        self, member: RunMember, stop: EarlyStop, others: Callable[[], Sequence[RunMember]]
    ) -> None:
        self._member, self._stop, self._others = member, stop, others

    def count_fit(self, data: Any) -> FitNumber:
        """Count a call of `fit` of this model among the calls for all models of the script.

        Args:
            data: Argument `x` that the script passes to `fit`.
        """
        other_counts = (other.fit_counts for other in self._others())
        self._member.fit_counts = next(
            (counts for counts in other_counts if counts.num_fits), self._member.fit_counts
        )
        return self._member.fit_counts.begin_fit(data)

    def begin_fit(self) -> None:
        """Let the run train this model instead of the model that the script trained before.

        The next phase of the run (in which it trains one model) begins with this model. Calls of
        `fit` are counted over all models of the script.

        Raises:
            ConfigurationError: A `fit` of another model of the script is still running, or a
                training loop of the script's own trains this model or another model.
        """
        member = self._member
        if not member.is_offered:
            return
        members = self._others()
        for other in members:
            if other.in_fit or other.in_loop:
                self._refuse(other, in_loop=other.in_loop)
        before = next((other for other in members if other.has_place), None)
        if before is None or before.session is None:
            return
        if member.in_loop:
            self._refuse(before, in_loop=True)
        if member.barriers is None:
            RECORD.endings.append(member.leave_at_end)
        member.take_over(before)
        if member.barriers is not None:
            member.barriers.on_stop = self._stop.stop

    def check_loop(self) -> None:
        """Reject a script's own training loop if the script has trained another model in the run.

        Raises:
            ConfigurationError: The script has trained another model in the run.
        """
        for other in self._others():
            if other.session is not None:
                self._refuse(other, in_loop=True)

    def _refuse(self, other: RunMember, in_loop: bool) -> NoReturn:
        """Reject the training of this model together with another model of the script.

        Args:
            other: Membership in the run of the other model of the script.
            in_loop: True if a training loop of the script's own trains one of the two models.

        Raises:
            ConfigurationError: Each call of the method raises this error.
        """
        reason = "a loop of the script's own trains one of them" if in_loop else "both at a time"
        raise ConfigurationError(
            f"{self._member.model.name!r} is a second model that this script trains with "
            f"thinwire.distribute(), next to {other.model.name!r} ({reason}); expected models that "
            "model.fit(...) trains one after the other, or loops whose optimizers are all "
            "distributed before the first step of any loop: one = thinwire.distribute(one, "
            "model=first); other = thinwire.distribute(other, model=second). Or train one of the "
            "two in a run of its own, or without distribute(): every worker then trains it alone."
        )
