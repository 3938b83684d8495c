"""The models of one script, one after the other: the newest has this worker's place in the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from thinwire.ops.types import ConfigurationError
from thinwire.script.data.fit_counts import FitNumber
from thinwire.script.keras.early_stop import EarlyStop
from thinwire.script.keras.run_member import RunMember
from thinwire.worker.script import RECORD


class Succession:
    """What one model has to do with the others of its script.

    Args:
        member: The model's place in the run.
        stop: Of its present `fit`.
        others: Returns those of this worker's other models.
    """

    def __init__(
        self, member: RunMember, stop: EarlyStop, others: Callable[[], Sequence[RunMember]]
    ) -> None:
        self._member, self._stop, self._others = member, stop, others

    def count_fit(self, data: Any) -> FitNumber:
        """Count a `fit` of this model among those of all models of the script.

        Args:
            data: What it is given as x.
        """
        others = (other.fit_counts for other in self._others())
        self._member.fit_counts = next(
            (counts for counts in others if counts.num_fits), self._member.fit_counts
        )
        return self._member.fit_counts.begin_fit(data)

    def begin_fit(self) -> None:
        """Take this worker's place in the run over from the model that the script trained before.

        The next phase is then this model's. The fits of all models are counted together.

        Raises:
            ConfigurationError: That model is being trained, or by a loop.
        """
        member = self._member
        if not member.is_offered:
            return
        others = self._others()
        for other in others:
            if other.in_fit or other.in_loop:
                self._refuse(other, in_loop=other.in_loop)
        before = next((other for other in others if other.has_place), None)
        if before is None or before.session is None:
            return
        if member.in_loop:
            self._refuse(before, in_loop=True)
        if member.barriers is None:
            RECORD.at_end(member.leave_at_end)
        member.take_over(before)
        if member.barriers is not None:
            member.barriers.on_stop = self._stop.stop

    def check_loop(self) -> None:
        """Refuse a loop that trains a model beside others.

        Raises:
            ConfigurationError: There are some that have been trained.
        """
        for other in self._others():
            if other.session is not None:
                self._refuse(other, in_loop=True)

    def _refuse(self, other: RunMember, in_loop: bool) -> NoReturn:
        """Refuse to train this model beside another one.

        Args:
            other: Of that model.
            in_loop: Whether a loop trains one of them.

        Raises:
            ConfigurationError: Always.
        """
        what = "a loop of the script's own trains one of them" if in_loop else "both at a time"
        raise ConfigurationError(
            f"{self._member.model.name!r} is a second model that this script trains with "
            f"thinwire.distribute(), beside {other.model.name!r} ({what}); expected models that "
            "model.fit(...) trains one after the other, or loops whose optimizers are all "
            "distributed before the first step of any: one = thinwire.distribute(one, "
            "model=first); other = thinwire.distribute(other, model=second). Or train one of them "
            "in a run of its own, or without distribute(): every worker then trains it alone."
        )
