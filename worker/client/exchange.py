"""Exchanges between a worker and all shards: push to every shard, await every reply.

The class `Heartbeat` renews the worker's leases from a background thread.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence

from thinwire.ops.downlink.types import Operation, RepeatedRound
from thinwire.ops.routing.base import LostEntries
from thinwire.ops.routing.counters import SentCounts
from thinwire.ops.types import Block, ConfigurationError, Link, ModelSpec, ShardLayout, State
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.proto.grpc.session import payload_limit
from thinwire.runtime.run import fingerprint
from thinwire.runtime.run.settings import Run
from thinwire.worker.client.datagrams import WorkerTransport, totals_of
from thinwire.worker.client.messages import PushEncoder
from thinwire.worker.client.offering import Offering
from thinwire.worker.client.protocol import NewestEpoch
from thinwire.worker.client.shard_client import PushRefused, ShardClient
from thinwire.worker.core.messages import PushRequest, ShardReply


class Exchange:
    """Connections of a worker to all shards; each method joins, pushes to or leaves all shards."""

    def __init__(
        self,
        run: Run,
        id_worker: int,
        spec: ModelSpec,
        layouts: tuple[ShardLayout, ...],
        link: Link,
        closing: threading.Event,
        aux_size: int = 0,
        offering: Offering | None = None,
    ) -> None:
        """Create one client per shard; `join` connects to the shards.

        Args:
            run: Settings of the training run.
            id_worker: Id of this worker, from 1.
            spec: Paths, shapes and dtypes of the shared model's variables.
            layouts: For each shard, the slices of the model's variables that it stores.
            link: The worker's emulated network link.
            closing: Event that is set when the worker must stop.
            aux_size: Number of auxiliary values that shard 0 averages over the workers in addition
                to the weights.
            offering: Offer (model description and weights) that the worker sends to shards without
                a model; None if the shards have a model.
        """
        seed = run.seed * 1000 + id_worker
        transport = WorkerTransport(link, seed, run.transport, run.method.router)
        self._transport, self.sender = transport, transport.sender
        self.nb_workers, self.iter_max = run.nb_workers, run.iter_max
        self.layouts, self.credentials = layouts, run.credentials
        # step of this worker's newest push to the shards; 0 before the first push
        self._sent_step = 0
        self._sizes = [[piece.size for piece in layout.slices] for layout in layouts]
        self._aux_sizes = [aux_size, *[0] * (len(layouts) - 1)]
        self.channels = [transport.open_channel(id_worker) for _ in layouts]
        epochs = NewestEpoch()
        self.shards = [
            ShardClient(
                address,
                _hello(run, id_worker, spec, shard, link, seed, offering),
                payload_limit(layouts[shard], self._aux_sizes[shard]),
                self.sender,
                run.reconnect_timeout_seconds,
                closing,
                PushEncoder(shard, self.channels[shard]),
                epochs,
                transport.dscp,
                run.credentials,
                None if offering is None else functools.partial(offering.make, shard, layouts),
                run.addresses[0],
            )
            for shard, address in enumerate(run.addresses)
        ]
        self.shards[0].on_welcome = self._note_welcome
        self.shards[0].before_rejoining = self._reach_others
        for shard in self.shards:
            shard.on_expelled = self._finish_nowhere
        self._totals = totals_of(
            id_worker,
            self.channels,
            run.method.router.channels,
            lambda: self.bytes_up,
            run.transport.dgt_info,
        )

    def join(self) -> list[pb.Welcome]:
        """Join every shard, beginning with shard 0, which assigns this worker's incarnation."""
        first = self.shards[0].connect()
        for shard in self.shards[1:]:
            shard.hello.run_id, shard.hello.incarnation = first.run_id, first.incarnation
        return [first, *(shard.connect() for shard in self.shards[1:])]

    def attend(self) -> None:
        """Service the streams to shards without an open request (called in the heartbeat thread).

        Shard 0 may have expelled this worker because another shard received nothing from it. An
        expelled worker rejoins shard 0 only once every other shard is reachable. If an expelled
        worker rejoined earlier, all other workers would wait for its updates at the unreachable
        shard.
        """
        first, *following = self.shards
        for shard in following:
            shard.attend()
        first.attend(lambda: all(shard.alive for shard in following))

    def pull(self) -> list[ShardReply]:
        """Fetch the whole model from all shards.

        Raises:
            ConfigurationError: A shard's reply does not fit this worker's model or version.
        """
        for shard in self.shards:
            shard.pull()
        return [self._reply_of(number) for number in range(len(self.shards))]

    def send(self, request: PushRequest) -> None:
        """Push an update to every shard; the caller must call `replies` before the next push."""
        if self._totals is not None:
            self._totals.record(request.routed)
        for shard in self.shards:
            shard.push(request)
        self._sent_step = request.head.step

    def replies(self) -> list[ShardReply | None]:
        """Wait for every shard's reply to the push that `send` has sent.

        Returns:
            For each shard, its reply, or None if the shard rejected the push as not finite. If a
            shard rejected the push as too large, its reply holds the shard's model.

        Raises:
            ConfigurationError: A shard rejected the push as malformed, or the shard's reply is
                malformed.
        """
        replies = [self._settle(number) for number in range(len(self.shards))]
        if self._totals is not None:
            self._totals.log(self._sent_step)
        return replies

    def close(self, cause: str) -> None:
        """Leave every shard and report `cause` to each shard as the reason."""
        for shard in self.shards:
            shard.send(pb.ToServer(leave=pb.Leave(cause=cause)))
        for shard in self.shards:
            shard.close()
        self._transport.close()

    def save(self) -> State:
        """Return the state of the worker's exchanges with the shards, for its checkpoint."""
        return {}

    def restore(self, state: State) -> None:
        """Restore the state of the worker's exchanges that `save` returned."""

    @property
    def bytes_up(self) -> int:
        """Total number of training bytes that this worker has sent to all shards."""
        return sum(shard.bytes_sent for shard in self.shards)

    @property
    def datagrams(self) -> SentCounts | None:
        """Datagram counts by channel since this process started; None without datagram channels."""
        return self._totals.counts() if self._totals is not None else None

    @property
    def refused_peers(self) -> dict[str, int]:
        """Number of other workers' streams that this worker refused or closed, by reason."""
        return {}

    @property
    def bytes_down(self) -> int:
        """Total number of bytes that this worker has received from all shards."""
        return sum(shard.bytes_received for shard in self.shards)

    @property
    def send_seconds(self) -> float:
        """Time in seconds of sending all pushes to the shard with the longest sending time."""
        return max(shard.send_seconds for shard in self.shards)

    def _note_welcome(self, welcome: pb.Welcome) -> None:
        """Put the membership epoch of shard 0's Welcome into the Hello messages to other shards."""
        for shard in self.shards[1:]:
            shard.hello.epoch = welcome.epoch

    def _finish_nowhere(self) -> None:
        """Abandon the unanswered push at all shards if one shard has already answered its part."""
        # An expelled worker's push cannot join the round that the answering shard has finished. If
        # the worker sent the push again, the push would count in a later round at the shards that
        # have not answered.
        if any(not shard.protocol.is_requesting for shard in self.shards):
            for shard in self.shards:
                shard.abandon_push()

    def _look_after(self, shards: Sequence[ShardClient]) -> None:
        """Service the unanswered requests to `shards` while the worker waits for another shard.

        A shard may reply to its part of a push while shard 0 has expelled this worker. A shard 0
        that has expelled this worker has finished the round without the worker, so the worker
        abandons the push.
        """
        for shard in shards:
            shard.poll()
        if self.shards[0].protocol.is_expelled:
            self._finish_nowhere()

    def _reach_others(self) -> None:
        for shard in self.shards[1:]:
            shard.ensure_connected()

    def _reply_of(self, number: int) -> ShardReply:
        """Return a shard's reply to a pull, which a shard cannot reject as not finite.

        Raises:
            ConfigurationError: The shard rejected the pull, or the shard's reply does not fit the
                model.
        """
        reply = self._settle(number)
        if reply is None:
            raise ConfigurationError(f"PS {self.shards[number].address} rejected a pull: NaN/inf")
        return reply

    def _settle(self, number: int) -> ShardReply | None:
        """Wait for a shard's reply; return None if the shard rejected the push as not finite."""
        # The method `replies` waits for the shards in order of number, so only shards above
        # `number` may still have an unanswered request.
        shard, open_shards = self.shards[number], self.shards[number + 1 :]
        try:
            replied, payload = shard.wait_for_reply(
                *([lambda: self._look_after(open_shards)] if open_shards else [])
            )
        except PushRefused as refusal:
            raise ConfigurationError(f"PS {shard.address} rejected a push: {refusal}") from refusal
        if replied.reply is None:
            return None
        try:
            reply = self._decode(number, replied.reply, payload)
        except (Malformed, ValueError) as error:
            raise ConfigurationError(
                f"the shard {shard.address} sent a reply that this worker cannot decode "
                f"({error}); install the same Thinwire version on all nodes."
            ) from error
        return dataclasses.replace(reply, refused=replied.is_outlier)

    def _decode(self, number: int, reply: pb.Reply, payload: memoryview) -> ShardReply:
        expected = self._aux_sizes[number]
        if reply.aux_count != expected:
            raise ConfigurationError(
                f"the shard {self.shards[number].address} averages {reply.aux_count} values (such "
                "as BatchNorm statistics) in addition to the weights, but this worker's model and "
                f"method have {expected}; start all nodes with the same model and method."
            )
        payload, aux = messages.carve_aux(payload, expected, (expected,))
        try:
            operation = Operation(reply.operation)
        except ValueError as error:
            raise Malformed(f"a PS reply has the unknown operation {reply.operation}") from error
        if operation is Operation.SET_REST and not reply.step:
            raise Malformed("a PS answered a pull with a SET_REST reply, which belongs to a push")
        blocks: Sequence[Block] = ()
        rounds: Sequence[RepeatedRound] = ()
        if operation is Operation.RELAY:
            rounds = messages.rounds_from_message(reply, payload, self._sizes[number])
        else:
            blocks = messages.blocks_from_message(reply.blocks, payload, self._sizes[number])
        return ShardReply(
            aux=aux,
            operation=operation,
            blocks=blocks,
            rounds=rounds,
            version=reply.version,
            generation=reply.generation,
            learning_rate=reply.learning_rate,
            samples=reply.samples,
            stop=reply.stop,
            stop_reason=reply.stop_reason,
            held_seconds=reply.held_seconds,
            staleness=reply.staleness,
            lost=self._lost(number, reply),
            loss_scale=reply.loss_scale,
            schedule_counts=tuple(reply.schedule_counts),
            step=reply.step,
        )

    def _lost(self, number: int, reply: pb.Reply) -> list[LostEntries] | None:
        """Return a push's entries whose datagrams were lost; None if the request was a pull."""
        channel = self.channels[number]
        if channel is None or not reply.step:
            return None
        return channel.record(reply.outcome)


def _hello(
    run: Run,
    id_worker: int,
    spec: ModelSpec,
    shard: int,
    link: Link,
    seed: int,
    offering: Offering | None,
) -> pb.Hello:
    offer = None if offering is None else offering.offer
    program = () if offering is None else offering.program
    return pb.Hello(
        protocol_version=messages.PROTOCOL_VERSION,
        role=pb.ROLE_WORKER,
        id=id_worker,
        fingerprint=messages.settings_of([*fingerprint.fingerprint(run, offer), *program]),
        model=messages.tensors_of(spec),
        link=pb.EmulatedLink(mbps=link.mbps, delay_ms=link.delay_ms, loss=link.loss, seed=seed + 1),
        shard=shard,
        num_shards=run.nb_ps,
        phase=0 if offering is None else offering.phase,
        run_id="" if offering is None else offering.run_id,
    )


class Heartbeat:
    """Background thread that renews a worker's leases and reports metrics to shard 0."""

    def __init__(
        self,
        exchange: Exchange,
        lease_seconds: float,
        report: Callable[[], str],
        rounds: Callable[[], list[str]],
    ) -> None:
        """Start the heartbeat thread, which renews the worker's leases.

        Args:
            exchange: Object with the worker's gRPC streams to the shards.
            lease_seconds: Duration of a worker's lease at a shard, in seconds.
            report: Function that returns the worker's metrics as a JSON document.
            rounds: Function that returns the JSON documents of the training rounds measured since
                its previous call.
        """
        self._exchange, self._report, self._rounds = exchange, report, rounds
        self._interval_seconds = min(1.0, lease_seconds / 3)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send a last report to shard 0 and end the heartbeat thread."""
        self._stop.set()
        self._thread.join()
        self._beat()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            self._beat()

    def _beat(self) -> None:
        first, *following = self._exchange.shards
        first.send(pb.ToServer(report=pb.Report(document=self._report())))
        # without a connection, `_rounds` keeps the documents of measured rounds
        if first.connected:
            for document in self._rounds():
                first.send(pb.ToServer(report=pb.Report(rounds=document)))
        for shard in following:
            shard.send(pb.ToServer(heartbeat=pb.Heartbeat()))
        if not self._stop.is_set():
            self._exchange.attend()
