"""What one client can make a shard keep: the sum of the limits that its stream meets.

It is the worst case, of a client that was let in and is hostile. An honest worker has one request
at a time, and keeps a shard busy with a small part of this. gRPC's own buffers are not counted.
"""

from __future__ import annotations

from thinwire.ops.types import ShardLayout
from thinwire.proto.bulk.connection import most_buffer_bytes
from thinwire.proto.bulk.handshake import MOST_HANDSHAKE_BYTES
from thinwire.proto.bulk.tls import PIECE_BYTES
from thinwire.proto.framing import MAX_MESSAGE_BYTES
from thinwire.proto.grpc.send_queue import MOST_CONTROL_BYTES, MOST_REPORT_BYTES
from thinwire.proto.grpc.session import payload_limit
from thinwire.proto.security.connection_guard import Limits
from thinwire.ps.service.backlog import MOST_QUEUED_BYTES, MOST_QUEUED_REQUESTS
from thinwire.ps.service.connections import KEPT_PER_WORKER
from thinwire.ps.service.stream_reader import MAX_DOCUMENT_BYTES

#: Of a stream: one arrives, one waits for the reader, one is in its hands.
_NUM_MESSAGES = 3
#: Where the bytes of a bulk connection are while TLS encrypts or decrypts them: what came, what
#: goes, and OpenSSL's copy of each.
_TLS_COPIES = 4
_VALUE_BYTES = 4
#: An entry of a decoded update: its position, int64, and its value.
_ENTRY_BYTES = 12
#: While an update is decoded, in addition to it: its blocks before they are joined.
_DECODING_BYTES = 25  # position, code, edge and scales of a value that is a chunk of its own
#: An entry of a reply: as it was gathered, and its coded position.
_REPLY_ENTRY_BYTES = 16
#: Pushes of one worker that wait for their round: the newest, and one that it has given up.
_NUM_WAITING_PUSHES = 2


def client_memory(layout: ShardLayout, aux_count: int, limits: Limits) -> dict[str, int]:
    """Return the most bytes of each kind that a shard keeps of one client.

    Args:
        layout: Of the shard.
        aux_count: Values that come beside each push.
        limits: Of every client.
    """
    size = layout.size
    payload = payload_limit(layout, aux_count) + payload_limit(layout)  # and the script's changes
    update = 2 * _ENTRY_BYTES * size
    num_replies = limits.waiting_replies + MOST_QUEUED_REQUESTS + 1  # the last one is being sent
    return {
        "messages that arrive": _NUM_MESSAGES * MAX_MESSAGE_BYTES,
        "half a handshake of its bulk connection": 2 * MOST_HANDSHAKE_BYTES,  # OpenSSL copies it
        "buffers of its bulk connection": most_buffer_bytes() + _TLS_COPIES * PIECE_BYTES,
        "a payload that is put together of them and decoded": (
            payload + update + _DECODING_BYTES * size
        ),
        "messages that the writer thread has not come to": MOST_QUEUED_BYTES,
        "pushes that wait for their round": _NUM_WAITING_PUSHES * (payload + update),
        "its copy of the weights, and its last reply": ((_VALUE_BYTES + _REPLY_ENTRY_BYTES) * size),
        "replies that it does not read": num_replies * _REPLY_ENTRY_BYTES * size,
        "control messages that it does not read": MOST_CONTROL_BYTES,
        "reports that a Supervisor does not read": MOST_REPORT_BYTES,
        "a worker's newest rounds and report": KEPT_PER_WORKER + MAX_DOCUMENT_BYTES,
    }
