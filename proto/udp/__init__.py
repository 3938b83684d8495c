"""Unreliable UDP datagrams from a worker to a shard.

The worker's end of the datagram path (`connect`, `UdpSender`) sends batches of signed datagrams.
The shard's end of the datagram path (`UdpReceiver`) delivers buffers of received datagrams; the
network may lose some datagrams. `thinwire.ops.routing` defines the format, order and meaning of a
datagram. The module `sockets` sets UDP socket options and the class of service. The module
`packet_filter` makes the Linux kernel drop datagrams of unknown senders before they fill a receive
buffer.
"""

from thinwire.proto.udp.connect import connect, pacing
from thinwire.proto.udp.receiver import DatagramOwner, ReceiverCounts, UdpReceiver
from thinwire.proto.udp.sender import UdpSender, UdpSettings
from thinwire.proto.udp.sockets import SCHEMES, stream_dscp
from thinwire.proto.udp.types import ChannelCounts, DatagramBatch, DatagramSender

__all__ = [
    "SCHEMES",
    "ChannelCounts",
    "DatagramBatch",
    "DatagramOwner",
    "DatagramSender",
    "ReceiverCounts",
    "UdpReceiver",
    "UdpSender",
    "UdpSettings",
    "connect",
    "pacing",
    "stream_dscp",
]
