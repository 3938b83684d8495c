"""A script's control stream to shard 0: barriers, evaluations, and the end of the run.

A thread keeps the stream, from the script's first fit to its end and through restarts of the PS,
which learns from it anew what this script waits for, has passed and has finished.
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

#: Nothing large comes on this stream.
_MAX_PAYLOAD_BYTES = 1 << 16
#: A signal of the operating system is handled between two waits.
_WAIT_SECONDS = 0.25
#: Passed barriers that are reported to a PS that was started again.
_MOST_PASSED = 10_000
#: Evaluations likewise.
_MOST_EVALUATIONS = 100
_LONGEST_MESSAGE = 1000
#: How long the thread may take to end; it is a daemon.
_CLOSE_SECONDS = 5.0


class RunHalted(Exception):
    """The run is over: `cause` is its stop reason, `message` an explanation where there is one."""

    def __init__(self, cause: str, message: str = "") -> None:
        super().__init__(f"the run has ended ({cause}){f': {message}' if message else ''}")
        self.cause, self.message = cause, message


@dataclasses.dataclass(frozen=True)
class Opening:
    """How a barrier has opened.

    Attributes:
        changes: Some script's model is another one, and a phase begins for all.
        offers: This script's model is the one that all take over.
    """

    changes: bool = False
    offers: bool = False


class Control:
    """A worker's script beside its training stream.

    `barrier`, `pass_by`, `evaluate`, `answer`, `meet` and `finish` are for one thread;
    `interrupt` and `stop_fit` may be called from any.

    Args:
        address: ``host:port`` of shard 0.
        id_worker: Of this worker.
        num_shards: Of the run.
        run_id: Of the run, as the training stream has it; empty: of any run at that address.
        credentials: Of this worker.
        patience_seconds: How long shard 0 may be away.
        on_end: Called once with (cause, message), in this object's thread, when the run ends before
            this script does.
        on_stop: Called with the number of a fit, in this object's thread, when another script ends
            it for all before its time.
        on_chief: Called likewise with the worker whose script is to write the files.
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
        # Guarded by `_changed`:
        self._session: ClientSession | None = None
        self._passed: dict[str, Opening] = {}  # in order
        self._waits_for: pb.Barrier | None = None
        self._fits: list[pb.ToServer] = []  # the newest report of a fit's beginning, and of an end
        self._evaluations: dict[tuple[int, int], pb.Evaluated] = {}  # by fit and epoch
        self._awaits: pb.EpochEnded | None = None
        self._appointed_for: tuple[int, int] | None = None  # an evaluation by this script
        self._unconfirmed: pb.Evaluated | None = None  # that evaluation
        self._meetings: dict[
            bool, pb.EpochMeeting
        ] = {}  # the newest answers: after callbacks, or not
        self._meets: pb.EpochMeeting | None = None
        self._stopped: dict[int, int] = {}  # fits, by this script, and after how many epochs
        self._unreported: list[pb.Evaluated] = []  # by this script, while shard 0 was away
        self._finished: pb.Finished | None = None
        self._is_confirmed = self._is_interrupted = False
        self._error: Exception | None = None  # why nothing comes any more
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
        """Return the control of a worker of a run."""
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
        """The end of the run, as far as it is known here."""
        error = self._error
        return error if isinstance(error, RunHalted) else None

    def barrier(
        self, name: str, changes: bool = False, patience_seconds: float = math.inf
    ) -> Opening:
        """Wait until the scripts of all workers have come to a barrier; no time if it has opened.

        Args:
            name: The same in all scripts, and used once; "fit-3-begin" and "fit-3-end" are those of
                the third fit. Coming again to one that was passed is nothing.
            changes: Whether this script's model is another one since the barrier before.
            patience_seconds: How long to wait.

        Raises:
            TimeoutError: The barrier has not opened in that time.
            RunHalted: The run is over.
            Unreachable, RequestRejected: Shard 0 is gone for good, or rejects this script.
            InterruptedError: `interrupt` was called.
        """
        with self._changed:
            if name in self._passed:
                return self._passed[name]
            self._waits_for = pb.Barrier(name=name, changes=changes)
            self._send(pb.ToServer(barrier=self._waits_for))
            try:
                where, deadline = f"at the barrier {name}", time.monotonic() + patience_seconds
                self._wait_until(lambda: name in self._passed, where, deadline)
            finally:
                self._waits_for = None
            return self._passed[name]

    def begin_fit(self, fit: pb.FitBegun) -> None:
        """Report that this script has begun a fit."""
        self._report_fit(pb.ToServer(fit_begun=fit))

    def end_fit(self, fit: pb.FitEnded) -> None:
        """Report that a fit of this script has returned."""
        self._report_fit(pb.ToServer(fit_ended=fit))

    def evaluate(self, fit: int, epoch: int, by_script: bool = False) -> pb.Evaluated | None:
        """Wait until the model has been evaluated at the end of an epoch of all scripts.

        Args:
            fit: From 1.
            epoch: As Keras counts them.
            by_script: Whether a script must evaluate, and no evaluator can.

        Returns:
            The evaluation, or why there is none (its `nobody`). None: this script is to evaluate,
            and to give the result to `answer`.

        Raises:
            RunHalted, Unreachable, RequestRejected, InterruptedError: As `barrier`.
        """
        place = (fit, epoch)
        with self._changed:
            self._awaits = pb.EpochEnded(fit=fit, epoch=epoch, by_script=by_script)
            if place not in self._evaluations:
                self._send(pb.ToServer(epoch_ended=self._awaits))
            try:
                self._wait_until(
                    lambda: place in self._evaluations or self._appointed_for == place,
                    f"at the end of epoch {epoch} of fit {fit}",
                )
            finally:
                self._awaits = None
            return self._evaluations.get(place)

    def answer(self, evaluated: pb.Evaluated) -> pb.Evaluated:
        """Report an evaluation that this script was appointed for.

        Args:
            evaluated: By this script, at the place that it was appointed for.

        Returns:
            What all scripts get: this one, or that of another script which was appointed meanwhile.

        Raises:
            RunHalted, Unreachable, RequestRejected, InterruptedError: As `barrier`.
        """
        place = (evaluated.fit, evaluated.epoch)
        with self._changed:
            self._awaits = pb.EpochEnded(fit=evaluated.fit, epoch=evaluated.epoch, by_script=True)
            self._unconfirmed = evaluated
            self._send(pb.ToServer(evaluated=evaluated))
            self._send(pb.ToServer(epoch_ended=self._awaits))
            try:
                self._wait_until(
                    lambda: place in self._evaluations, "for an evaluation to be confirmed"
                )
            finally:
                self._awaits = self._unconfirmed = self._appointed_for = None
            return self._evaluations[place]

    def meet(self, meeting: pb.EpochMeeting) -> pb.EpochMeeting:
        """Exchange what the scripts bring to the end of an epoch.

        Args:
            meeting: What this script brings.

        Returns:
            The shard's answer.

        Raises:
            RunHalted, Unreachable, RequestRejected, InterruptedError: As `barrier`.
        """
        stage, place = meeting.after_callbacks, (meeting.fit, meeting.epoch)

        def is_answered() -> bool:
            answer = self._meetings.get(stage)
            return answer is not None and (answer.fit, answer.epoch) == place

        with self._changed:
            self._meets = meeting
            self._send(pb.ToServer(epoch_meeting=meeting))
            try:
                where = f"at the end of epoch {meeting.epoch} of fit {meeting.fit}"
                self._wait_until(is_answered, where)
            finally:
                self._meets = None
            return self._meetings[stage]

    def pass_by(self, name: str) -> None:
        """Come to a barrier, so that others may pass it, and go on."""
        with self._changed:
            self._send(pb.ToServer(barrier=pb.Barrier(name=name)))

    def stop_fit(self, fit: int, epochs: int) -> None:
        """End a fit of all scripts before its time; once (any thread).

        Args:
            fit: The present one.
            epochs: After how many of its epochs; 0: immediately.
        """
        with self._changed:
            if fit not in self._stopped:
                self._stopped[fit] = epochs
                self._send(pb.ToServer(stop_fit=pb.StopFit(fit=fit, epochs=epochs)))

    def report(self, evaluated: pb.Evaluated) -> None:
        """Report an evaluation that this script has made itself; it answers nothing."""
        with self._changed:
            if self._session is None:
                self._unreported.append(evaluated)
            self._send(pb.ToServer(evaluated=evaluated))

    def finish(self, failed: bool = False, message: str = "", wait_seconds: float = 10.0) -> bool:
        """Report that this script has ended, and end the stream.

        Args:
            failed: It raised an error: the run ends, with every other script.
            message: The error, in one line.
            wait_seconds: How long to wait for shard 0 to confirm it.

        Returns:
            Whether shard 0 knows; False if it is away, or the run has ended before.
        """
        finished = pb.Finished(failed=failed, message=message[:_LONGEST_MESSAGE])
        deadline = time.monotonic() + wait_seconds
        with self._changed:
            self._finished = finished
            self._send(pb.ToServer(finished=finished))
            while not self._is_confirmed and self._error is None:
                left = deadline - time.monotonic()
                if left <= 0 or self._is_interrupted:
                    break
                self._changed.wait(min(_WAIT_SECONDS, left))
        self.close()
        return self._is_confirmed

    def interrupt(self) -> None:
        """Let a call that waits return (any thread)."""
        with self._changed:
            self._is_interrupted = True
            self._changed.notify_all()

    def resume(self) -> None:
        """Let calls wait again, after `interrupt`."""
        with self._changed:
            self._is_interrupted = self._closing.is_set()

    def close(self) -> None:
        """End the stream. A script that has not finished is missed by the others for a lease."""
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
        """Wait for the thread below, which then notifies; `_changed` is held."""
        while not condition():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"nothing came {where}")
            if self._error is not None:
                raise self._error
            if self._is_interrupted:
                raise InterruptedError(f"interrupted {where}")
            self._changed.wait(_WAIT_SECONDS)

    def _report_fit(self, message: pb.ToServer) -> None:
        body = message.WhichOneof("body")
        with self._changed:
            self._fits = [each for each in self._fits if each.WhichOneof("body") != body]
            self._fits.append(message)
            self._send(message)

    def _send(self, message: pb.ToServer) -> None:
        """Send on the present stream; on the next one `_report_again` does."""
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
                        logging.warning("lost the control stream: %s", error)
                finally:
                    with self._changed:
                        self._session = None
                    session.close(0.0)
        except (Unreachable, RequestRejected) as error:
            self._fail(error)

    def _listen(self, session: ClientSession, welcome: pb.Welcome) -> None:
        """Receive until the stream or the run ends."""
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
        """Let a shard know what it may have forgotten, or has never received."""
        with self._changed:
            passed = list(self._passed)[-_MOST_PASSED:]
            if passed or self._waits_for:
                barrier = pb.Barrier(
                    passed=passed, changed=[each for each in passed if self._passed[each].changes]
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
                    came = message.barrier
                    self._passed[came.name] = Opening(came.changes, came.offers)
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
        """Note why nothing comes any more, once."""
        with self._changed:
            if self._error is not None or self._closing.is_set():
                return
            self._error, has_finished = error, self._finished is not None
            self._changed.notify_all()
        if isinstance(error, RunHalted):
            if not has_finished:
                self._on_end(error.cause, error.message)
        else:
            logging.error("the control stream is gone: %s", error)
