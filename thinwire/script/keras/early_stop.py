"""Ends `fit` early on all workers: if one script stops early, all stop after the same epoch."""

from __future__ import annotations

from thinwire.proto import thinwire_pb2 as pb
from thinwire.script.keras.run_member import RunMember


class EarlyStop:
    """Agrees with the other workers' scripts on an early end of a `fit`, and ends this `fit`.

    Attributes:
        epoch: Number of the current training epoch. The first epoch of a `fit` has the number
            `initial_epoch`.
    """

    def __init__(self, member: RunMember) -> None:
        self._member = member
        self.epoch = 0
        # Number of epochs after which this `fit` ends early; 0 if it ends immediately; None if it
        # does not end early.
        self._after: int | None = None

    def begin_fit(self) -> None:
        """Forget the current epoch and the early end of the previous `fit`."""
        self.epoch, self._after = 0, None

    def begin_epoch(self, epoch: int) -> None:
        """Set the current epoch; end `fit` if the workers' scripts have agreed to end before it.

        Args:
            epoch: Number of the training epoch, from 0, as Keras passes it to callbacks.
        """
        self.epoch = epoch
        if self._after is not None and epoch >= self._after:
            self._stop_training()

    def end_epoch(self) -> None:
        """Agree with the other workers' scripts, after an epoch's callbacks, on an early end.

        A callback may set stop_training in this script while the script of another worker is
        already in a later epoch. A script that stops early trains until it has completed as many
        epochs as the scripts of the other workers.
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
        """End `fit` in the other workers' scripts: this script's `fit` stopped within an epoch.

        The scripts of the other workers finish their current batch and do not wait for updates of
        this worker.
        """
        member = self._member
        if self._after is None and not member.stopped:
            self._after = 0
            if member.barriers is not None:
                member.barriers.stop_fit(0)

    def stop(self, after: int) -> None:
        """End this `fit` after `after` epochs, because another worker's script stopped its `fit`.

        The method `stop` of `EarlyStop` may be called from any thread.
        """
        self._after = after
        if self._member.in_fit and self.epoch >= after:
            self._stop_training()

    def pass_over(self) -> None:
        """End this `fit` immediately: the run had completed it before this script's restart."""
        self._after = 0
        self._stop_training()

    def _stop_training(self) -> None:
        self._member.model.stop_training = True
