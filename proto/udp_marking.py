"""Which class of service each channel's packets ask the network and the local queue for.

Channel 0 is the reliable stream; 1 is the most important datagram channel.
"""

from __future__ import annotations

import math

SCHEMES = ("cs", "compact", "off")
_MOST_CHANNELS = 7
_CLASS = 32  # step between the IP precedence classes CS0..CS7 in the TOS byte
_COMPACT_TOP = 5  # CS6 and CS7 belong to the network's own traffic and may be remarked
_NUM_QUEUE_PRIORITIES = 3


def tos(scheme: str, channel: int, channels: int) -> int | None:
    """Return the TOS byte (IPv6: traffic class) of a channel's packets.

    - ``cs``: the stream gets class CS ``channels``, channel i CS ``channels - i``, so that the
      last is best effort.
    - ``compact``: the stream gets CS5, channel i CS ``max(0, 5 - ceil(5 i / channels))``; stays
      out of the classes of network control.
    - ``off``: None, packets are left as they are.

    Args:
        scheme: One of `SCHEMES`.
        channel: 0 for the reliable stream.
        channels: Datagram channels, 0..7.

    Raises:
        ValueError: Anything else.

    Source: the marking rules of the DGT authors' code (``cs``).

    >>> [tos("cs", channel, 3) for channel in range(4)]
    [96, 64, 32, 0]
    >>> [tos("compact", channel, 3) for channel in range(4)]
    [160, 96, 32, 0]
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme {scheme!r} is none of {', '.join(SCHEMES)}")
    if not 0 <= channel <= channels <= _MOST_CHANNELS:
        raise ValueError(f"channel {channel} of {channels}: 0 <= channel <= channels <= 7 expected")
    if scheme == "off":
        return None
    if scheme == "cs":
        return _CLASS * (channels - channel)
    if channel == 0:
        return _CLASS * _COMPACT_TOP
    return _CLASS * max(0, _COMPACT_TOP - math.ceil(_COMPACT_TOP * channel / channels))


def stream_dscp(scheme: str, channels: int) -> int | None:
    """Return the reliable stream's DSCP, 0..63, for gRPC; None leaves it unmarked.

    >>> stream_dscp("cs", 7), stream_dscp("off", 7)
    (56, None)
    """
    byte = tos(scheme, 0, channels)
    return None if byte is None else byte >> 2


def queue_priority(channel: int, channels: int) -> int:
    """Return the Linux priority of a datagram channel in the local queue: 3, 2 or 1.

    Linux gives every class of `tos` priority 0, so classes alone reorder nothing on the sending
    host. In the map of its default queues (pfifo_fast, prio) 1, 2 and 3 all wait behind 0, where
    the reliable stream is; queues that sort by number tell them apart. None needs privileges.
    """
    return _NUM_QUEUE_PRIORITIES - _NUM_QUEUE_PRIORITIES * (channel - 1) // channels
