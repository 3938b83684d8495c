"""A flood has the planned frames and arrives completely."""

import numpy as np
import pytest

from bench.transport.flood import datagrams, flood
from thinwire.ops.routing.datagram_format import HEADER, MAGIC
from thinwire.proto.udp import sockets as udp_sockets

SIZE = 200


def rows(data):
    assert len(data) % SIZE == 0 and 0 < len(data) < 1 << 16
    return np.frombuffer(data, np.uint8).reshape(-1, SIZE)


def headers(data):
    return np.frombuffer(rows(data)[:, : HEADER.itemsize].tobytes(), HEADER)


def test_foreign_ones_are_nothing_of_ours():
    assert not (headers(datagrams("foreign", SIZE))["magic"] == MAGIC).any()


def test_well_formed_ones_say_whose_they_claim_to_be():
    found = headers(datagrams("garbled", SIZE, session=77, worker=3))
    assert (found["magic"] == MAGIC).all()
    assert set(found["session"]) == {77} and set(found["worker"]) == {3}
    assert set(found["payload_bytes"]) == {SIZE - 80}
    assert 77 not in headers(datagrams("unknown", SIZE))["session"]


def test_a_sample_is_sent_again_or_with_one_bit_flipped_in_each():
    sample = np.random.default_rng(5).integers(0, 256, 10 * SIZE, np.uint8).tobytes()
    assert datagrams("replayed", SIZE, sample) == sample
    changed = rows(datagrams("garbled", SIZE, sample)) ^ rows(sample)
    assert (np.unpackbits(changed, axis=1).sum(axis=1) == 1).all()


@pytest.mark.parametrize("kind", ["garbled", "replayed"])
def test_what_cannot_be_made_up_is_asked_for(kind):
    with pytest.raises(ValueError, match="--sample"):
        datagrams(kind, SIZE)


def test_it_arrives_at_every_port():
    receivers = udp_sockets.bind("127.0.0.1", 2)
    ports = [each.getsockname()[1] for each in receivers]
    data = datagrams("foreign", SIZE)
    assert flood("127.0.0.1", ports, 1e-3, data, SIZE) % (len(data) // SIZE) == 0
    for each in receivers:
        assert each.recv(SIZE) == data[:SIZE]
        each.close()
