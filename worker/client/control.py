"""A training script's control stream to shard 0: barriers, evaluations, and the run's end.

A background thread keeps the control stream open from the script's first call of `fit` to the
script's end. When the PS restarts, the control thread reconnects and reports the barriers and
evaluations for which the script waits, the barriers that it has passed, and whether it has
finished.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import threading
import time
from collections.abc import Callable

from absl import logging

from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.session import (
    ClientSession,
    Dialler,
    RequestRejected,
    beat_seconds,
    rhythm,
)
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials
from thinwire.runtime.run.settings import Run

#: Largest payload of a message that a script accepts from shard 0, in bytes; control messages are
#: far smaller.
_MAX_PAYLOAD_BYTES = 1 << 16
#: Longest single wait of a script for its control thread, in seconds. Python handles
#: operating-system signals only between two waits.
_WAIT_SECONDS = 0.25
#: Largest number of passed barriers that a reconnecting script reports to the PS. If there are
#: more, the script reports the newest ones.
_MOST_PASSED = 10_000
#: Largest number of evaluations that a reconnecting script reports to the PS. If there are more,
#: the script reports the newest ones.
_MOST_EVALUATIONS = 100
# largest number of characters of a script's error message that `finish` sends
_LONGEST_MESSAGE = 1000
#: Time limit of the wait in `close` for the end of the control thread, in seconds.
_CLOSE_SECONDS = 5.0


class RunHalted(Exception):
    """Raised if the training run is over, so that a script cannot wait for other scripts.

    Attributes:
        cause: Reason why the run ended, such as "finished" or "script_failed".
        message: Text for people that explains why the run ended; empty if the PS sent none.
    """

    def __init__(self, cause: str, message: str = "") -> None:
        super().__init__(f"the run has ended ({cause}){f': {message}' if message else ''}")
        self.cause, self.message = cause, message


@dataclasses.dataclass(frozen=True)
class Opening:
    """Answer of shard 0 to the waiting scripts when a barrier opens.

    Attributes:
        changes: True if at least one script trains another model after the barrier than before. A
            new phase of the run (the time in which it trains one model) then begins for all
            scripts.
        offers: True if this script must send its model's description and weights to the PS for the
            new phase of the run.
    """

    changes: bool = False
    offers: bool = False


class Control:
    """Coordinates a worker's script with other workers' scripts, over a separate control stream.

    All calls of `barrier`, `pass_by`, `evaluate`, `answer`, `meet` and `finish` must come from one
    thread. The methods `interrupt` and `stop_fit` of `Control` may be called from any thread.

    Args:
        address: Address ``host:port`` of shard 0.
        id_worker: Id of this worker, from 1.
        num_shards: Number of shards of the parameter server in the run.
        run_id: Id of the run, from the training stream; with an empty id, any run at the address is
            accepted.
        credentials: Credentials with which this worker connects to shard 0.
        patience_seconds: Time in seconds for which shard 0 may be unreachable before waiting calls
            raise Unreachable.
        on_end: Function that is called once with (cause, message), in the control thread, when the
            run ends before this script ends.
        on_stop: Function that is called with (fit, epochs), in the control thread, when another
            script ends the call of `fit` early for all scripts.
        on_chief: Function that is called with a worker id, in the control thread, when that worker
            becomes the chief, whose script writes the files.
    """

    def __init__(
        self,
        address: str,
        id_worker: int,
        num_shards: int = 1,
        run_id: str = "",
        credentials: Credentials = NO_CREDENTIALS,
        patience_seconds: float = 60.0,
        on_end: Callable[[str, str], None] = lambda cause, message: None,
        on_stop: Callable[[int, int], None] = lambda fit, epochs: None,
        on_chief: Callable[[int], None] = lambda worker: None,
    ) -> None:
        self._patience_seconds, self._on_end = patience_seconds, on_end
        self._on_stop, self._on_chief = on_stop, on_chief
        hello = pb.Hello(
            protocol_version=messages.PROTOCOL_VERSION,
            role=pb.ROLE_SCRIPT,
            id=id_worker,
            run_id=run_id,
            incarnation=secrets.randbits(63) + 1,
            num_shards=num_shards,
        )
        arrivals = rhythm()
        self._closing = threading.Event()
        self._dialler = Dialler(
            f"the PS at {address}",
            lambda: ClientSession(
                address, hello, _MAX_PAYLOAD_BYTES, credentials=credentials, arrivals=arrivals
            ),
            self._closing,
        )
        self._changed = threading.Condition()
        # The lock `_changed` guards all attributes that follow in this class.
        self._session: ClientSession | None = None
        # Maps a barrier's name to shard 0's answer, in the order in which the barriers opened.
        self._passed: dict[str, Opening] = {}
        self._waits_for: pb.Barrier | None = None
        # Newest message FitBegun and newest message FitEnded of this script.
        self._fits: list[pb.ToServer] = []
        # maps (fit, epoch) to the evaluation of the model
        self._evaluations: dict[tuple[int, int], pb.Evaluated] = {}
        self._awaits: pb.EpochEnded | None = None
        # Pair (fit, epoch) that this script must evaluate; None: no request.
        self._appointed_for: tuple[int, int] | None = None
        # Evaluation that shard 0 has not confirmed yet; None if it has confirmed all.
        self._unconfirmed: pb.Evaluated | None = None
        # Newest answers of shard 0 to the scripts' exchanges at the end of an epoch. Key True: the
        # exchange after the epoch's callbacks. Key False: the exchange before the callbacks.
        self._meetings: dict[bool, pb.EpochMeeting] = {}
        self._meets: pb.EpochMeeting | None = None
        # Maps the number of a `fit` to the last epoch that this script has set for it.
        self._stopped: dict[int, int] = {}
        # Evaluations that this script made while shard 0 was unreachable.
        self._unreported: list[pb.Evaluated] = []
        self._finished: pb.Finished | None = None
        self._is_confirmed = self._is_interrupted = False
        # Error that ended the control stream for good; None while the stream can reconnect.
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._keep, name="control", daemon=True)
        self._thread.start()

    @classmethod
    def of(
        cls,
        run: Run,
        id_worker: int,
        run_id: str,
        on_end: Callable[[str, str], None] = lambda cause, message: None,
        on_stop: Callable[[int, int], None] = lambda fit, epochs: None,
        on_chief: Callable[[int], None] = lambda worker: None,
    ) -> Control:
        """Return the control stream of a worker, with the address and time limits of the run."""
        return cls(
            run.addresses[0],
            id_worker,
            run.nb_ps,
            run_id,
            run.credentials,
            run.reconnect_timeout_seconds,
            on_end,
            on_stop,
            on_chief,
        )

    @property
    def ended(self) -> RunHalted | None:
        """Error with the reason why the run ended; None while it is not known to have ended."""
        error = self._error
        return error if isinstance(error, RunHalted) else None

    def barrier(
        self, name: str, changes: bool = False, patience_seconds: float = math.inf
    ) -> Opening:
        """Wait until the scripts of all workers have reached a barrier.

        The method `barrier` returns immediately if this script has passed the barrier before.

        Args:
            name: Name of the barrier, which is the same in all scripts and unique in a run. The
                third call of `fit` has the barriers "fit-3-begin" and "fit-3-end".
            changes: True if this script now trains another model than before the previous barrier.
            patience_seconds: Longest time to wait for the barrier, in seconds.

        Raises:
            TimeoutError: The barrier did not open within the time limit.
            RunHalted: The training run is over, so that the barrier never opens.
            Unreachable, RequestRejected: Shard 0 stayed unreachable, or rejected this script.
            InterruptedError: Another thread called `interrupt` during the wait.
        """
        with self._changed:
            if name in self._passed:
                return self._passed[name]
            self._waits_for = pb.Barrier(name=name, changes=changes)
            self._send(pb.ToServer(barrier=self._waits_for))
            try:
                where, deadline = (
                    f"waiting at the barrier {name}",
                    time.monotonic() + patience_seconds,
                )
                self._wait_until(lambda: name in self._passed, where, deadline)
            finally:
                self._waits_for = None
            return self._passed[name]

    def begin_fit(self, fit: pb.FitBegun) -> None:
        """Report to shard 0 that this script has begun a `fit` call."""
        self._report_fit(pb.ToServer(fit_begun=fit))

    def end_fit(self, fit: pb.FitEnded) -> None:
        """Report to shard 0 that a `fit` call of this script has returned."""
        self._report_fit(pb.ToServer(fit_ended=fit))

    def evaluate(self, fit: int, epoch: int, by_script: bool = False) -> pb.Evaluated | None:
        """Wait until the model has been evaluated at the end of an epoch of all scripts.

        Args:
            fit: Number of the call of `fit` in the script, from 1.
            epoch: Number of the epoch as Keras passes it to callbacks, from 0.
            by_script: True if only a worker's script can evaluate, not the evaluator process.

        Returns:
            The model's evaluation; its field `nobody` gives the reason if the model was not
            evaluated. None if this script must evaluate the model and pass the result to `answer`.

        Raises:
            RunHalted, Unreachable, RequestRejected, InterruptedError: The run is over, shard 0
                cannot be reached, shard 0 rejected this script, or `interrupt` was called.
        """
        place = (fit, epoch)
        with self._changed:
            self._awaits = pb.EpochEnded(fit=fit, epoch=epoch, by_script=by_script)
            if place not in self._evaluations:
                self._send(pb.ToServer(epoch_ended=self._awaits))
            try:
                self._wait_until(
                    lambda: place in self._evaluations or self._appointed_for == place,
                    f"waiting for the evaluation of epoch {epoch} of fit {fit}",
                )
            finally:
                self._awaits = None
            return self._evaluations.get(place)

    def answer(self, evaluated: pb.Evaluated) -> pb.Evaluated:
        """Report an evaluation that shard 0 requested from this script.

        Args:
            evaluated: Report with this script's metrics of the model, at the `fit` and the epoch
                that shard 0 requested.

        Returns:
            The evaluation that all scripts receive: the evaluation of this script, or of another
            script if shard 0 has requested it from that script in the meantime.

        Raises:
            RunHalted, Unreachable, RequestRejected, InterruptedError: The run is over, shard 0
                cannot be reached, shard 0 rejected this script, or `interrupt` was called.
        """
        place = (evaluated.fit, evaluated.epoch)
        with self._changed:
            self._awaits = pb.EpochEnded(fit=evaluated.fit, epoch=evaluated.epoch, by_script=True)
            self._unconfirmed = evaluated
            self._send(pb.ToServer(evaluated=evaluated))
            self._send(pb.ToServer(epoch_ended=self._awaits))
            try:
                self._wait_until(
                    lambda: place in self._evaluations,
                    "waiting for shard 0's confirmation",
                )
            finally:
                self._awaits = self._unconfirmed = self._appointed_for = None
            return self._evaluations[place]

    def meet(self, meeting: pb.EpochMeeting) -> pb.EpochMeeting:
        """Exchange metric states or stop requests with other workers' scripts after an epoch.

        Args:
            meeting: Message with the metric states or the stop request that this script sends to
                shard 0.

        Returns:
            Shard 0's answer: the metric states of all scripts, or the number of the fit's last
            epoch.

        Raises:
            RunHalted, Unreachable, RequestRejected, InterruptedError: The run is over, shard 0
                cannot be reached, shard 0 rejected this script, or `interrupt` was called.
        """
        stage, place = meeting.after_callbacks, (meeting.fit, meeting.epoch)

        def is_answered() -> bool:
            answer = self._meetings.get(stage)
            return answer is not None and (answer.fit, answer.epoch) == place

        with self._changed:
            self._meets = meeting
            self._send(pb.ToServer(epoch_meeting=meeting))
            try:
                where = f"waiting at the end of epoch {meeting.epoch} of fit {meeting.fit}"
                self._wait_until(is_answered, where)
            finally:
                self._meets = None
            return self._meetings[stage]

    def pass_by(self, name: str) -> None:
        """Report arrival at a barrier without waiting, so that other workers' scripts can pass."""
        with self._changed:
            self._send(pb.ToServer(barrier=pb.Barrier(name=name)))

    def stop_fit(self, fit: int, epochs: int) -> None:
        """End a `fit` early in all scripts (any thread); a second call for this `fit` does nothing.

        Args:
            fit: Number of the current call of `fit` in the script, from 1.
            epochs: Number of epochs after which the `fit` ends; 0 ends the `fit` immediately.
        """
        with self._changed:
            if fit not in self._stopped:
                self._stopped[fit] = epochs
                self._send(pb.ToServer(stop_fit=pb.StopFit(fit=fit, epochs=epochs)))

    def report(self, evaluated: pb.Evaluated) -> None:
        """Report an evaluation of the model that shard 0 has not requested from this script."""
        with self._changed:
            if self._session is None:
                self._unreported.append(evaluated)
            self._send(pb.ToServer(evaluated=evaluated))

    def finish(self, failed: bool = False, message: str = "", wait_seconds: float = 10.0) -> bool:
        """Report to shard 0 that this script has ended, and close the control stream.

        Args:
            failed: True if the script raised an error. The run then ends for all scripts.
            message: Text of the script's error, in one line.
            wait_seconds: Longest time to wait for shard 0's confirmation, in seconds.

        Returns:
            True if shard 0 confirmed the report of the script's end; False if shard 0 is
            unreachable or the run has already ended.
        """
        finished = pb.Finished(failed=failed, message=message[:_LONGEST_MESSAGE])
        deadline = time.monotonic() + wait_seconds
        with self._changed:
            self._finished = finished
            self._send(pb.ToServer(finished=finished))
            while not self._is_confirmed and self._error is None:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self._is_interrupted:
                    break
                self._changed.wait(min(_WAIT_SECONDS, remaining))
        self.close()
        return self._is_confirmed

    def interrupt(self) -> None:
        """Make a call that waits for shard 0 raise InterruptedError (callable in any thread)."""
        with self._changed:
            self._is_interrupted = True
            self._changed.notify_all()

    def resume(self) -> None:
        """Allow calls to wait for shard 0 again, after `interrupt` has made them raise."""
        with self._changed:
            self._is_interrupted = self._closing.is_set()

    def close(self) -> None:
        """Close the script's control stream to shard 0.

        If this script has not called `finish`, the other workers' scripts wait for this script
        until its lease ends.
        """
        self._closing.set()
        self.interrupt()
        with self._changed:
            session = self._session
        if session is not None:
            session.send_control(pb.ToServer(leave=pb.Leave(cause="done")))
            session.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)

    def _wait_until(
        self, condition: Callable[[], bool], where: str, deadline: float = math.inf
    ) -> None:
        """Wait until the control thread makes `condition` true; the caller holds the lock."""
        while not condition():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"timed out {where}")
            if self._error is not None:
                raise self._error
            if self._is_interrupted:
                raise InterruptedError(f"interrupted while {where}")
            self._changed.wait(_WAIT_SECONDS)

    def _report_fit(self, message: pb.ToServer) -> None:
        body = message.WhichOneof("body")
        with self._changed:
            self._fits = [fit for fit in self._fits if fit.WhichOneof("body") != body]
            self._fits.append(message)
            self._send(message)

    def _send(self, message: pb.ToServer) -> None:
        """Send a message on the open stream to shard 0; without one, `_report_again` sends it."""
        if self._session is not None:
            self._session.send_control(message)

    # -- the thread --------------------------------------------------------------------------

    def _keep(self) -> None:
        try:
            while not self._closing.is_set() and self._error is None:
                session, welcome = self._dialler.dial(self._patience_seconds)
                try:
                    self._listen(session, welcome)
                except (StreamLost, Malformed) as error:
                    if not self._closing.is_set():
                        logging.warning("lost the control stream to PS shard 0: %s", error)
                finally:
                    with self._changed:
                        self._session = None
                    session.close(0.0)
        except (Unreachable, RequestRejected) as error:
            self._fail(error)

    def _listen(self, session: ClientSession, welcome: pb.Welcome) -> None:
        """Receive shard 0's messages until the control stream or the run ends."""
        self._report_again(session)
        beat, beat_at = beat_seconds(welcome.lease_seconds), time.monotonic()
        while not self._closing.is_set() and self._error is None:
            received = session.listen_for(max(0.0, beat_at - time.monotonic()))
            if received is not None:
                self._receive(received[0])
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + beat
                session.send_control(pb.ToServer(heartbeat=pb.Heartbeat()))
        session.send_control(pb.ToServer(leave=pb.Leave(cause="done")))
        session.close()

    def _report_again(self, session: ClientSession) -> None:
        """Report this script's barriers, evaluations and end again on a new stream to shard 0.

        A restarted shard 0 has lost the reports of scripts, and messages queued on a lost stream
        may never have arrived.
        """
        with self._changed:
            passed = list(self._passed)[-_MOST_PASSED:]
            if passed or self._waits_for:
                barrier = pb.Barrier(
                    passed=passed, changed=[name for name in passed if self._passed[name].changes]
                )
                if self._waits_for is not None:
                    barrier.MergeFrom(self._waits_for)
                session.send_control(pb.ToServer(barrier=barrier))
            for fit in self._fits:
                session.send_control(fit)
            for evaluated in list(self._evaluations.values())[-_MOST_EVALUATIONS:]:
                session.send_control(pb.ToServer(evaluated=evaluated))
            if self._unconfirmed is not None:
                session.send_control(pb.ToServer(evaluated=self._unconfirmed))
            if self._awaits is not None:
                session.send_control(pb.ToServer(epoch_ended=self._awaits))
            for answer in self._meetings.values():
                known = pb.EpochMeeting(answers=True)
                known.MergeFrom(answer)
                session.send_control(pb.ToServer(epoch_meeting=known))
            if self._meets is not None:
                session.send_control(pb.ToServer(epoch_meeting=self._meets))
            for evaluated in self._unreported:
                session.send_control(pb.ToServer(evaluated=evaluated))
            self._unreported.clear()
            for number, epochs in self._stopped.items():
                stop = pb.StopFit(fit=number, epochs=epochs)
                session.send_control(pb.ToServer(stop_fit=stop))
            if self._finished is not None:
                session.send_control(pb.ToServer(finished=self._finished))
            self._session = session

    def _receive(self, message: pb.ToClient) -> None:
        body = message.WhichOneof("body")
        if body == "halt":
            self._fail(RunHalted(message.halt.cause, message.halt.message))
        elif body == "refusal":
            self._fail(RequestRejected(message.refusal))
        elif body == "chief":
            self._on_chief(message.chief.worker)
        elif body == "stop_fit":
            self._on_stop(message.stop_fit.fit, message.stop_fit.epochs)
        elif body in ("barrier", "evaluated", "epoch_ended", "epoch_meeting", "finished"):
            with self._changed:
                if body == "barrier":
                    barrier = message.barrier
                    self._passed[barrier.name] = Opening(barrier.changes, barrier.offers)
                elif body == "evaluated":
                    evaluated = message.evaluated
                    self._evaluations[evaluated.fit, evaluated.epoch] = evaluated
                elif body == "epoch_ended":
                    self._appointed_for = message.epoch_ended.fit, message.epoch_ended.epoch
                elif body == "epoch_meeting":
                    answer = message.epoch_meeting
                    self._meetings[answer.after_callbacks] = answer
                else:
                    self._is_confirmed = True
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """Store the control stream's first fatal error; wake the calls that wait for shard 0."""
        with self._changed:
            if self._error is not None or self._closing.is_set():
                return
            self._error, has_finished = error, self._finished is not None
            self._changed.notify_all()
        if isinstance(error, RunHalted):
            if not has_finished:
                self._on_end(error.cause, error.message)
        else:
            logging.error("the worker's control stream to PS shard 0 has failed: %s", error)
