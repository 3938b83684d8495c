"""What a PS shard sends to clients that send no updates: observers and workers' scripts."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterator

from absl import logging

from thinwire.ops.optimizers.slots import OptimizerState, whole_slots
from thinwire.ops.optimizers.slots import encode as encode_slots
from thinwire.ops.types import Kind
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import frame, frames
from thinwire.ps.scripts.run_control import RunControl
from thinwire.ps.service.connections import Connection, ReplySender
from thinwire.ps.service.state import ShardState

#: Limit on the characters of the reports on rounds that are stored for each worker until a
#: Supervisor connects.
KEPT_PER_WORKER = 512 << 10


class RoundsRelay:
    """Relays the workers' reports on their rounds to the Supervisor (called on the writer thread).

    A worker sends its reports on training rounds in batches. The shard stores the newest batches of
    round reports for a Supervisor that connects or reconnects. A Supervisor may receive a batch of
    round reports twice and ignores the repetition.
    """

    def __init__(self, kept_per_worker: int = KEPT_PER_WORKER) -> None:
        self._limit = kept_per_worker
        self._kept: dict[int, collections.deque[str]] = {}

    def take(self, worker: int, batch: str, listeners: list[Connection]) -> int:
        """Store a worker's batch of round reports and send the batch to all listening Supervisors.

        `take` returns the number of round reports that were dropped because listeners read too
        slowly.
        """
        batches = self._kept.setdefault(worker, collections.deque())
        batches.append(batch)
        size = sum(map(len, batches))
        while size > self._limit and len(batches) > 1:
            size -= len(batches.popleft())
        report = pb.Report(rounds=batch, worker=worker)
        return sum(listener.send_report(report) for listener in listeners)

    def repeat(self, listener: Connection) -> None:
        """Send all stored batches of round reports to a new listener.

        The thread that sends on a listener's stream encodes the batches of round reports.
        """
        stored = [(worker, batch) for worker, batches in self._kept.items() for batch in batches]

        def make() -> Iterator[bytes]:
            for worker, batch in stored:
                yield frame(pb.ToClient(report=pb.Report(rounds=batch, worker=worker)))

        if stored:
            listener.stream.send(make, counted=False)


class Observers:
    """Sends models, the run's status, round reports and membership epochs to observers (called on
    the writer thread).

    A new observer first receives the earlier reports and the membership epoch that it needs.

    Attributes:
        on_status: Function that returns the status document for supervisors; None to send no
            status.
        num_dropped: Number of reports that were dropped because supervisors did not read them in
            time.
        scripts: The control streams between the shard and the workers' scripts.

    Args:
        shard: State of the shard.
    """

    def __init__(self, shard: ShardState) -> None:
        self._shard, self.on_status = shard, shard.hooks.status
        self.num_dropped = 0
        self.scripts = RunControl(shard, shard.lease_seconds, self.publish_status)
        self._rounds = RoundsRelay()
        # newest membership epoch that was sent; None before the first epoch
        self._epoch: pb.Membership | None = None
        # Encoded optimizer state that was last sent to a script: ((version, includes weights),
        # document, arrays).
        self._slots: tuple[tuple[int, bool], str, list[memoryview]] | None = None

    def begin_phase(self) -> None:
        """Drop what was encoded from the previous model."""
        self._slots = None

    def welcome(self, newcomer: Connection) -> None:
        """Admit an observer that has sent its Hello message.

        A script that connects without an incarnation (process number) only requests the optimizer's
        state and never waits at barriers.
        """
        role = newcomer.role
        shows = role == pb.ROLE_SUPERVISOR and not newcomer.evaluates
        # Make the status document before the first message to the observer. If making the document
        # fails, the observer must get a refusal and no Welcome.
        status = self.on_status() if shows and self.on_status is not None else None
        if newcomer.evaluates:
            self._replace_supervisor(newcomer)
        newcomer.send(self._shard.welcome_message(newcomer))
        if role == pb.ROLE_SHARD and self._epoch is not None:
            newcomer.send(pb.ToClient(membership=self._epoch))
        if newcomer.evaluates:
            self._rounds.repeat(newcomer)
        elif status is not None:
            newcomer.send(pb.ToClient(report=pb.Report(document=status)))
        if role == pb.ROLE_SCRIPT and not newcomer.incarnation:
            return
        # An evaluator first gets the unanswered evaluation requests, and then the message about the
        # run's end.
        if newcomer.takes_requests:
            self.scripts.begin(newcomer)
        if (halt := self.halt()) is not None:
            newcomer.send(pb.ToClient(halt=halt))
        if role == pb.ROLE_SCRIPT:
            self.scripts.begin(newcomer)

    def observe(self, connection: Connection, number: int) -> None:
        """Send an observer the whole model, or an evaluator the model that it evaluates (called on
        the writer thread).
        """
        shard, phase = self._shard, connection.phase
        if connection.role != pb.ROLE_EVALUATOR or phase >= shard.served.since:
            # The observer's request is not an event of the core, because after an event that fails,
            # the core's state may be inconsistent, but a failure to send the model concerns only
            # this observer.
            if number in shard.connections.observers:
                sender = ReplySender(shard.layout, shard.core.config.generation, self.members, None)
                sender.send(shard.core.whole(), connection, counted=False)
        elif (ended := shard.ended_models.find(phase)) is not None:
            sender = ReplySender(ended.layout, ended.generation, self.members, None)
            sender.send(ended.reply, connection, counted=False)
        else:
            text = f"phase: the final model of the script's phase {phase} is not stored any more."
            refusal = pb.Refusal(reason=pb.REASON_PHASE, message=text)
            connection.send(pb.ToClient(refusal=refusal))

    def send_slots(self, connection: Connection, weights: bool) -> None:
        """Send a worker's script the optimizer's state between two updates (called on the writer
        thread).

        All scripts request the optimizer's state after one update, so they all get the same encoded
        arrays.

        Args:
            connection: Network connection of the worker's script.
            weights: True if the script also requests the weights and the averaged statistics.
        """
        core = self._shard.core
        key = (core.version, weights)
        if self._slots is None or self._slots[0] != key:
            model = core.model
            slots = model.scaler.slots()
            if weights:
                slots += whole_slots(model.theta, self._shard.layout, core.averages.statistics)
            states = [*model.slots(), OptimizerState(slots, 0.0)]
            self._slots = (key, *encode_slots(states))
        _, document, pieces = self._slots
        message = pb.ToClient(slots=pb.Slots(document=document))
        connection.stream.send(functools.partial(frames, message, pieces), counted=False)

    def halt(self) -> pb.Halt | None:
        """Return the message to clients about the end of the run; None while the run continues."""
        reason = self._shard.core.stop_reason
        return pb.Halt(cause=reason, message=self.scripts.why(reason)) if reason else None

    def members(self) -> list[pb.Member]:
        """Return the connected workers if the workers all-reduce gradients; otherwise return []."""
        core = self._shard.core
        if core.model.kind is not Kind.VALUES:
            return []
        live = core.rounds.live()
        return self._shard.connections.members((w, core.incarnation_of(w)) for w in live)

    def _replace_supervisor(self, newcomer: Connection) -> None:
        """Close the stream of an older Supervisor, whose process may have died unnoticed."""
        for supervisor in self._shard.connections.with_role(pb.ROLE_SUPERVISOR):
            if supervisor is newcomer or not supervisor.evaluates or supervisor.left:
                continue
            message = (
                f"another Supervisor ({newcomer.stream.peer}) has replaced this Supervisor; a run "
                "has one Supervisor that evaluates. End the Supervisor that you do not need."
            )
            logging.warning("Supervisor %s: %s", supervisor.stream.peer, message)
            refusal = pb.Refusal(reason=pb.REASON_ID_TAKEN, message=message)
            supervisor.send(pb.ToClient(refusal=refusal))
            supervisor.stream.close()

    def pass_on_rounds(self, worker: int, batch: str) -> None:
        """Send a worker's reports on its training rounds to the Supervisor."""
        supervisors = self._shard.connections.with_role(pb.ROLE_SUPERVISOR)
        listeners = [supervisor for supervisor in supervisors if supervisor.evaluates]
        self.num_dropped += self._rounds.take(worker, batch, listeners)

    def publish_status(self) -> None:
        """Send the run's status document to every supervisor, and to the evaluator; log a failure
        and continue.
        """
        self._shard.contained.run("make the status", self._send_status)

    def _send_status(self) -> None:
        evaluators = self._shard.connections.with_role(pb.ROLE_EVALUATOR)
        listeners = self._shard.connections.with_role(pb.ROLE_SUPERVISOR)
        listeners += [evaluator for evaluator in evaluators if evaluator.takes_requests]
        if self.on_status is not None and listeners:
            report = pb.Report(document=self.on_status())
            self.num_dropped += sum(listener.send_report(report) for listener in listeners)

    def send_epoch(self, epoch: pb.Membership) -> None:
        """Send a new membership epoch (list of live workers) to every other shard."""
        self._epoch = epoch
        for shard in self._shard.connections.with_role(pb.ROLE_SHARD):
            shard.send(pb.ToClient(membership=epoch))
