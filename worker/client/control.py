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
from collections.abc import Callable, Iterator

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


class ScriptReports:
    """A script's reports to shard 0, and the answers: all that a new stream must report again.

    A restarted shard 0 has lost the reports of scripts, and messages queued on a lost stream may
    never have arrived. The lock of `ControlStream` guards all attributes.

    Attributes:
        passed: Maps a barrier's name to shard 0's answer, in the order in which the barriers
            opened.
        evaluations: Maps (fit, epoch) to the evaluation of the model.
        appointed_for: Pair (fit, epoch) that this script must evaluate; None: no request.
        meetings: Newest answers of shard 0 to the scripts' exchanges at the end of an epoch. Key
            True: the exchange after the epoch's callbacks. Key False: the exchange before the
            callbacks.
        pending: Messages of the call that waits for shard 0's answer; empty without one.
        fits: Newest message FitBegun and newest message FitEnded of this script, by their names in
            ToServer, in the order of the reports.
        stopped: Maps the number of a `fit` to the message by which this script has ended it.
        unreported: Evaluations that this script made while shard 0 was unreachable.
        finished: Message of the script's end; None before the end.
        is_confirmed: True if shard 0 has confirmed the script's end.
    """

    def __init__(self) -> None:
        self.passed: dict[str, Opening] = {}
        self.evaluations: dict[tuple[int, int], pb.Evaluated] = {}
        self.appointed_for: tuple[int, int] | None = None
        self.meetings: dict[bool, pb.EpochMeeting] = {}
        self.pending: tuple[pb.ToServer, ...] = ()
        self.fits: dict[str, pb.ToServer] = {}
        self.stopped: dict[int, pb.ToServer] = {}
        self.unreported: list[pb.ToServer] = []
        self.finished: pb.ToServer | None = None
        self.is_confirmed = False

    def again(self) -> Iterator[pb.ToServer]:
        """Yield the messages that a new stream to shard 0 must send first."""
        passed, pending = list(self.passed)[-_MOST_PASSED:], self.pending
        waits = bool(pending) and pending[0].HasField("barrier")
        if passed or waits:
            changed = [name for name in passed if self.passed[name].changes]
            barrier = pb.Barrier(passed=passed, changed=changed)
            if waits:
                barrier.MergeFrom(pending[0].barrier)
                pending = ()
            yield pb.ToServer(barrier=barrier)
        yield from self.fits.values()
        for evaluated in list(self.evaluations.values())[-_MOST_EVALUATIONS:]:
            yield pb.ToServer(evaluated=evaluated)
        for answer in self.meetings.values():
            known = pb.EpochMeeting(answers=True)
            known.MergeFrom(answer)
            yield pb.ToServer(epoch_meeting=known)
        yield from pending
        yield from self.unreported
        self.unreported.clear()
        yield from self.stopped.values()
        if self.finished is not None:
            yield self.finished

    def receive(self, message: pb.ToClient) -> None:
        """Record shard 0's answer to a report of this script."""
        match message.WhichOneof("body"):
            case "barrier":
                barrier = message.barrier
                self.passed[barrier.name] = Opening(barrier.changes, barrier.offers)
            case "evaluated":
                evaluated = message.evaluated
                self.evaluations[evaluated.fit, evaluated.epoch] = evaluated
            case "epoch_ended":
                self.appointed_for = message.epoch_ended.fit, message.epoch_ended.epoch
            case "epoch_meeting":
                self.meetings[message.epoch_meeting.after_callbacks] = message.epoch_meeting
            case "finished":
                self.is_confirmed = True


class ControlStream:
    """A script's control stream to shard 0, which a background thread opens again if it is lost.

    Args:
        run: Settings of the run. For as long as its `reconnect_timeout_seconds`, shard 0 may be
            unreachable before waiting calls raise Unreachable.
        id_worker: Id of this worker, from 1.
        run_id: Id of the run, from the training stream; with an empty id, any run at the address is
            accepted.
        on_stop: Function that is called with (fit, epochs), in the control thread, when another
            script ends the call of `fit` early for all scripts.
        on_chief: Function that is called with a worker id, in the control thread, when that worker
            becomes the chief, whose script writes the files.
    """

    def __init__(
        self,
        run: Run,
        id_worker: int,
        run_id: str = "",
        on_stop: Callable[[int, int], None] = lambda fit, epochs: None,
        on_chief: Callable[[int], None] = lambda worker: None,
    ) -> None:
        self._patience_seconds = run.reconnect_timeout_seconds
        self._on_stop, self._on_chief = on_stop, on_chief
        address, credentials, arrivals = run.addresses[0], run.credentials, rhythm()
        hello = pb.Hello(
            protocol_version=messages.PROTOCOL_VERSION,
            role=pb.ROLE_SCRIPT,
            id=id_worker,
            run_id=run_id,
            incarnation=secrets.randbits(63) + 1,
            num_shards=run.nb_ps,
        )
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
        self._reports = ScriptReports()
        self._is_interrupted = False
        # Error that ended the control stream for good; None while the stream can reconnect.
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._keep, name="control", daemon=True)
        self._thread.start()

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

    def _request(
        self,
        pending: tuple[pb.ToServer, ...],
        is_answered: Callable[[], bool],
        where: str,
        patience_seconds: float = math.inf,
    ) -> None:
        """Send messages and wait until shard 0 has answered them; the caller holds the lock."""
        deadline = time.monotonic() + patience_seconds
        self._reports.pending = pending
        try:
            for message in pending:
                self._send(message)
            while not is_answered():
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"timed out {where}")
                if self._error is not None:
                    raise self._error
                if self._is_interrupted:
                    raise InterruptedError(f"interrupted while {where}")
                self._changed.wait(_WAIT_SECONDS)
        finally:
            self._reports.pending = ()

    def _send(self, message: pb.ToServer) -> None:
        """Send a message on the open stream to shard 0; without one, `ScriptReports.again`
        yields it to the next stream.
        """
        if self._session is not None:
            self._session.send_control(message)

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
        with self._changed:
            for message in self._reports.again():
                session.send_control(message)
            self._session = session
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

    def _receive(self, message: pb.ToClient) -> None:
        match message.WhichOneof("body"):
            case "halt":
                self._fail(RunHalted(message.halt.cause, message.halt.message))
            case "refusal":
                self._fail(RequestRejected(message.refusal))
            case "chief":
                self._on_chief(message.chief.worker)
            case "stop_fit":
                self._on_stop(message.stop_fit.fit, message.stop_fit.epochs)
            case _:
                with self._changed:
                    self._reports.receive(message)
                    self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """Store the control stream's first fatal error; wake the calls that wait for shard 0."""
        with self._changed:
            if self._error is not None or self._closing.is_set():
                return
            self._error = error
            self._changed.notify_all()
        if not isinstance(error, RunHalted):
            logging.error("the worker's control stream to PS shard 0 has failed: %s", error)


class Control(ControlStream):
    """Coordinates a worker's script with other workers' scripts, over its control stream.

    All calls of `barrier`, `pass_by`, `evaluate`, `answer`, `meet` and `finish` must come from one
    thread. The methods `interrupt` and `stop_fit` of `Control` may be called from any thread.
    """

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
            passed = self._reports.passed
            if name not in passed:
                message = pb.ToServer(barrier=pb.Barrier(name=name, changes=changes))
                where = f"waiting at the barrier {name}"
                self._request((message,), lambda: name in passed, where, patience_seconds)
            return passed[name]

    def report_fit(self, message: pb.ToServer) -> None:
        """Report to shard 0 that a `fit` call has begun (FitBegun) or has returned (FitEnded)."""
        body, fits = message.WhichOneof("body") or "", self._reports.fits
        with self._changed:
            fits.pop(body, None)
            fits[body] = message
            self._send(message)

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
        place, reports = (fit, epoch), self._reports
        with self._changed:
            if place not in reports.evaluations:
                ended = pb.EpochEnded(fit=fit, epoch=epoch, by_script=by_script)
                self._request(
                    (pb.ToServer(epoch_ended=ended),),
                    lambda: place in reports.evaluations or reports.appointed_for == place,
                    f"waiting for the evaluation of epoch {epoch} of fit {fit}",
                )
            return reports.evaluations.get(place)

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
        place, found = (evaluated.fit, evaluated.epoch), self._reports.evaluations
        ended = pb.EpochEnded(fit=evaluated.fit, epoch=evaluated.epoch, by_script=True)
        pending = pb.ToServer(evaluated=evaluated), pb.ToServer(epoch_ended=ended)
        with self._changed:
            try:
                where = "waiting for shard 0's confirmation"
                self._request(pending, lambda: place in found, where)
            finally:
                self._reports.appointed_for = None
            return found[place]

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
            answer = self._reports.meetings.get(stage)
            return answer is not None and (answer.fit, answer.epoch) == place

        with self._changed:
            where = f"waiting at the end of epoch {meeting.epoch} of fit {meeting.fit}"
            self._request((pb.ToServer(epoch_meeting=meeting),), is_answered, where)
            return self._reports.meetings[stage]

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
            if fit not in self._reports.stopped:
                message = pb.ToServer(stop_fit=pb.StopFit(fit=fit, epochs=epochs))
                self._reports.stopped[fit] = message
                self._send(message)

    def report(self, evaluated: pb.Evaluated) -> None:
        """Report an evaluation of the model that shard 0 has not requested from this script."""
        message = pb.ToServer(evaluated=evaluated)
        with self._changed:
            if self._session is None:
                self._reports.unreported.append(message)
            self._send(message)

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
            self._reports.finished = pb.ToServer(finished=finished)
            self._send(self._reports.finished)
            while not self._reports.is_confirmed and self._error is None:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self._is_interrupted:
                    break
                self._changed.wait(min(_WAIT_SECONDS, remaining))
        self.close()
        return self._reports.is_confirmed
