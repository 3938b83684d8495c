"""Summaries wait for the last figures of following shards, up to a time limit."""

import dataclasses
import json
import time
import types

from tests.ps.streams import Shard, Stream
from thinwire.ops.types import ShardLayout, Slice
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.core import events
from thinwire.ps.scripts.run_control import RunControl
from thinwire.ps.service import leader_client
from thinwire.ps.telemetry.status import StatusReporter
from thinwire.supervisor.dashboard import Progress, plain_line


class Follower:
    """A following shard's connection to a real shard 0."""

    def __init__(self, shard, number=1):
        self.shard, self.number = shard, number
        self.stream = Stream(shard.server)
        self.stream.stream = self.stream
        self.stream.role, self.stream.id, self.stream.left = pb.ROLE_SHARD, number, False
        self.stream.evaluates = False
        shard.server.connections.add_observer(self.stream)

    def report(self, **document):
        key = (pb.ROLE_SHARD, self.number)
        self.shard.server.reports[key] = json.dumps(document)


def ended():
    shard = Shard()
    shard.core.handle(events.Stop("target_accuracy"), time.monotonic())
    return shard


def board_of(shard, **sources):
    return StatusReporter(shard.board._run, dataclasses.replace(shard.sources, **sources))


def test_nothing_is_awaited_before_the_end_or_without_other_shards():
    shard = Shard()
    Follower(shard)
    assert not leader_client.figures_are_awaited(shard.server)
    assert not leader_client.figures_are_awaited(ended().server)


def test_a_connected_shard_is_awaited_until_its_last_report():
    shard = ended()
    follower = Follower(shard)
    follower.report(rejected={"stale": 1})
    assert leader_client.figures_are_awaited(shard.server)
    follower.report(rejected={"stale": 2}, is_last=True)
    assert not leader_client.figures_are_awaited(shard.server)


def test_who_is_gone_is_not_awaited_and_nobody_for_ever():
    shard = ended()
    gone, away = Follower(shard, 1), Follower(shard, 2)
    gone.stream.lost = True
    away.stream.left = True
    assert not leader_client.figures_are_awaited(shard.server)
    Follower(shard, 3)
    assert leader_client.figures_are_awaited(shard.server)
    shard.core._lifecycle.ended_at -= 2.0
    assert not leader_client.figures_are_awaited(shard.server)


def test_a_shard_s_figures_are_due_when_its_workers_have_gone():
    shard = Shard()
    assert not leader_client.figures_are_final(shard.server)
    shard.say({"pull": pb.Pull()})  # and the stream ends
    shard.core.handle(events.Stop("iter_max"), time.monotonic())
    assert leader_client.figures_are_final(shard.server)


def test_workers_are_done_when_nothing_more_is_awaited():
    shard, awaits = Shard(), [True]
    board = board_of(shard, awaits=lambda: awaits[0])
    shard.say({"pull": pb.Pull()}, {"leave": pb.Leave(cause="done")})
    shard.core.handle(events.Stop("iter_max"), time.monotonic())
    assert set(board.states().values()) == {"left"}
    awaits[0] = False
    assert set(board.states().values()) == {"done"}


def test_a_board_tells_what_it_is_handed():
    shard = Shard()
    journal = {"journal": {"on": False}}
    board = board_of(shard, refused_peers=lambda: {"token": 3}, journal=lambda: journal)
    policies = board.status().policies
    assert policies["refused_peers"] == {"token": 3}
    assert policies["journal"] == {"on": False}
    assert json.loads(board.shard_document(is_last=True))["is_last"] is True


def test_a_worker_whose_script_goes_on_is_between_fits_and_has_not_left():
    shard = Shard()
    now = [0.0]
    scripts = RunControl(shard.server, 10.0, clock=lambda: now[0])
    barriers = scripts.barriers
    board = board_of(shard, runs_script=scripts.is_running)
    shard.say({"pull": pb.Pull()}, {"leave": pb.Leave(cause="done")})
    (worker,) = board.states()
    assert board.states() == {worker: "left"}, "it has no script"
    barriers.begin(worker, 1, now[0])
    assert board.states() == {worker: "between fits"}
    line = plain_line(Progress(board.status()))
    assert line.endswith("workers: 1 between fits")
    now[0] = 10.0
    assert board.states() == {worker: "left"}, "nothing has come of its script for a lease"
    barriers.alive(worker, now[0])
    assert board.states() == {worker: "between fits"}
    barriers.finish(worker, False, "", now[0])
    assert board.states() == {worker: "left"}, "its script has ended, and others train"


def test_a_following_shard_repeats_its_wish_for_the_end_on_every_stream():
    """The stream that it was sent on may have broken before shard 0 had it."""
    layout = ShardLayout((Slice(0, 0, 4),))
    client = leader_client.LeaderClient("host:1", pb.Hello(), layout, lambda event: None, str)
    streams = []

    def dial(seconds):
        sent = []
        streams.append(sent)
        session = types.SimpleNamespace(send_control=sent.append)
        return session, pb.Welcome(run_id="run", lease_seconds=5.0)

    client._dialler = types.SimpleNamespace(dial=dial)
    client.connect(1.0)
    assert streams == [[]]
    client.request_end("journal_failed")
    client.connect(1.0)
    wish = pb.ToServer(halt=pb.Halt(cause="journal_failed"))
    assert streams == [[wish], [wish]]
