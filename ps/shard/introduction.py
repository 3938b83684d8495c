"""Presents a PS shard, with the model that it serves now, to shard 0 and to clients."""

from __future__ import annotations

import json

from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.flags import PsFlags
from thinwire.ps.service import leader_client
from thinwire.ps.service.handshake import Identity, hello_to_leader
from thinwire.ps.service.leader_client import PHASE, WEIGHTS_DIGEST, LeaderClient
from thinwire.ps.service.server import ShardServer
from thinwire.ps.telemetry.status import StatusReporter
from thinwire.runtime.run import fingerprint
from thinwire.runtime.run.settings import Run


class Introduction:
    """The shard's identity towards shard 0 and clients, and its connection to shard 0.

    Attributes:
        run_id: Random identifier of the run; "" until shard 0 has sent it.
        leader: Connection to shard 0; None on shard 0.

    Args:
        run: Settings of the training run.
        own: Settings of this PS shard from its command-line flags.
        server: Network server of the shard.
        board: Maker of the shard's status documents.
        run_id: Random identifier of the run; "" if this shard does not know it yet.
    """

    def __init__(
        self, run: Run, own: PsFlags, server: ShardServer, board: StatusReporter, run_id: str
    ) -> None:
        self._run, self._own, self._server, self._board = run, own, server, board
        self.run_id = run_id
        self.leader: LeaderClient | None = None
        if own.id_ps:
            self.leader = LeaderClient(
                run.addresses[0],
                self._hello_to_leader(),
                server.layout,
                server.queue.put,
                lambda: board.shard_document(leader_client.figures_are_final(server)),
                run.credentials,
                lambda: bool(server.connections.workers),
            )

    def join_leader(self) -> None:
        """Connect a shard with id 1 or higher to shard 0, and follow shard 0 in other threads.

        Raises:
            Unreachable, RequestRejected: Shard 0 does not answer in time, or rejects this shard.
        """
        if self.leader is not None:
            welcome = self.leader.connect(self._run.reconnect_timeout_seconds)
            self.run_id = welcome.run_id
            self.leader.follow(self._run.reconnect_timeout_seconds)

    def admit(self) -> None:
        """Admit clients that match the served model."""
        served, about = self._server.served, self._board.about()
        if served.offer is not None:
            about |= {WEIGHTS_DIGEST: served.offer.weights_digest, PHASE: served.phase}
        self._server.open_for(self._identity(), json.dumps(about))

    def admit_to_next_phase(self) -> None:
        """Admit clients that match the script's next model, and present it to shard 0."""
        self.admit()
        if self.leader is not None:
            self.leader.reconnect(self._hello_to_leader())

    def _hello_to_leader(self) -> pb.Hello:
        return hello_to_leader(self._identity(), self._run.addresses[self._own.id_ps])

    def _identity(self) -> Identity:
        run, served = self._run, self._server.served
        return Identity(
            self.run_id,
            self._own.id_ps,
            run.nb_ps,
            served.core.config.generation,
            fingerprint.fingerprint(run, served.offer),
            served.spec,
            fingerprint.shard_settings(run, served.offer),
            served.phase,
        )
