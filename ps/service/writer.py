"""Work of a PS shard's writer thread: handles events, and performs the actions that follow."""

from __future__ import annotations

import functools
import time
from typing import Any, ClassVar

from absl import logging

from thinwire.ops.sync.groups import format_groups, uneven
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.ps.service.connections import Connection, ReplySender
from thinwire.ps.service.containment import ClientRequest
from thinwire.ps.service.observers import Observers
from thinwire.ps.service.state import ShardState
from thinwire.ps.wire.epochs import encode_epoch

#: Rejection reasons after which a worker gives up a push. The shard then drops the push's late
#: datagrams.
_GIVEN_UP = ("OUTLIER", "STALE_GENERATION")
#: Rejection reason of a push from before a change of the members. Such a rejection is normal, and
#: the worker repeats the push.
_OF_ANY_CHANGE = "STALE_EPOCH"
#: Rejection reasons that the core counts. The connection guard counts all other refusals.
_COUNTED_BY_CORE = ("NON_FINITE", *_GIVEN_UP)


class ShardWriter:
    """Handles the events of a shard, and performs the actions of its state machine (called on the
    writer thread, except where noted).

    Attributes:
        shard: State of the shard.
        observers: Sender of models, reports and epochs to clients that send no updates.
        scripts: The control streams between the shard and the workers' scripts.

    Args:
        shard: See the attribute.
    """

    def __init__(self, shard: ShardState) -> None:
        self.shard, self.observers = shard, Observers(shard)
        self.scripts = self.observers.scripts
        # worker's incarnation -> connection on which the worker's Hello arrived, until the state
        # machine admits or rejects the worker
        self._expected: dict[int, Connection] = {}
        self._num_epochs = 0  # number of the newest membership epoch that was logged

    def expect(self, connection: Connection) -> None:
        """Store a worker's connection for the answer to its Hello (called on reader threads)."""
        self._expected[connection.incarnation] = connection

    def lose(self, connection: Connection) -> None:
        """Record that the gRPC stream of a worker has ended (called on reader threads).

        The loss of the stream is queued behind the stream's Hello message. If the loss of a stream
        were handled before its Hello message, the Hello message would register a stream that has
        ended.
        """

        def lose() -> None:
            if self.shard.connections.drop_worker(connection):
                lost = events.WorkerDisconnected(connection.id, connection.incarnation)
                self.handle(lost, time.monotonic())

        self.shard.queue.put(lose)

    def handle(self, event: events.Event, now: float) -> None:
        """Let the state machine handle an event, and perform the actions that follow."""
        self.perform(self.shard.journaled.handle(event, now))

    def perform(self, actions: list[events.Action]) -> None:
        """Perform the actions of one or more events, in order."""
        shard, connections = self.shard, self.shard.connections
        generation = shard.core.config.generation
        receiver = shard.datagrams.receiver if shard.datagrams is not None else None
        replies = ReplySender(shard.layout, generation, self.observers.members, receiver)
        for action in actions:
            if isinstance(action, events.Reply):
                connection = connections.workers.get(action.worker)
                if connection is not None:
                    send = functools.partial(replies.send, action, connection)
                    shard.contained.serve(ClientRequest(connection, "a reply", send))
            elif isinstance(action, events.EvaluationReply):
                observer = connections.observers.get(action.observer)
                if observer is not None:
                    replies.send(action.reply, observer, counted=False)
            elif isinstance(action, events.Answer | events.Reject):
                send = functools.partial(self._actions[type(action)], self, action)
                self.shard.contained.run("an answer to a worker", send)
            else:
                self._actions[type(action)](self, action)

    def _welcome(self, action: events.Welcome) -> None:
        shard = self.shard
        connection = self._expected.pop(action.incarnation, None)
        if connection is None or shard.identity is None:
            return
        shard.connections.add_worker(connection)
        if shard.watch is not None:
            shard.watch.admitted()

        def welcome() -> None:
            connection.send(shard.welcome_message(connection, action))

        shard.contained.serve(ClientRequest(connection, "a Hello", welcome))
        logging.info("worker %d joined the run (%s)", action.worker, connection.stream.peer)

    def reject(self, action: events.Reject) -> None:
        """Send a worker the rejection of its Hello, pull or push."""
        refusal = pb.Refusal(
            reason=f"REASON_{action.reason}",
            message=action.message,
            step=action.step,
            epoch=action.epoch,
            retry_after_seconds=action.retry_after_seconds,
        )
        if action.reason in _GIVEN_UP and self.shard.datagrams is not None:
            self.shard.datagrams.receiver.on_push_refused(action.worker, action.step)
        if not action.is_notice and action.reason not in _COUNTED_BY_CORE:
            self.shard.guard.count_refusal(action.reason.lower())
        hello = self._expected.pop(action.incarnation, None) if action.step == 0 else None
        connection = hello or self.shard.connections.workers.get(action.worker)
        if connection is not None:
            connection.send(pb.ToClient(refusal=refusal))
            if hello is not None:
                connection.stream.close()
        if action.is_notice:
            return
        # Limit the rate of this log line: a client that repeats a refused message must not fill the
        # disk.
        level = logging.INFO if action.reason == _OF_ANY_CHANGE else logging.WARNING
        logging.log_every_n_seconds(
            level, "refused worker %d: %s", 1, action.worker, action.message
        )

    def _answer(self, action: events.Answer) -> None:
        connection = self.shard.connections.workers.get(action.worker)
        if connection is not None:
            answer = pb.Answer(step=action.step, local_steps=action.local_steps, ready=action.ready)
            connection.send(pb.ToClient(answer=answer), counted=True)

    def _new_epoch(self, action: events.NewEpoch) -> None:
        epoch = action.epoch
        if self.shard.datagrams is not None:
            # The end of the sessions is queued instead of called here: if one batch of actions
            # holds several epochs, the sessions of workers that have left must end only after all
            # epochs of the batch.
            self.shard.queue.put(self.shard.datagrams.end_sessions)
        if self.shard.core.stop_reason is None and epoch.number != self._num_epochs:
            logging.info("membership epoch %d: live workers %s", epoch.number, list(epoch.live))
        self._num_epochs = epoch.number  # an action that only adds draws repeats the epoch's number
        if epoch.draws:
            self.shard.hooks.on_draws(epoch.draws)
        self.observers.send_epoch(encode_epoch(epoch, self.shard.core.rounds.groups))

    def _report_unreachable(self, action: events.WorkersUnreachable) -> None:
        workers = [member.worker for member in action.members]
        lease_seconds = self.shard.lease_seconds
        logging.info("no message came for %g s from the workers %s", lease_seconds, workers)
        self.shard.hooks.on_unreachable(action)

    def _groups_changed(self, action: events.GroupsChanged) -> None:
        logging.info("new worker groups by speed: %s", format_groups(action.groups))
        if warning := uneven(action.groups):
            logging.warning("%s", warning)
        self.shard.hooks.on_groups(action)

    def _snapshot(self, action: events.SaveSnapshot) -> None:
        self.shard.hooks.save(action.version, action.state)

    def _ended(self, action: events.RunEnded) -> None:
        shard = self.shard
        logging.info("the run ended at model version %d: %s", shard.core.version, action.reason)
        self.observers.publish_status()
        for connection in shard.connections.everyone():
            connection.send(pb.ToClient(halt=self.observers.halt()))
        if shard.server is not None:
            shard.server.set_serving(False)

    _actions: ClassVar[dict[type, Any]] = {
        events.Welcome: _welcome,
        events.Reject: reject,
        events.Answer: _answer,
        events.NewEpoch: _new_epoch,
        events.WorkersUnreachable: _report_unreachable,
        events.GroupsChanged: _groups_changed,
        events.SaveSnapshot: _snapshot,
        events.RunEnded: _ended,
    }
