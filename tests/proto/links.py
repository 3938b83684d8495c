"""Traffic of tests over a link with classes of service, and the delivered messages."""

import math

import numpy as np

from thinwire.proto.emulation.priority_link import HEADER_BYTES

SIZE = 1472  # with headers 1,500 bytes: 0.12 ms at 100 Mbit/s
UNIT = SIZE + HEADER_BYTES


def drain(link, until=math.inf):
    """Everything that comes by `until`, by following next_event."""
    found = []
    while (at := link.next_event()) is not None and at <= until:
        found += link.advance(at)
    return found


def survivors(arrivals, item):
    """Numbers of the datagrams of a batch that arrived, in order of coming."""
    parts = [arrival.indices for arrival in arrivals if arrival.item == item]
    return np.concatenate(parts).tolist() if parts else []
