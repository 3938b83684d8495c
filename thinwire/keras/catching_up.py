"""A script that was started again: it passes over the fits that its run has behind it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc.session import RequestRejected
from thinwire.session import Session
from thinwire.worker.script import LeftBehind


class CatchUp:
    """What a script has passed over so far, one for all of its models.

    Attributes:
        is_behind: Whether the run is in a later phase than this script.
    """

    def __init__(self) -> None:
        self.is_behind = False
        self._passed_over: set[str] = set()  # paths of variables
        self._lost: dict[int, Any] = {}  # by identity: variables of models before the present one

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
        self._passed_over |= {each.path for each in session.shared.variables}
        session.stay_behind()
        return False

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
            text = (
                f"this script was started again in a later phase of its run: {missing[0]} and "
                f"{len(missing) - 1} more variables that an earlier fit has trained are not shared "
                "any more, so that their values are lost"
            )
            if session.own.num_restarts:
                raise LeftBehind(f"{text}; the other workers go on without this one.")
            raise ConfigurationError(
                f"{text}; expected a run that goes on with all that it has trained. Start it anew "
                "with --overwrite."
            )
        self._passed_over.clear()
        self._lost.clear()
        return opened
