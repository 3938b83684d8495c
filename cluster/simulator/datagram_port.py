"""A simulated shard's side of the datagram path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cluster.simulator.messages import Datagrams, Part
from ops.routing.transport import Transport
from proto import thinwire_pb2 as pb
from ps import events
from ps.pushes import NonFinite, PushDecoder
from ps.reception import Receptions

if TYPE_CHECKING:
    from cluster.simulator.shard import SimulatedShard

_ENTROPY = 71  # of session numbers and keys, which nobody attacks here


class SimulatedDatagramPort:
    """What `ps.datagram_port.DatagramPort` is to a real shard, without sockets.

    Attributes:
        receptions: The workers' sessions with the shard's present life.

    Args:
        shard: Whose pushes are put together.
        decoder: Of these pushes.
        transport: How datagrams travel.
    """

    def __init__(self, shard: SimulatedShard, decoder: PushDecoder, transport: Transport) -> None:
        self._shard, self._decoder, self._transport = shard, decoder, transport
        router = shard.core.model.method.router
        in_stream = transport.dgt_transport != "udp"
        self._ports = range(0) if in_stream else range(1, router.channels + 1)
        self.begin_life()

    def begin_life(self) -> None:
        """Belong to another life of the shard: nothing is open."""
        shard = self._shard
        self.receptions = Receptions(
            self._decoder,
            [piece.size for piece in shard.layout.slices],
            shard.core.model.method.router,
            shard.arrive,
            self._refuse,
            shard.set_alarm,
            np.random.default_rng([_ENTROPY, shard.number, shard.life]).bytes,
            lambda: shard.now,
        )
        self.receptions.obey(self._transport)

    def introduce(self, worker: int, incarnation: int, welcome: pb.Welcome) -> None:
        """Tell a worker where its datagrams go, and what signs them."""
        self.receptions.introduce(worker, incarnation, self._ports, welcome)

    def take(self, arrived: Part | Datagrams) -> None:
        """Take in what has come in a stream."""
        if isinstance(arrived, Datagrams):
            message = arrived.message
            self.receptions.take_from_stream(memoryview(message.data), message.size)
            return
        try:
            self.receptions.mark(arrived.worker, arrived.push, arrived.payload)
        except NonFinite:
            self._shard.arrive(events.Refused(arrived.worker, "non_finite"))

    def end_sessions(self) -> None:
        """End those of workers that have gone."""
        self.receptions.keep(self._shard.core.sync_state["live"])

    def _refuse(self, worker: int, step: int, message: str) -> None:
        """Refuse a push that turned out not to be finite when it was whole."""
        del step, message
        self._shard.arrive(events.Refused(worker, "non_finite"))
