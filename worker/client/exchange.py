"""One worker's exchanges with all shards: push everywhere, wait for everybody.

What a worker says now and then, whatever its training thread is doing.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence

from absl import logging

from thinwire.ops.downlink.types import Operation
from thinwire.ops.routing.base import LostEntries
from thinwire.ops.routing.counters import SentCounts
from thinwire.ops.run import fingerprint
from thinwire.ops.run.settings import Run
from thinwire.ops.types import ConfigurationError, Link, ModelSpec, ShardLayout, State
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.proto.grpc.session import payload_limit
from thinwire.worker.client.datagrams import WorkerTransport, totals_of
from thinwire.worker.client.messages import Spoken, sealed_messages
from thinwire.worker.client.shard_client import PushRefused, ShardClient
from thinwire.worker.core.messages import PushRequest, ShardReply

#: Refusals of a push after which a worker goes on with the shard's model.
_PULL_AGAIN = (pb.REASON_STALE_GENERATION, pb.REASON_OUTLIER, pb.REASON_NOT_MEMBER)


class Exchange:
    """All shards, as one worker sees them."""

    def __init__(
        self,
        run: Run,
        id_worker: int,
        spec: ModelSpec,
        layouts: tuple[ShardLayout, ...],
        link: Link,
        closing: threading.Event,
        aux_size: int = 0,
    ) -> None:
        """Prepare one client per shard; nothing is dialled yet.

        Args:
            run: The run's settings.
            id_worker: This worker.
            spec: The shared model.
            layouts: Of every shard.
            link: The worker's emulated link.
            closing: Set when the worker is asked to stop.
            aux_size: Values that are averaged by shard 0 beside the weights.
        """
        seed = run.seed * 1000 + id_worker
        self._ways = ways = WorkerTransport(link, seed, run.transport, run.method.router)
        self.sender = ways.sender
        self.nb_workers, self.iter_max = run.nb_workers, run.iter_max
        self.layouts, self.credentials = layouts, run.credentials
        self._epoch = 0  # newest membership epoch heard of
        self._sent_step = 0  # of the newest push
        self._sizes = [[piece.size for piece in layout.slices] for layout in layouts]
        self._aux_sizes = [aux_size, *[0] * (len(layouts) - 1)]
        self._choosers = [IndexChooser() for _ in layouts]
        self.shards = [
            ShardClient(
                address,
                _hello(run, id_worker, spec, shard, link, seed),
                payload_limit(layouts[shard], self._aux_sizes[shard]),
                self.sender,
                run.reconnect_timeout_seconds,
                closing,
                ways.leg(id_worker),
                ways.dscp,
                run.credentials,
            )
            for shard, address in enumerate(run.addresses)
        ]
        self.shards[0].on_welcome = self._note_welcome
        self.shards[0].before_rejoining = self._reach_others
        for shard in self.shards:
            shard.on_expelled = functools.partial(self._note_expulsion, shard)
        self._totals = totals_of(
            id_worker,
            [shard.leg for shard in self.shards],
            run.method.router.channels,
            lambda: self.bytes_up,
            run.transport.dgt_info,
        )

    def join(self) -> list[pb.Welcome]:
        """Say Hello to every shard; shard 0 names this life of the worker for the others."""
        first = self.shards[0].connect()
        for shard in self.shards[1:]:
            shard.hello.run_id, shard.hello.incarnation = first.run_id, first.incarnation
        return [first, *(shard.connect() for shard in self.shards[1:])]

    def attend(self) -> None:
        """Look after the streams that nothing is asked on (heartbeat thread).

        Shard 0 has let a worker go that another shard does not hear: it comes back when all can be
        reached, or everybody would wait for it again.
        """
        first, *others = self.shards
        for shard in others:
            shard.attend()
        first.attend(lambda: all(shard.alive for shard in others))

    def pull(self) -> list[ShardReply]:
        """Fetch the whole model.

        Raises:
            ConfigurationError: A shard answers what this worker cannot use.
        """
        for shard in self.shards:
            shard.ask(_pull)
        return [self._taken(number) for number in range(len(self.shards))]

    def send(self, outgoing: PushRequest) -> None:
        """Push to every shard; one push is under way at a time."""
        if self._totals is not None:
            self._totals.note(outgoing.routed)
        for number, shard in enumerate(self.shards):
            shard.ask(functools.partial(self._messages, number, outgoing))
        self._sent_step = outgoing.step

    def replies(self) -> list[ShardReply | None]:
        """Wait for every shard's answer to what was sent.

        Returns:
            One reply per shard; None where the push was refused as not finite. Where it was
            refused for its size, the model that the shard then gave.

        Raises:
            ConfigurationError: A shard calls the push malformed, or its answer is.
        """
        replies = [self._answer(number) for number in range(len(self.shards))]
        if self._totals is not None:
            self._totals.tell(self._sent_step)
        return replies

    def close(self, cause: str) -> None:
        """Say farewell to every shard."""
        for shard in self.shards:
            shard.say(pb.ToServer(leave=pb.Leave(cause=cause)))
        for shard in self.shards:
            shard.close()
        self._ways.close()

    def save(self) -> State:
        """Return what outlives this process."""
        return {}

    def restore(self, state: State) -> None:
        """Take back what `save` gave."""

    @property
    def bytes_up(self) -> int:
        """Training bytes sent."""
        return sum(shard.bytes_sent for shard in self.shards)

    @property
    def datagrams(self) -> SentCounts | None:
        """What this process has sent by channel; None where the method knows no channels."""
        return self._totals.counts() if self._totals is not None else None

    @property
    def refused_peers(self) -> dict[str, int]:
        """Streams of other workers that were refused or cut off, by reason."""
        return {}

    @property
    def bytes_down(self) -> int:
        """Bytes received."""
        return sum(shard.bytes_received for shard in self.shards)

    @property
    def send_seconds(self) -> float:
        """Seconds from a push to its last byte out, the slowest shard's sum."""
        return max(shard.send_seconds for shard in self.shards)

    @staticmethod
    def _glance(others: Sequence[ShardClient]) -> None:
        for shard in others:
            shard.glance()

    def _note_welcome(self, welcome: pb.Welcome) -> None:
        """Let the other shards know when shard 0 let this worker in."""
        self._epoch = max(self._epoch, welcome.epoch)
        for shard in self.shards[1:]:
            shard.hello.epoch = welcome.epoch

    def _note_expulsion(self, shard: ShardClient) -> None:
        """Do not finish elsewhere what shard 0 has finished: there it is another round by now."""
        first, *others = self.shards
        if not first.asking:
            for other in others if shard is first else [shard]:
                other.give_up_push()

    def _reach_others(self) -> None:
        for shard in self.shards[1:]:
            shard.reach()

    def _answer(self, number: int) -> ShardReply | None:
        shard, is_outlier = self.shards[number], False
        while True:
            try:
                reply = self._taken(number)
                return dataclasses.replace(reply, refused=is_outlier)
            except PushRefused as refusal:
                if refusal.reason == pb.REASON_NOT_MEMBER:
                    logging.warning(
                        "this worker was let go in the middle of an exchange; "
                        "%s may lack its part of it",
                        shard.address,
                    )
                if refusal.reason in _PULL_AGAIN:
                    is_outlier = refusal.reason == pb.REASON_OUTLIER
                    if is_outlier:
                        logging.log_every_n_seconds(
                            logging.WARNING, "%s: %s", 60, shard.address, refusal
                        )
                    shard.ask(_pull)
                    continue
                if refusal.reason == pb.REASON_NON_FINITE:
                    return None
                raise ConfigurationError(f"{shard.address} refused a push: {refusal}") from refusal

    def _messages(self, number: int, outgoing: PushRequest) -> list[Spoken]:
        """Return what one shard is told of an exchange; after a reconnection once more."""
        welcome, leg = self.shards[number].welcome, self.shards[number].leg
        epoch, chooser = max(self._epoch, welcome.epoch), self._choosers[number]
        return sealed_messages(outgoing, number, welcome.incarnation, epoch, chooser, leg)

    def _taken(self, number: int) -> ShardReply:
        """Wait for a shard's answer, and decode it."""
        others = self.shards[number + 1 :]  # the ones before have answered
        glance = [functools.partial(self._glance, others)] if others else []
        reply, payload = self.shards[number].answer(*glance)
        try:
            return self._decode(number, reply, payload)
        except (Malformed, ValueError) as error:
            raise ConfigurationError(
                f"{self.shards[number].address} sent a reply that is of no use here ({error}); "
                "install the same Thinwire on all nodes."
            ) from error

    def _decode(self, number: int, reply: pb.Reply, payload: memoryview) -> ShardReply:
        self._epoch = max(self._epoch, reply.epoch)
        expected = self._aux_sizes[number]
        if reply.aux_count != expected:
            raise ConfigurationError(
                f"{self.shards[number].address} averages {reply.aux_count} values beside the "
                f"weights, this worker's model and method {expected}; give all nodes the same."
            )
        payload, aux = messages.carve_aux(payload, expected, (expected,))
        try:
            operation = Operation(reply.operation)
        except ValueError as error:
            raise Malformed(f"a reply of the unknown operation {reply.operation}") from error
        if operation is Operation.SET_REST and not reply.step:
            raise Malformed("the rest of a push in answer to a pull")
        return ShardReply(
            aux=aux,
            operation=operation,
            blocks=messages.blocks_from_message(reply.blocks, payload, self._sizes[number]),
            version=reply.version,
            generation=reply.generation,
            learning_rate=reply.learning_rate,
            samples=reply.samples,
            stop=reply.stop,
            stop_reason=reply.stop_reason,
            held_seconds=reply.held_seconds,
            staleness=reply.staleness,
            lost=self._lost(number, reply),
        )

    def _lost(self, number: int, reply: pb.Reply) -> list[LostEntries] | None:
        """Return what of a push's datagrams is known to be lost; None answers a pull."""
        leg = self.shards[number].leg
        if leg is None or not reply.step:
            return None
        return leg.heard(reply.outcome)


def _pull() -> list[Spoken]:
    return [(pb.ToServer(pull=pb.Pull()), ())]


def _hello(
    run: Run, id_worker: int, spec: ModelSpec, shard: int, link: Link, seed: int
) -> pb.Hello:
    return pb.Hello(
        protocol_version=messages.PROTOCOL_VERSION,
        role=pb.ROLE_WORKER,
        id=id_worker,
        fingerprint=messages.settings_of(fingerprint.fingerprint(run)),
        model=messages.tensors_of(spec),
        link=pb.EmulatedLink(mbps=link.mbps, delay_ms=link.delay_ms, loss=link.loss, seed=seed + 1),
        shard=shard,
        num_shards=run.nb_ps,
    )


class Heartbeat:
    """Keeps the leases alive and reports, whatever the training thread is doing."""

    def __init__(
        self,
        exchange: Exchange,
        lease_seconds: float,
        report: Callable[[], str],
        rounds: Callable[[], list[str]],
    ) -> None:
        """Start the thread; `report` makes the metrics document, `rounds` those of new rounds."""
        self._exchange, self._report, self._rounds = exchange, report, rounds
        self._interval_seconds = min(1.0, lease_seconds / 3)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send a last report and end."""
        self._stop.set()
        self._thread.join()
        self._beat()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self._beat()

    def _beat(self) -> None:
        first, *others = self._exchange.shards
        first.say(pb.ToServer(report=pb.Report(document=self._report())))
        if first.connected:  # else they are kept
            for document in self._rounds():
                first.say(pb.ToServer(report=pb.Report(rounds=document)))
        for shard in others:
            shard.say(pb.ToServer(heartbeat=pb.Heartbeat()))
        if not self._stop.is_set():
            self._exchange.attend()
