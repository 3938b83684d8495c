"""Upper bound on the memory of a shard that one client can occupy: the sum of the client's limits.

The bound is the worst case of a hostile client that was admitted. An honest worker has one
unanswered request at a time and occupies a small part of this memory. The buffers of gRPC are not
counted.
"""

from __future__ import annotations

from thinwire.ops.types import ShardLayout
from thinwire.proto.bulk.handshake import MOST_HANDSHAKE_BYTES
from thinwire.proto.bulk.tls import PIECE_BYTES
from thinwire.proto.framing import MAX_MESSAGE_BYTES
from thinwire.proto.grpc.send_queue import MOST_CONTROL_BYTES, MOST_REPORT_BYTES
from thinwire.proto.grpc.session import payload_limit
from thinwire.proto.security.connection_guard import Limits
from thinwire.ps.service.backlog import MOST_QUEUED_BYTES, MOST_QUEUED_REQUESTS
from thinwire.ps.service.observers import KEPT_PER_WORKER
from thinwire.ps.wire.reports import MAX_DOCUMENT_BYTES

#: Messages of one stream that are in memory together: gRPC receives one, one waits for the reader,
#: and the reader handles one.
_NUM_MESSAGES = 3
#: Copies of the bytes on a client's bulk connection while TLS encrypts or decrypts: received bytes,
#: sent bytes, and OpenSSL's copy of the received and of the sent bytes.
_TLS_COPIES = 4
_VALUE_BYTES = 4
#: Bytes of one entry of a decoded update: an int64 position and a float32 value.
_ENTRY_BYTES = 12
#: Additional bytes for each value while an update is decoded, for its blocks before they are
#: joined. The worst case is a chunk of one value, with a position, a code, a bucket edge and
#: scales.
_DECODING_BYTES = 25
#: Bytes of one entry of a reply: the gathered entry and its encoded position.
_REPLY_ENTRY_BYTES = 16
#: Pushes of one worker that wait for a round: the newest push, and a push that the worker has given
#: up.
_NUM_WAITING_PUSHES = 2


def client_memory(layout: ShardLayout, aux_count: int, limits: Limits) -> dict[str, int]:
    """Return the most bytes that a shard stores for one client: kind of data -> bytes.

    Args:
        layout: Layout of the shard: the slices of variables that it holds.
        aux_count: Number of additional values in each push, for example moving statistics.
        limits: Limits on the messages and replies of one client.
    """
    size = layout.size
    # A push contains the gradient with the additional values, and the changes that the script makes
    # to weights outside the optimizer.
    payload = payload_limit(layout, aux_count) + payload_limit(layout)
    update = 2 * _ENTRY_BYTES * size
    # the added 1 is the reply that is being sent
    num_replies = limits.waiting_replies + MOST_QUEUED_REQUESTS + 1
    return {
        "messages that arrive": _NUM_MESSAGES * MAX_MESSAGE_BYTES,
        "half a handshake of the bulk connection": 2 * MOST_HANDSHAKE_BYTES,  # 2: OpenSSL copies it
        "buffers of the bulk connection": 4 + MAX_MESSAGE_BYTES + _TLS_COPIES * PIECE_BYTES,
        "a payload assembled from messages and decoded": (
            payload + update + _DECODING_BYTES * size
        ),
        "messages that wait for the writer thread": MOST_QUEUED_BYTES,
        "pushes that wait for their round": _NUM_WAITING_PUSHES * (payload + update),
        "the shard's copy of a worker's weights, and its last reply": (
            (_VALUE_BYTES + _REPLY_ENTRY_BYTES) * size
        ),
        "replies that the client does not read": num_replies * _REPLY_ENTRY_BYTES * size,
        "control messages that the client does not read": MOST_CONTROL_BYTES,
        "reports that a Supervisor does not read": MOST_REPORT_BYTES,
        "a worker's newest rounds and report": KEPT_PER_WORKER + MAX_DOCUMENT_BYTES,
    }
