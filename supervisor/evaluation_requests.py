"""The evaluator's ends of its streams: requests from shard 0, and the central model from all."""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Sequence

from absl import logging

from thinwire.ops.types import ModelSpec, ShardLayout
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.session import (
    ClientSession,
    Dialler,
    RequestRejected,
    payload_limit,
    rhythm,
)
from thinwire.runtime.run.settings import Run
from thinwire.runtime.telemetry.run_status import RunStatus
from thinwire.supervisor.evaluator import ModelFetcher, ModelView
from thinwire.supervisor.shard_stream import ShardStream, open_streams

#: Nothing large comes on the stream of requests.
_MOST_BYTES = 1 << 16


class EvaluationRequests:
    """What shard 0 wants to be evaluated; a thread keeps the stream through restarts of the shard.

    Args:
        run: The run's settings.
    """

    def __init__(self, run: Run) -> None:
        self.run_id = ""
        self._run = run
        self._closing = threading.Event()
        self._changed = threading.Condition()
        # Guarded by `_changed`:
        self._session: ClientSession | None = None
        self._fits: dict[int, pb.FitBegun] = {}
        self._histories: dict[int, str] = {}
        self._of_scripts: set[int] = set()  # fits whose evaluations a script makes
        self._open: dict[tuple[int, int], None] = {}  # in order
        self._answered: dict[tuple[int, int], pb.Evaluated] = {}
        self._version = self._num_news = 0
        self._halt_cause = ""
        self._error: Exception | None = None
        incarnation, arrivals = secrets.randbits(63) + 1, rhythm()

        def make() -> ClientSession:
            hello = hello_of(run, 0, self.run_id, incarnation)
            credentials = run.credentials
            return ClientSession(
                run.addresses[0], hello, _MOST_BYTES, credentials=credentials, arrivals=arrivals
            )

        address = run.addresses[0]
        self._dialler = Dialler(f"the PS at {address}", make, self._closing, (pb.REASON_STARTING,))
        self._thread = threading.Thread(target=self._keep, name="requests", daemon=True)
        self._thread.start()

    @property
    def newest_fit(self) -> int:
        """The number of the newest fit that a worker has begun; 0: none."""
        return max(self._fits, default=0)

    @property
    def has_validation(self) -> bool:
        """Whether a worker has begun a fit with validation data."""
        with self._changed:
            return any(fit.validates for fit in self._fits.values())

    @property
    def version(self) -> int:
        """Updates applied to the central model, as of about a second ago."""
        return self._version

    @property
    def halt_cause(self) -> str:
        """Why the run has ended; empty while it goes on."""
        return self._halt_cause

    def fit(self, number: int) -> pb.FitBegun | None:
        """Return what workers have reported of a fit; None: it has not begun."""
        return self._fits.get(number)

    def is_by_script(self, number: int) -> bool:
        """Return whether a script of a worker makes the evaluations of a fit."""
        fit = self._fits.get(number)
        return number in self._of_scripts or (fit is not None and fit.by_script)

    def history(self, number: int) -> str | None:
        """Return what a fit has returned, as JSON, maybe empty; None: it has not returned."""
        return self._histories.get(number)

    def take(self, newest: int) -> tuple[int, int] | None:
        """Return the fit and the epoch of the oldest request that is not answered; None: none.

        Args:
            newest: The fit that the evaluator has come to; those of later ones stay open.
        """
        with self._changed:
            return next((place for place in self._open if place[0] <= newest), None)

    @property
    def num_news(self) -> int:
        """How many messages have come."""
        return self._num_news

    def wait(self, seconds: float, num_news: int) -> None:
        """Wait for news, for so long at most.

        Args:
            seconds: At most.
            num_news: What was known before; no time if there is more.

        Raises:
            Unreachable, RequestRejected: Shard 0 is gone for good, or rejects this evaluator.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._error is not None or self._num_news > num_news, seconds
            )
            if self._error is not None:
                raise self._error

    def report(self, evaluated: pb.Evaluated) -> None:
        """Send an evaluation; one that answers a request closes that."""
        with self._changed:
            if evaluated.answers:
                place = (evaluated.fit, evaluated.epoch)
                self._open.pop(place, None)
                self._answered[place] = evaluated
            if self._session is not None:
                self._session.send_control(pb.ToServer(evaluated=evaluated))

    def close(self) -> None:
        """End the stream after what has been sent."""
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
                        logging.warning("lost the stream of requests: %s", error)
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
                elif (known := self._answered.get(place)) is not None:
                    session.send_control(pb.ToServer(evaluated=known))
                else:
                    self._open[place] = None
            elif body == "halt":
                self._halt_cause = message.halt.cause
            elif body == "refusal":
                self._error = RequestRejected(message.refusal)
            self._changed.notify_all()


class CentralModel:
    """The central model of one fit, as its shards have it.

    Args:
        run: The run's settings.
        run_id: Of the run.
        spec: The shared variables.
        layouts: Of all shards.
        num_statistics: Numbers in the moving statistics that shard 0 averages.
        phase: Of the script.
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
        self._run, self._run_id, self._phase = run, run_id, phase
        self._shards: list[ShardStream] = []
        self._closing = threading.Event()
        limits = (payload_limit(layout, num_statistics) for layout in layouts)
        self._diallers = [self._dialler(number, limit) for number, limit in enumerate(limits)]
        in_step = len(run.method.sync.groups) == 1
        self._fetcher = ModelFetcher(spec, layouts, num_statistics, in_step)

    def fetch(self) -> ModelView:
        """Return the model as it is now.

        Raises:
            Unreachable, RequestRejected: A shard does not answer, or rejects this evaluator.
            ConfigurationError: A shard answers with something else than its model.
        """
        while True:
            if not self._shards or any(shard.lost.is_set() for shard in self._shards):
                self._connect()
            view = self._fetcher.fetch(self._shards)
            if view is not None:
                return view
            for shard in self._shards:
                if shard.refusal is not None:
                    raise RequestRejected(shard.refusal)

    def close(self) -> None:
        """End the streams."""
        for shard in self._shards:
            shard.session.send_control(pb.ToServer(leave=pb.Leave(cause="done")))
            shard.session.close()
        self._shards = []

    def _connect(self) -> None:
        for shard in self._shards:
            shard.session.close(0.0)
        self._shards = []
        patience = self._run.reconnect_timeout_seconds
        self._shards = open_streams(self._diallers, patience, queue.SimpleQueue())

    def _dialler(self, number: int, limit: int) -> Dialler:
        leader, address = self._run.addresses[0], self._run.addresses[number]
        credentials, transient = self._run.credentials, (pb.REASON_STARTING,)

        def make() -> ClientSession:
            hello = hello_of(self._run, number, self._run_id)
            hello.phase = self._phase
            return ClientSession(address, hello, limit, credentials=credentials)

        return Dialler(f"the PS at {address}", make, self._closing, transient, leader)


def hello_of(run: Run, shard: int, run_id: str, incarnation: int = 0) -> pb.Hello:
    """Return the first message of an evaluator; without incarnation it only pulls."""
    return pb.Hello(
        protocol_version=messages.PROTOCOL_VERSION,
        role=pb.ROLE_EVALUATOR,
        run_id=run_id,
        incarnation=incarnation,
        shard=shard,
        num_shards=run.nb_ps,
    )
