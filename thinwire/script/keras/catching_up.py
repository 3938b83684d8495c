"""A script that was started again: it passes over the fits that its run has behind it.

What such a fit has made of its variables it takes over from the shards, which keep what the models
of former phases have ended with.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc.session import RequestRejected
from thinwire.script.keras.plan import named
from thinwire.script.session import Session
from thinwire.supervisor.evaluation_requests import CentralModel
from thinwire.worker.script import LeftBehind

#: Variables of an optimizer that has no state: its steps and its rate.
_WITHOUT_STATE = 2


class CatchUp:
    """What a script has passed over so far, one for all of its models.

    Attributes:
        is_behind: Whether the run is in a later phase than this script.
    """

    def __init__(self) -> None:
        self.is_behind = False
        # Whose values are not known here:
        self._passed_over: set[str] = set()  # paths of variables
        self._lost: dict[int, Any] = {}  # by identity: variables of models before the present one
        self._taken: tuple[Session, int] | None = None  # what was taken over last
        # By identity of optimizer and variable, the former: states that are not known here.
        self._stateless: dict[tuple[int, int], Any] = {}

    def open(self, session: Session, phase: int | None) -> bool:
        """Join, unless the run is in a later phase of the script than this worker.

        Args:
            session: Of the present phase.
            phase: The newest that this script may be in; None: it has been in none.

        Returns:
            As `Session.open`; False where the run is in a later one.

        Raises:
            ConfigurationError: What was passed over has trained what is not shared any more.
            LeftBehind: So it has, and the launcher has started this worker again.
            RequestRejected: For another reason.
        """
        try:
            return self._open(session)
        except RequestRejected as rejected:
            if rejected.reason != pb.REASON_PHASE:
                raise
            newest = rejected.phase
        if phase is not None and newest <= phase:
            session.go_to_phase(newest)
            return self._open(session)
        if not self.is_behind:
            logging.warning("this fit is passed over: the run has it behind it")
        self.is_behind = True
        # What a fit ends with is of the last phase before the next fit's.
        if self._take_ended(session, (phase or 2) | 1):
            self._passed_over -= {each.path for each in session.shared.variables}
            for each in session.shared.variables:
                self._lost.pop(id(each), None)
        else:
            self._passed_over |= {each.path for each in session.shared.variables}
        session.stay_behind()
        return False

    def _take_ended(self, session: Session, phase: int) -> bool:
        """Give the model what a phase has ended with; return whether the shards know that yet.

        Args:
            session: Of a phase before.
            phase: Of the script.
        """
        if self._taken == (session, phase):
            return True
        run, part = session.settings.run, session.part
        size, layouts = session.statistics.size, part.core.layouts
        central = CentralModel(run, part.run_id, session.shared.spec, layouts, size, phase)
        try:
            view = central.fetch()
        except RequestRejected as rejected:
            if rejected.reason != pb.REASON_PHASE:
                raise
            return False
        finally:
            central.close()
        session.variables.assign(view.weights)
        if view.statistics is not None:
            session.statistics.assign(view.statistics)
        self._taken = session, phase
        return True

    def forget_states(self, optimizers: Iterable[Any]) -> None:
        """Note that a fit was passed over, and not what it has made of its optimizers."""
        self._stateless |= {
            (id(optimizer), id(variable)): optimizer
            for optimizer in optimizers
            if len(optimizer.variables) > _WITHOUT_STATE
            for variable in optimizer._trainable_variables
        }

    def remember_states(self, optimizers: Iterable[Any]) -> None:
        """Note that what these step is with the run, with all that belongs to it."""
        for optimizer in optimizers if self._stateless else ():
            for variable in optimizer._trainable_variables:
                self._stateless.pop((id(optimizer), id(variable)), None)

    def check_states(self, session: Session, optimizers: Iterable[Any]) -> None:
        """Refuse to offer optimizers to the run whose state is not known here.

        Args:
            session: Of the phase that is about to begin.
            optimizers: That it steps with.

        Raises:
            ConfigurationError: There is one.
            LeftBehind: So there is, and the launcher has started this worker again.
        """
        for optimizer in optimizers if self._stateless else ():
            for variable in optimizer._trainable_variables:
                if (id(optimizer), id(variable)) in self._stateless:
                    self._refuse(
                        session,
                        f"the state of {named(optimizer)} for {variable.path} is not kept, which "
                        "an earlier fit has made",
                    )

    def go_to_next_model(self, variables: Iterable[Any]) -> None:
        """Begin with another model of the script.

        Args:
            variables: What the one before has shared.
        """
        if self._passed_over:
            self._lost |= {id(each): each for each in variables}
        self._passed_over.clear()

    def _open(self, session: Session) -> bool:
        """Join, after passing over fits or not; see `Session.open`."""
        opened, self.is_behind = session.open(), False
        shared = {each.path for each in session.shared.variables}
        missing = sorted(self._passed_over - shared)
        known = {id(each) for each in session.shared.variables}
        missing += [each.path for number, each in self._lost.items() if number not in known]
        if missing:
            self._refuse(
                session,
                f"{missing[0]} and {len(missing) - 1} more variables that an earlier fit has "
                "trained are not shared any more, and their values not kept",
            )
        self._passed_over.clear()
        self._lost.clear()
        return opened

    @staticmethod
    def _refuse(session: Session, what: str) -> NoReturn:
        text = f"this script was started again in a later phase of its run: {what}"
        if session.own.num_restarts:
            raise LeftBehind(f"{text}; the other workers go on without this one.")
        raise ConfigurationError(
            f"{text}; expected a run that goes on with all that it has trained. Start it anew "
            "with --overwrite."
        )
