"""Datagrams between a worker and a shard.

Batches of signed datagrams enter at the worker's end (`connect`, `UdpSender`); buffers of received
ones leave at the shard's (`UdpReceiver`), or are lost. Format, order and meaning of a datagram are
defined in `thinwire.ops.routing`. `sockets` sets the options and the class of service, and
`packet_filter` makes Linux drop foreign datagrams before they cost anything.
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
