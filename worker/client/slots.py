"""Fetches the optimizers' states from the shards, for a script that continues training."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from thinwire.ops.optimizers.slots import OptimizerState, decode
from thinwire.ops.types import ShardLayout
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import StreamLost
from thinwire.proto.grpc.session import ClientSession, Dialler, RequestRejected
from thinwire.runtime.run.settings import Run

#: Limits of a shard's answer with optimizer states: largest number of arrays of the model's size
#: (weights included), and largest number of bytes for the JSON document and all smaller arrays.
_MOST_ARRAYS, _SLACK_BYTES = 9, 1 << 20


def fetch_slots(
    run: Run,
    id_worker: int,
    run_id: str,
    layouts: Sequence[ShardLayout],
    num_statistics: int | None = None,
    role: pb.Role = pb.ROLE_SCRIPT,
) -> list[list[OptimizerState]]:
    """Return the states of all optimizers of a script from every shard.

    The last state in each shard's list holds the shard's arrays that belong to no optimizer.

    Args:
        run: Settings of the training run.
        id_worker: Id of the worker, for the Hello message.
        run_id: Id of the run, which the Hello message contains.
        layouts: For each shard, the slices of the model's variables that it stores.
        num_statistics: Number of averaged moving statistics, if the weights and the statistics must
            be fetched, too; None to fetch only the states of the optimizers.
        role: Role of this process: the script of a worker, or an evaluator.

    Raises:
        Unreachable, StreamLost, RequestRejected: A shard does not answer, or rejects the request
            for optimizer state.
    """
    states = []
    for shard, layout in enumerate(layouts):
        hello = pb.Hello(
            protocol_version=messages.PROTOCOL_VERSION,
            role=role,  # without incarnation, shard 0 does not wait for this client at barriers
            id=id_worker,
            run_id=run_id,
            shard=shard,
            num_shards=run.nb_ps,
        )
        states.append(_fetch(run, hello, layout, num_statistics))
    return states


def _fetch(
    run: Run, hello: pb.Hello, layout: ShardLayout, num_statistics: int | None
) -> list[OptimizerState]:
    address = run.addresses[hello.shard]
    limit = 4 * (_MOST_ARRAYS * layout.size + (num_statistics or 0)) + _SLACK_BYTES
    dialler = Dialler(
        f"the PS at {address}",
        lambda: ClientSession(address, hello, limit, credentials=run.credentials),
        threading.Event(),
        leader=run.addresses[0],
    )
    session, _ = dialler.dial(run.reconnect_timeout_seconds)
    try:
        session.send_control(pb.ToServer(slots=pb.SlotsRequest(weights=num_statistics is not None)))
        while True:
            message, payload = session.listen()
            if message.WhichOneof("body") == "refusal":
                raise RequestRejected(message.refusal)
            if message.WhichOneof("body") == "slots":
                session.send_control(pb.ToServer(leave=pb.Leave(cause="done")))
                return decode(message.slots.document, payload)
    except ValueError as error:
        raise StreamLost(f"{address}: {error}") from error
    finally:
        session.close()
