"""A worker that receives an end signal while its last reply is missing."""

import types

from thinwire.worker.trainer import WorkerSession


class Line:
    """A worker's view of one shard."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def send(self, message):
        self.log.append((self.name, message.WhichOneof("body"), message.leave.cause))

    def close(self):
        self.log.append((self.name, "close"))


def test_it_says_farewell_everywhere_before_it_closes_anything():
    log = []
    part = WorkerSession.__new__(WorkerSession)
    part.exchange = types.SimpleNamespace(shards=[Line(log, 0), Line(log, 1)])
    part._cut()
    assert log == [
        (0, "leave", "interrupted"),
        (1, "leave", "interrupted"),
        (0, "close"),
        (1, "close"),
    ]
