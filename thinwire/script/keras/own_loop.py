"""Trains in a run by a training loop of the script's own, or by calls of train_on_batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from absl import logging

from thinwire.ops.methods.validation import refuse_local_epochs
from thinwire.ops.types import ConfigurationError
from thinwire.script.backends.present import backend
from thinwire.script.keras.central import fill_slots
from thinwire.script.keras.data_errors import refusing_unfit
from thinwire.script.keras.exchange import StepExchange
from thinwire.script.keras.optimizers import ScriptOptimizers
from thinwire.script.keras.phases import Phases
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.succession import check_loop
from thinwire.script.member import Event
from thinwire.script.own_changes import set_by_script


class OwnLoop:
    """Training loop that a script writes itself, from the loop's first step to the script's end.

    Args:
        member: Membership of the model in a run.
        phases: Object that begins a new phase of the run when the script's model has changed.
        exchange: Object that pushes to the servers and pulls from them in each step.
    """

    def __init__(
        self,
        member: RunMember,
        optimizers: ScriptOptimizers,
        phases: Phases,
        exchange: StepExchange,
    ) -> None:
        self._member, self._optimizers = member, optimizers
        self._phases, self._exchange = phases, exchange

    def begin(self) -> bool:
        """Begin a training loop at its first step, and join the run again after a `fit`.

        Within a `fit`, `begin` does nothing, because the steps of a `fit` belong to no training
        loop.

        Returns:
            True if joining the run again has changed the model's weights.

        Raises:
            ConfigurationError: Flags define the server's model and optimizer, so the server
                supports no training loops.
        """
        member = self._member
        if member.in_fit:
            return False
        if member.in_loop:
            return self._phases.join_loop() is not None
        if not member.is_offered:
            raise ConfigurationError(
                f"{member.model.name!r} is trained by train_on_batch or a loop of its own; "
                "expected model.fit(...), because flags define the optimizer of this parameter "
                "server. Start the script with `thinwire run`, or replace the optimizer by "
                "thinwire.GradientSGD and leave thinwire.distribute() out."
            )
        refuse_local_epochs(member.own_settings.run.method, "a loop of the script's own")
        check_loop(member)
        self._phases.receive(Event.LOOP_BEGINS)
        self._optimizers.prepare()
        logging.info(
            "model %r is trained by a loop of the script's own, so the script must divide its "
            "data among the workers, by thinwire.worker_id() and thinwire.num_workers(), or by "
            "model.thinwire.shard(...)",
            member.model.name,
        )
        return self._phases.join_loop() is not None

    @contextlib.contextmanager
    def on_batch(self) -> Iterator[None]:
        """Prepare a call of Keras' train_on_batch, and raise the error of a failed exchange.

        Raises:
            ConfigurationError: Flags define the server's model and optimizer, or the batch does not
                fit the model.
        """
        self.begin()
        member = self._member
        self._optimizers.prepare()
        if member.session is None:
            member.model.make_train_function()
            self._phases.begin()
        with refusing_unfit(member.model):
            try:
                yield
            except backend().step_errors:
                self._exchange.raise_failure()
                raise

    def refresh(self, with_slots: bool) -> None:
        """Load the shards' present weights into the model between two steps of a training loop.

        Args:
            with_slots: True to load the PS's optimizer state into the script's optimizers, in
                addition to the weights.
        """
        member, session = self._member, self._member.session
        if session is None or member.in_fit or not member.in_loop or self._exchange.has_failed:
            return
        if not session.stopped and set_by_script(session) is not None:
            # the model keeps the weights that the script has set, and the next step sends them
            return
        member.finish_rounds(session)
        with member.lock:
            session.part.pull()
            session.assign()
        if with_slots and not session.stopped:
            fill_slots(member, session)
