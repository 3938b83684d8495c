"""All scripts end a `fit` in the same epoch, where one of them ends it before its time."""

from __future__ import annotations

from thinwire.keras.run_member import RunMember


class EarlyStop:
    """Notifies the other scripts of an early end, and ends this one's `fit` as they do.

    Attributes:
        epoch: The present one, as Keras counts them.
    """

    def __init__(self, member: RunMember) -> None:
        self._member = member
        self.epoch = 0
        self._is_known = False  # by all scripts, that this `fit` ends before its time
        self._after = 0  # how many epochs it then ends

    def begin_fit(self) -> None:
        """Forget the `fit` before."""
        self.epoch, self._after, self._is_known = 0, 0, False

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch; it is the last if this `fit` was to end before it began here."""
        self.epoch = epoch
        if self._is_known and epoch >= self._after:
            self._stop_training()

    def end_epoch(self) -> None:
        """End this `fit` with the present epoch, if another script has ended its own there."""
        if self._is_known and self.epoch + 1 >= self._after:
            self._stop_training()

    def notify(self, after: int) -> None:
        """Let the scripts of all workers end this `fit`, where this one has set stop_training.

        Args:
            after: How many epochs, so that callbacks act in the same one everywhere; 0: in the
                middle of one, where nothing can be waited for.
        """
        member = self._member
        if self._is_known or not member.model.stop_training or member.stopped:
            return
        self._is_known = True
        if member.barriers is not None:
            member.barriers.stop_fit(after)

    def stop(self, after: int) -> None:
        """End this `fit` after so many epochs, as another script has (any thread)."""
        self._after, self._is_known = after, True
        if self._member.in_fit and self.epoch >= after:
            self._stop_training()

    def pass_over(self) -> None:
        """End this `fit`, which the others have behind them."""
        self._is_known = True
        self._stop_training()

    def _stop_training(self) -> None:
        self._member.model.stop_training = True
