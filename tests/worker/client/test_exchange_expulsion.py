"""A worker expelled during an exchange finishes it on all shards or on none."""

import types

import pytest

from thinwire.proto import thinwire_pb2 as pb
from thinwire.worker.client.exchange import Exchange


class Shard:
    """The part of a client that an exchange uses: if its part is open, and its actions."""

    def __init__(self, is_open, settles=False):
        self.protocol = types.SimpleNamespace(is_requesting=is_open, is_expelled=False)
        self.settles, self.abandoned = settles, False

    def poll(self):
        self.protocol.is_requesting &= not self.settles

    def abandon_push(self):
        self.abandoned = self.protocol.is_requesting


def exchange(*shards):
    made = Exchange.__new__(Exchange)
    made.shards = list(shards)
    return made


@pytest.mark.parametrize("expelled", [0, 1])
@pytest.mark.parametrize("settled", [0, 1])
def test_what_one_shard_has_settled_is_given_up_at_the_other(settled, expelled):
    shards = [Shard(number != settled) for number in range(2)]
    made = exchange(*shards)
    shards[expelled].protocol.is_expelled = True
    made._finish_nowhere()
    assert [shard.abandoned for shard in shards] == [number != settled for number in range(2)]


def test_what_nobody_has_settled_is_sent_again():
    shards = [Shard(True), Shard(True)]
    exchange(*shards)._finish_nowhere()
    assert not any(shard.abandoned for shard in shards)


@pytest.mark.parametrize("is_expelled", [True, False])
def test_a_part_that_is_settled_while_shard_0_has_no_such_member_ends_the_exchange(is_expelled):
    shards = [Shard(True), Shard(True, settles=True)]
    shards[0].protocol.is_expelled = is_expelled
    exchange(*shards)._look_after(shards[1:])
    assert shards[0].abandoned == is_expelled


def test_a_worker_is_one_incarnation_at_all_shards():
    class Joining:
        def __init__(self, incarnation):
            self.hello = pb.Hello()
            self.welcome = pb.Welcome(run_id="run", incarnation=incarnation)

        def connect(self):
            return self.welcome

    shards = [Joining(incarnation) for incarnation in (7, 8, 9)]
    exchange(*shards).join()
    assert [(each.hello.run_id, each.hello.incarnation) for each in shards[1:]] == [("run", 7)] * 2


@pytest.mark.parametrize(("alive", "may"), [((True, True), True), ((True, False), False)])
def test_an_expelled_worker_returns_when_all_other_shards_can_be_reached(alive, may):
    """Otherwise all workers would wait again for a worker that one shard does not receive."""
    decisions = []
    leader = types.SimpleNamespace(attend=lambda may_rejoin: decisions.append(may_rejoin()))
    others = [types.SimpleNamespace(alive=each, attend=lambda: None) for each in alive]
    exchange(leader, *others).attend()
    assert decisions == [may]
