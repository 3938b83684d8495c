"""Datagrams between a worker and a shard: the public names.

Their format, order and meaning are none of this package's business: batches of signed datagrams go
in at one end, buffers of received ones come out at the other, or do not.
"""

from proto.udp_types import Batch, ChannelCounts, DatagramSender

__all__ = ["Batch", "ChannelCounts", "DatagramSender"]
