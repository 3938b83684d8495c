"""The evaluator's gRPC streams: evaluation requests from shard 0, and weights from every shard."""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Sequence

from absl import logging

from thinwire.ops.types import ModelSpec, ShardLayout
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.session import ClientSession, RequestRejected, payload_limit
from thinwire.runtime.run.settings import Run
from thinwire.runtime.telemetry.run_status import RunStatus
from thinwire.supervisor.evaluator import ModelFetcher, ModelView
from thinwire.supervisor.shard_stream import ShardStreams, dialler_of

#: Limit of a message's payload: the stream of evaluation requests carries no weights.
_MOST_BYTES = 1 << 16


class EvaluationRequests:
    """Evaluator's client of shard 0, which receives evaluation requests and sends the results.

    A thread reads the stream from shard 0 and reconnects when shard 0 restarts.

    Args:
        run: Settings of the training run.
    """

    def __init__(self, run: Run) -> None:
        self.run_id = ""
        self._run = run
        self._closing = threading.Event()
        self._changed = threading.Condition()
        # The condition `_changed` guards the following attributes:
        self._session: ClientSession | None = None
        self._fits: dict[int, pb.FitBegun] = {}
        self._histories: dict[int, str] = {}
        # Numbers of the calls of fit that a worker's script evaluates.
        self._of_scripts: set[int] = set()
        self._open: dict[
            tuple[int, int], None
        ] = {}  # unanswered evaluation requests: (fit, epoch) in order of arrival
        self._answered: dict[tuple[int, int], pb.Evaluated] = {}
        self._version = self._num_news = 0
        self._halt_cause = ""
        self._error: Exception | None = None
        incarnation = secrets.randbits(63) + 1
        self._dialler = dialler_of(
            run, 0, lambda: hello_of(run, 0, self.run_id, incarnation), _MOST_BYTES, self._closing
        )
        self._thread = threading.Thread(target=self._keep, name="requests", daemon=True)
        self._thread.start()

    @property
    def newest_fit(self) -> int:
        """Number of the newest call of fit that a worker has begun; 0 before the first call."""
        return max(self._fits, default=0)

    @property
    def has_validation(self) -> bool:
        """True if a worker has begun a call of fit with validation data."""
        with self._changed:
            return any(fit.validates for fit in self._fits.values())

    @property
    def version(self) -> int:
        """Number of updates applied to the central model, as of about one second ago."""
        return self._version

    @property
    def halt_cause(self) -> str:
        """Reason why the run ended; empty while the run continues."""
        return self._halt_cause

    def fit(self, number: int) -> pb.FitBegun | None:
        """Return the workers' report that a call of fit has begun; None before it begins."""
        return self._fits.get(number)

    def is_by_script(self, number: int) -> bool:
        """Return True if a worker's script, not the evaluator, makes the evaluations of a call of
        fit.
        """
        fit = self._fits.get(number)
        return number in self._of_scripts or (fit is not None and fit.by_script)

    def history(self, number: int) -> str | None:
        """Return the Keras history of a call of fit as JSON, possibly ""; None before the call of
        fit ends.
        """
        return self._histories.get(number)

    def take(self, newest: int) -> tuple[int, int] | None:
        """Return fit and epoch of the oldest unanswered evaluation request; None if all are
        answered.

        Args:
            newest: Number of the call of fit that the evaluator has reached; requests of later
                calls stay open.
        """
        with self._changed:
            return next((place for place in self._open if place[0] <= newest), None)

    @property
    def num_news(self) -> int:
        """Number of messages received from shard 0, not counting status reports and Waiting."""
        return self._num_news

    def wait(self, seconds: float, num_news: int) -> None:
        """Wait until a message from shard 0 arrives or the time limit has passed.

        Args:
            seconds: Time limit of the wait for a message, in seconds.
            num_news: Value of the attribute `num_news` that the caller has seen. If shard 0 has
                sent more messages since, `wait` returns immediately.

        Raises:
            Unreachable: Shard 0 did not answer this client within the reconnect timeout.
            RequestRejected: Shard 0 rejects this evaluator.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._num_news > num_news, seconds
            )
            if self._error is not None:
                raise self._error

    def report(self, evaluated: pb.Evaluated) -> None:
        """Send an evaluation's result to shard 0; mark the evaluation request as answered."""
        with self._changed:
            if evaluated.answers:
                place = (evaluated.fit, evaluated.epoch)
                self._open.pop(place, None)
                self._answered[place] = evaluated
            if self._session is not None:
                self._session.send_control(pb.ToServer(evaluated=evaluated))

    def close(self) -> None:
        """Send the evaluator's pending messages, leave the run and end the stream to shard 0."""
        self._closing.set()
        with self._changed:
            session = self._session
        if session is not None:
            session.send_control(pb.ToServer(leave=pb.Leave(cause="done")))
            session.close()
        self._thread.join()

    # -- the thread ---------------------------------------------------------------------------

    def _keep(self) -> None:
        try:
            while not (self._closing.is_set() or self._halt_cause):
                patience = self._run.reconnect_timeout_seconds
                session, welcome = self._dialler.dial(patience)
                self.run_id = welcome.run_id
                with self._changed:
                    self._session, self._open = session, {}
                try:
                    while True:
                        self._receive(session, *session.listen()[:1])
                except (StreamLost, Malformed, ValueError) as error:
                    if not (self._closing.is_set() or self._halt_cause):
                        logging.warning("lost the stream of evaluation requests: %s", error)
                finally:
                    with self._changed:
                        self._session = None
                    session.close(0.0)
        except (Unreachable, RequestRejected) as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _receive(self, session: ClientSession, message: pb.ToClient) -> None:
        body = message.WhichOneof("body")
        with self._changed:
            self._num_news += body not in ("waiting", "report")
            if body == "report":
                self._version = RunStatus.from_json(message.report.document).version
            elif body == "fit_begun":
                self._fits[message.fit_begun.fit] = message.fit_begun
            elif body == "fit_ended":
                self._histories[message.fit_ended.fit] = message.fit_ended.history
            elif body == "epoch_ended":
                ended = message.epoch_ended
                place = (ended.fit, ended.epoch)
                if ended.by_script:
                    self._of_scripts.add(ended.fit)
                elif (answer := self._answered.get(place)) is not None:
                    # A restarted shard repeats its evaluation requests. The evaluator sends its
                    # first answer again, so that all workers get the metrics of one model.
                    session.send_control(pb.ToServer(evaluated=answer))
                else:
                    self._open[place] = None
            elif body == "halt":
                self._halt_cause = message.halt.cause
            elif body == "refusal":
                self._error = RequestRejected(message.refusal)
            self._changed.notify_all()


class CentralModel:
    """Client that pulls the central model of one call of fit from the shards.

    Args:
        run: Settings of the training run.
        run_id: Random identifier of the training run.
        spec: Names and shapes of the model's shared variables.
        layouts: Layout (the slices of variables that a shard stores) of every shard, in the order
            of shard ids.
        num_statistics: Number of values in the moving statistics that shard 0 averages over the
            workers.
        phase: Number of the script's model in the run; the shards reject a client with a
            different number.
    """

    def __init__(
        self,
        run: Run,
        run_id: str,
        spec: ModelSpec,
        layouts: Sequence[ShardLayout],
        num_statistics: int,
        phase: int = 0,
    ) -> None:
        limits = [payload_limit(layout, num_statistics) for layout in layouts]
        hello = functools.partial(hello_of, run, run_id=run_id, phase=phase)
        self._streams = ShardStreams(run, hello, limits, threading.Event())
        in_step = len(run.method.sync.groups) == 1
        self._fetcher = ModelFetcher(spec, layouts, num_statistics, in_step)

    def fetch(self) -> ModelView:
        """Pull the central model's current weights from all shards and return them.

        Raises:
            Unreachable: A shard did not answer within the reconnect timeout.
            RequestRejected: A shard rejects this evaluator.
            ConfigurationError: A shard's reply does not contain the variable slices that the shard
                stores.
        """
        while True:
            if not self._streams.shards or self._streams.is_lost:
                self._streams.connect()
            view = self._fetcher.fetch(self._streams.shards)
            if view is not None:
                return view
            self._streams.check()

    def close(self) -> None:
        """Send Leave messages, and end the evaluator's streams to all shards."""
        self._streams.leave()


def hello_of(run: Run, shard: int, run_id: str, incarnation: int = 0, phase: int = 0) -> pb.Hello:
    """Return an evaluator's Hello message; incarnation (process number) 0 means that it only pulls
    the model. The shards reject an evaluator of another phase (number of the script's model).
    """
    return pb.Hello(
        protocol_version=messages.PROTOCOL_VERSION,
        role=pb.ROLE_EVALUATOR,
        run_id=run_id,
        incarnation=incarnation,
        shard=shard,
        num_shards=run.nb_ps,
        phase=phase,
    )
