"""Datagrams between a worker and a shard: the public names.

Their format, order and meaning are none of this package's business: batches of signed datagrams go
in at one end, buffers of received ones come out at the other, or do not.
"""

from proto.udp_connect import connect, pacing
from proto.udp_marking import SCHEMES, stream_dscp
from proto.udp_receiver import Owner, ReceivedCounts, UdpReceiver
from proto.udp_sender import Sending, UdpSender
from proto.udp_types import Batch, ChannelCounts, DatagramSender

__all__ = [
    "SCHEMES",
    "Batch",
    "ChannelCounts",
    "DatagramSender",
    "Owner",
    "ReceivedCounts",
    "Sending",
    "UdpReceiver",
    "UdpSender",
    "connect",
    "pacing",
    "stream_dscp",
]
