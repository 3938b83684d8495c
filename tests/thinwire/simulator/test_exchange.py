"""A simulated worker's requests to all shards."""

import types

from thinwire.simulator.exchange import SimulatedExchange


class Client:
    """A shard's client with a broken stream."""

    def __init__(self):
        self.is_requesting, self.joined = False, 0

    def pull(self):
        self.is_requesting = True

    def ensure_joined(self):
        self.joined += 1


def test_a_request_opens_the_stream_that_is_awaited_first():
    exchange = SimulatedExchange.__new__(SimulatedExchange)
    exchange._clock = types.SimpleNamespace(now=3.0)
    exchange.clients, exchange._shards, exchange._welcomed = [Client(), Client()], [0, 1], {0, 1}
    exchange.pull()
    assert [client.joined for client in exchange.clients] == [1, 0]
    assert exchange.requested_at == 3.0
