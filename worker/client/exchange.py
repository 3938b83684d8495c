"""One worker's exchanges with all shards: push to each of them, wait for all their replies.

`Heartbeat` keeps the worker's leases meanwhile, from a thread of its own.
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
        offering: Offering | None = None,
    ) -> None:
        """Prepare one client per shard; nothing is dialled yet.

        Args:
            run: The run's settings.
            id_worker: This worker.
            spec: The shared model.
            layouts: Of every shard.
            link: The worker's emulated link.
            closing: Set when the worker is to stop.
            aux_size: Values that are averaged by shard 0 beside the weights.
            offering: What to offer to shards without model; None: they have one.
        """
        seed = run.seed * 1000 + id_worker
        transport = WorkerTransport(link, seed, run.transport, run.method.router)
        self._transport, self.sender = transport, transport.sender
        self.nb_workers, self.iter_max = run.nb_workers, run.iter_max
        self.layouts, self.credentials = layouts, run.credentials
        self._sent_step = 0  # of the newest push
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
        """Join at every shard; shard 0 names this worker's incarnation for the others."""
        first = self.shards[0].connect()
        for shard in self.shards[1:]:
            shard.hello.run_id, shard.hello.incarnation = first.run_id, first.incarnation
        return [first, *(shard.connect() for shard in self.shards[1:])]

    def attend(self) -> None:
        """Look after the streams on which nothing is requested (heartbeat thread).

        A worker that shard 0 has expelled because another shard receives nothing from it comes back
        when all shards can be reached, or everybody would wait for it again.
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
            shard.pull()
        return [self._reply_of(number) for number in range(len(self.shards))]

    def send(self, request: PushRequest) -> None:
        """Push to every shard; one push is under way at a time."""
        if self._totals is not None:
            self._totals.record(request.routed)
        for shard in self.shards:
            shard.push(request)
        self._sent_step = request.step

    def replies(self) -> list[ShardReply | None]:
        """Wait for every shard's answer to what was sent.

        Returns:
            One reply per shard; None where the push was refused as not finite. Where it was
            refused for its size, the model that the shard then gave.

        Raises:
            ConfigurationError: A shard calls the push malformed, or its answer is.
        """
        replies = [self._settle(number) for number in range(len(self.shards))]
        if self._totals is not None:
            self._totals.log(self._sent_step)
        return replies

    def close(self, cause: str) -> None:
        """Leave every shard."""
        for shard in self.shards:
            shard.send(pb.ToServer(leave=pb.Leave(cause=cause)))
        for shard in self.shards:
            shard.close()
        self._transport.close()

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

    def _note_welcome(self, welcome: pb.Welcome) -> None:
        """Let the other shards know in which epoch shard 0 admitted this worker."""
        for shard in self.shards[1:]:
            shard.hello.epoch = welcome.epoch

    def _finish_nowhere(self) -> None:
        """Give up a push that some shard has settled: at the others it is another round by now."""
        if any(not each.protocol.is_requesting for each in self.shards):
            for each in self.shards:
                each.abandon_push()

    def _look_after(self, shards: Sequence[ShardClient]) -> None:
        """Look after what is requested of other shards while shard 0 is waited for.

        One that settles its part while this worker is no member at shard 0 does so in a round of
        the time when it was: shard 0 finished that round without it.
        """
        for shard in shards:
            shard.poll()
        if self.shards[0].protocol.is_expelled:
            self._finish_nowhere()

    def _reach_others(self) -> None:
        for shard in self.shards[1:]:
            shard.ensure_connected()

    def _reply_of(self, number: int) -> ShardReply:
        """Return the reply to a request that cannot be refused for what it holds.

        Raises:
            ConfigurationError: It was refused for good, or the reply is of no use.
        """
        reply = self._settle(number)
        if reply is None:
            raise ConfigurationError(f"{self.shards[number].address} refused a pull as not finite")
        return reply

    def _settle(self, number: int) -> ShardReply | None:
        """Wait until a shard's part is settled; None: the push was refused as not finite."""
        shard, others = self.shards[number], self.shards[number + 1 :]  # those before are settled
        try:
            replied, payload = shard.wait_for_reply(
                *([lambda: self._look_after(others)] if others else [])
            )
        except PushRefused as refusal:
            raise ConfigurationError(f"{shard.address} refused a push: {refusal}") from refusal
        if replied.reply is None:
            return None
        try:
            reply = self._decode(number, replied.reply, payload)
        except (Malformed, ValueError) as error:
            raise ConfigurationError(
                f"{shard.address} sent a reply that is of no use here ({error}); "
                "install the same Thinwire on all nodes."
            ) from error
        return dataclasses.replace(reply, refused=replied.is_outlier)

    def _decode(self, number: int, reply: pb.Reply, payload: memoryview) -> ShardReply:
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
        """Return the entries of a push whose datagrams are known to be lost; None for a pull."""
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
    """Renews the leases and reports, whatever the training thread is doing."""

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
        first.send(pb.ToServer(report=pb.Report(document=self._report())))
        if first.connected:  # else they are kept
            for document in self._rounds():
                first.send(pb.ToServer(report=pb.Report(rounds=document)))
        for shard in others:
            shard.send(pb.ToServer(heartbeat=pb.Heartbeat()))
        if not self._stop.is_set():
            self._exchange.attend()
