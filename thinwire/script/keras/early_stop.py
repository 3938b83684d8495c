"""All scripts end a `fit` after the same epoch, where one of them ends it early."""

from __future__ import annotations

from thinwire.proto import thinwire_pb2 as pb
from thinwire.script.keras.run_member import RunMember


class EarlyStop:
    """Agrees with the other scripts on an early end, and ends this one's `fit` there.

    Attributes:
        epoch: The present one, as Keras counts them.
    """

    def __init__(self, member: RunMember) -> None:
        self._member = member
        self.epoch = 0
        self._after: int | None = None  # how many epochs this `fit` ends early; 0: immediately

    def begin_fit(self) -> None:
        """Forget the `fit` before."""
        self.epoch, self._after = 0, None

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, as Keras counts them."""
        self.epoch = epoch
        if self._after is not None and epoch >= self._after:
            self._stop_training()

    def end_epoch(self) -> None:
        """Agree, behind all callbacks of an epoch, on whether this `fit` ends early.

        A callback may have set stop_training here while another script is in a later epoch already.
        Then this script trains on until both have had as many.
        """
        member = self._member
        if not member.meets_others:
            return
        answer = member.met_barriers.end_epoch(self.epoch, bool(member.model.stop_training))
        if not isinstance(answer, pb.EpochMeeting):
            member.take_end(answer)
            self._stop_training()
            return
        if answer.epochs and self._after is None:
            self._after = answer.epochs
        if self._after is not None:
            member.model.stop_training = self.epoch + 1 >= self._after

    def stop_now(self) -> None:
        """Let the other scripts end this `fit` too, where this one has stopped within an epoch.

        They end it after the batch in progress: nobody waits for this worker's rounds any more.
        """
        member = self._member
        if self._after is None and not member.stopped:
            self._after = 0
            if member.barriers is not None:
                member.barriers.stop_fit(0)

    def stop(self, after: int) -> None:
        """End this `fit` after so many epochs, as another script has (any thread)."""
        self._after = after
        if self._member.in_fit and self.epoch >= after:
            self._stop_training()

    def pass_over(self) -> None:
        """End this `fit`, which the others have behind them."""
        self._after = 0
        self._stop_training()

    def _stop_training(self) -> None:
        self._member.model.stop_training = True
