"""A training loop of the script's own, or one of train_on_batch, over all of its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from absl import logging

from thinwire.ops.methods.validation import refuse_local_epochs
from thinwire.ops.types import ConfigurationError
from thinwire.script.keras.central import CentralAccess
from thinwire.script.keras.data_errors import refusing_unfit
from thinwire.script.keras.exchange import StepExchange
from thinwire.script.keras.held_weights import set_by_script
from thinwire.script.keras.joining import Joining
from thinwire.script.keras.optimizers import ScriptOptimizers
from thinwire.script.keras.phases import Phases
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.succession import Succession


class OwnLoop:
    """A loop that begins with its first step and ends with the script.

    Args:
        member: The model's place in the run.
        optimizers: Of the script.
        succession: Of the script's models.
        joining: Joins again behind a `fit`.
        phases: Of the script.
        exchange: Of the steps.
        central: To what is on the shards.
    """

    def __init__(
        self,
        *,
        member: RunMember,
        optimizers: ScriptOptimizers,
        succession: Succession,
        joining: Joining,
        phases: Phases,
        exchange: StepExchange,
        central: CentralAccess,
    ) -> None:
        self._member, self._optimizers, self._succession = member, optimizers, succession
        self._joining, self._phases = joining, phases
        self._exchange, self._central = exchange, central

    def begin(self) -> bool:
        """Begin, where the step that is under way is of no `fit`: the first, or one behind a `fit`.

        Returns:
            Whether the model has other weights than before.

        Raises:
            ConfigurationError: The server's model and optimizer come from its flags.
        """
        if self._member.in_fit:
            return False
        if not self._member.in_loop:
            self._begin()
        return self._joining.join_loop() is not None

    def _begin(self) -> None:
        member = self._member
        if not member.is_offered:
            raise ConfigurationError(
                f"{member.model.name!r} is trained by train_on_batch or a loop of its own; "
                "expected model.fit(...), for this server has its optimizer from flags. Start the "
                "script with `thinwire run`, or use thinwire.GradientSGD in the place of the "
                "optimizer and leave thinwire.distribute() out."
            )
        refuse_local_epochs(member.own_settings.run.method, "a loop of the script's own")
        self._succession.check_loop()
        member.in_loop = True
        self._optimizers.prepare()
        logging.info(
            "%r is trained by a loop of the script's own, whose data is the script's own affair: "
            "thinwire.worker_id() of thinwire.num_workers(), or model.thinwire.shard(...)",
            member.model.name,
        )

    @contextlib.contextmanager
    def on_batch(self) -> Iterator[None]:
        """Be ready for one call of Keras' train_on_batch.

        Raises:
            ConfigurationError: The server's model and optimizer come from its flags, or the batch
                does not fit the model.
        """
        self.begin()
        self._optimizers.prepare()
        if self._member.session is None:
            self._member.model.make_train_function()
            self._phases.begin()
        with refusing_unfit(self._member.model):
            try:
                yield
            except tf.errors.OpError:
                self._exchange.raise_failure()
                raise

    def refresh(self, with_slots: bool) -> None:
        """Let the model have what the shards hold, between two steps.

        Args:
            with_slots: The optimizers, too.
        """
        member, session = self._member, self._member.session
        if session is None or member.in_fit or not member.in_loop or self._exchange.has_failed:
            return
        if not session.stopped and set_by_script(session) is not None:
            return  # what it has set travels with its next step
        member.finish_rounds(session)
        with member.lock:
            if not session.stopped:
                session.pull()
            session.assign()
        if with_slots and not session.stopped:
            self._central.fill_slots(session)
