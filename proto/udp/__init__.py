"""Datagrams between a worker and a shard: the public names.

Their format, order and meaning are none of this package's business: batches of signed datagrams go
in at one end, buffers of received ones come out at the other, or do not.
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
