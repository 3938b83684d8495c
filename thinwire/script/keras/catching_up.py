"""Lets a restarted script catch up: it skips the calls of `fit` that the run has completed.

A phase is a part of the run in which the model and its optimizers stay the same. The shards
(parameter servers) keep the final weights of each completed phase of the run. When a script skips a
call of `fit`, it loads the final weights of that `fit` from the shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from thinwire.ops.types import ConfigurationError
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc.session import RequestRejected
from thinwire.script.keras.plan import WITHOUT_SLOTS, named
from thinwire.script.session import Session
from thinwire.supervisor.evaluation_requests import CentralModel
from thinwire.worker.script import LeftBehind


class CatchUp:
    """The calls of `fit` that a restarted script has skipped, over all models of the script."""

    def __init__(self) -> None:
        # Paths of the current model's variables that a skipped call of `fit` trained. This process
        # does not have the trained values of these variables.
        self._passed_over: set[str] = set()
        # Maps the id of a variable of an earlier model of the script to the variable, if a skipped
        # call of `fit` trained it. This process does not have the trained value.
        self._lost: dict[int, Any] = {}
        # Session and phase of the last call that loaded final weights of a skipped `fit`; None
        # before.
        self._taken: tuple[Session, int] | None = None
        # Maps (id of an optimizer, id of a variable) to the optimizer, if a skipped call of `fit`
        # trained the optimizer's slots of the variable. This process does not have these slots.
        self._stateless: dict[tuple[int, int], Any] = {}

    def open(self, session: Session, phase: int | None) -> bool:
        """Join the run, unless it is in a later phase (trains a later model) than this script.

        Args:
            session: This script's session with the servers.
            phase: Number of the newest phase of the run that this script may be in; None if the
                script has not been in any phase.

        Returns:
            True if the script has joined; False if the run is in a later phase than this script.

        Raises:
            ConfigurationError: A skipped call of `fit` trained variables that the workers of the
                run do not share any more.
            LeftBehind: A skipped call of `fit` trained variables that the workers of the run do not
                share any more, and the launcher has restarted this worker.
            RequestRejected: A shard rejected the worker for a reason other than the phase of the
                run that the worker is in.
        """
        try:
            self._open(session)
            return True
        except RequestRejected as rejected:
            if rejected.reason != pb.REASON_PHASE:
                raise
            newest = rejected.phase
        if phase is not None and newest <= phase:
            session.go_to_phase(newest)
            self._open(session)
            return True
        # Phase 2n of a run begins at the start of the n-th `fit`, and phase 2n + 1 at its end (see
        # `FitBarriers.phase`). The final weights of a `fit` are in its odd phase, because callbacks
        # at the end of the `fit` may have set weights.
        if self._take_ended(session, (phase or 2) | 1):
            self._passed_over -= {variable.path for variable in session.shared.variables}
            for variable in session.shared.variables:
                self._lost.pop(id(variable), None)
        else:
            self._passed_over |= {variable.path for variable in session.shared.variables}
        session.stay_behind()
        return False

    def _take_ended(self, session: Session, phase: int) -> bool:
        """Load the final weights and moving statistics of a phase of the run into the model.

        Args:
            session: This script's session with the servers, in an earlier phase of the run than the
                servers.
            phase: Number of the phase of the run whose final weights are loaded.

        Returns:
            True if the shards still had the final weights of the completed phase.
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
        """Mark the slots (moments) of some optimizers as unknown after a skipped call of `fit`."""
        self._stateless |= {
            (id(optimizer), id(variable)): optimizer
            for optimizer in optimizers
            if len(optimizer.variables) > WITHOUT_SLOTS
            for variable in optimizer._trainable_variables
        }

    def remember_states(self, optimizers: Iterable[Any]) -> None:
        """Mark the slots (moments) of some optimizers as known, since this process steps them."""
        for optimizer in optimizers if self._stateless else ():
            for variable in optimizer._trainable_variables:
                self._stateless.pop((id(optimizer), id(variable)), None)

    def check_states(self, session: Session, optimizers: Iterable[Any]) -> None:
        """Reject optimizers whose slots (moments) this process lacks, before an offer to the PS.

        Args:
            session: Session with the servers for the phase of the run that is about to begin.
            optimizers: Optimizers that step in the phase of the run that is about to begin.

        Raises:
            ConfigurationError: A skipped call of `fit` trained slots (moments) of one of the
                optimizers.
            LeftBehind: A skipped call of `fit` trained slots (moments) of one of the optimizers,
                and the launcher has restarted this worker.
        """
        for optimizer in optimizers if self._stateless else ():
            for variable in optimizer._trainable_variables:
                if (id(optimizer), id(variable)) in self._stateless:
                    self._refuse(
                        session,
                        f"an earlier fit trained the state of {named(optimizer)} for "
                        f"{variable.path}, and no shard has kept it",
                    )

    def go_to_next_model(self, variables: Iterable[Any]) -> None:
        """Note that the script now trains its next model in the run.

        Args:
            variables: Shared variables of the model that the script trained before its present
                model.
        """
        if self._passed_over:
            self._lost |= {id(variable): variable for variable in variables}
        self._passed_over.clear()

    def _open(self, session: Session) -> None:
        """Join the run; reject the script if a skipped `fit` trained variables now unshared."""
        session.open()
        shared = {variable.path for variable in session.shared.variables}
        missing = sorted(self._passed_over - shared)
        known = {id(variable) for variable in session.shared.variables}
        missing += [variable.path for number, variable in self._lost.items() if number not in known]
        if missing:
            self._refuse(
                session,
                f"an earlier fit trained {missing[0]} and {len(missing) - 1} more variables; the "
                "run does not share these variables any more, and no shard has kept their values",
            )
        self._passed_over.clear()
        self._lost.clear()

    @staticmethod
    def _refuse(session: Session, what: str) -> NoReturn:
        text = f"this script was restarted in a later phase of its run: {what}"
        if session.own.num_restarts:
            raise LeftBehind(f"{text}; the other workers continue without this worker.")
        raise ConfigurationError(
            f"{text}; expected a run whose PS shards have the trained values of all variables. "
            "Start a new run with --overwrite."
        )
