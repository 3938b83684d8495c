"""What the shards hold, put into the script's model and its optimizers: for callbacks and files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.session import RequestRejected
from thinwire.runtime.run.settings import END_REASONS
from thinwire.script.keras.held_weights import is_like
from thinwire.script.keras.optimizers import ScriptOptimizers
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.step import steps_allowed
from thinwire.script.session import CentralState, Session
from thinwire.worker.script import RECORD


class CentralAccess:
    """Brings a model, or the optimizers of its script, to what is on the shards.

    Args:
        member: The model's place in the run.
        optimizers: Of the script.
    """

    def __init__(self, member: RunMember, optimizers: ScriptOptimizers) -> None:
        self._member, self._optimizers = member, optimizers

    @property
    def writes_files(self) -> bool:
        """Whether this worker's script writes the files that all scripts would."""
        settings = self._member.settings
        if settings is None or not self._member.is_offered:
            return True
        return settings.worker().id_worker == RECORD.chief

    @contextlib.contextmanager
    def saving(self, is_own: bool) -> Iterator[bool]:
        """Have the model as it is to be saved; see `thinwire.script.keras.saving.SavingWorker`."""
        member, writes = self._member, self.writes_files
        with self.lent() if writes or is_own else contextlib.nullcontext():
            yield writes or is_own
        if not (is_own or member.in_fit or member.barriers is None or member.stopped):
            ended = member.barriers.saved(writes, member.in_loop)
            if ended is not None:
                member.raise_if_broken(ended.cause, ended.message)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Have weights, statistics and the optimizer as they are on the shards, in mid-`fit`.

        Afterwards this worker goes on with its own weights. Weights that a callback has put into
        the model stay there.
        """
        session = self._member.present
        if session is None or not self._member.in_fit:
            yield
            return
        own = session.variables.read(), session.statistics.read()
        is_own = is_like(own[0], session.weights)
        state = self._fetch(session, weights=True) if is_own else None
        if state is None:
            yield
            return
        session.assign(state.weights())
        self._fill_slots(session, state)
        try:
            yield
        finally:
            session.assign(own)

    def refresh_averages(self) -> None:
        """Let the compiled optimizer have the PS's moving averages of the weights, in mid-`fit`."""
        session = self._member.present
        if session is None:
            return
        averages = any(step.inner.use_ema for step in self._optimizers.stepping)
        if averages:
            self.fill_slots(session)

    def fill_slots(self, session: Session) -> bool:
        """Let the optimizers have the state that the PS has made.

        Returns:
            Whether a PS has made one.
        """
        state = self._fetch(session)
        return state is not None and self._fill_slots(session, state)

    def take_final(self, session: Session) -> bool:
        """Take over what a run has ended with, while its shards wait for this worker to leave.

        Returns:
            As `fill_slots`.
        """
        is_over = session.stopped and session.stop_reason in END_REASONS
        if not is_over or self._member.catch_up.is_behind or not session.part.run_id:
            return False
        state = self._fetch(session, weights=True)
        if state is None:
            return False
        session.assign(state.weights())
        return self._fill_slots(session, state)

    def _fetch(self, session: Session, weights: bool = False) -> CentralState | None:
        """Return what the shards hold; None: a PS steps with no optimizer, or does not answer."""
        offer = None if self._member.succeeds else session.offer
        if offer is None or not (offer.optimizers or weights):
            return None
        try:
            return session.fetch(weights)
        except (StreamLost, Unreachable, RequestRejected) as error:
            logging.warning("the model keeps its own state: %s", error)
            return None

    def _fill_slots(self, session: Session, state: CentralState) -> bool:
        offer, steps = session.offer, self._optimizers.stepping
        if offer is None or not offer.optimizers:
            return False
        before = [None if step.rate is None else float(step.rate.numpy()) for step in steps]
        try:
            with steps_allowed():
                session.fill_slots([step.inner for step in steps], state)
        except (ConfigurationError, ValueError) as error:
            logging.warning("the compiled optimizer keeps its own state: %s", error)
            return False
        for step, rate in zip(steps, before, strict=True):
            if state.scale_streak is not None:
                step.assign_streak(state.scale_streak)
            if rate is None:
                continue
            was_set = rate != np.float32(step.known_rate)  # after the last push, as callbacks may
            step.known_rate = float(step.rate.numpy())
            if was_set:
                step.assign_rate(rate)
        return True
