"""Round records: forwarded immediately, stored for a returning Supervisor, bounded."""

from tests.ps.streams import HONEST, Shard
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.service.observers import RoundsRelay


class Listener:
    def __init__(self):
        self.heard = []

    @property
    def stream(self):
        return self

    def send(self, make, counted):
        assert not counted
        for data in make():
            self.send_report(pb.ToClient.FromString(data).report)

    def send_report(self, report):
        self.heard.append((report.worker, report.rounds))
        return 0


def test_a_listener_hears_at_once_and_a_late_one_what_is_kept():
    relay, first, late = RoundsRelay(), Listener(), Listener()
    relay.take(2, "a", [first])
    relay.take(1, "b", [first])
    relay.take(2, "c", [])
    relay.repeat(late)
    assert first.heard == [(2, "a"), (1, "b")]
    assert late.heard == [(2, "a"), (2, "c"), (1, "b")]


def test_the_oldest_go_first_and_the_newest_never():
    relay, late = RoundsRelay(kept_per_worker=5), Listener()
    for batch in ("aa", "bb", "cc", "dddddddd"):
        relay.take(1, batch, [])
    relay.take(2, "x", [])
    relay.repeat(late)
    assert late.heard == [(1, "dddddddd"), (2, "x")]


def supervisor_of(shard, *messages):
    """Send a Supervisor's Hello, then these messages; return its stream."""
    return shard.say(*messages, role=pb.ROLE_SUPERVISOR, id=0, fingerprint=[])


def rounds_heard(stream):
    reports = [one.report for one, _ in stream.received if one.WhichOneof("body") == "report"]
    return [(report.worker, report.rounds) for report in reports if report.rounds]


def test_a_worker_s_rounds_reach_a_supervisor_that_comes_later():
    shard = Shard("asgd")
    both = {"report": pb.Report(rounds="b")}
    shard.say({"report": pb.Report(rounds="a")}, both, id=HONEST)
    assert rounds_heard(supervisor_of(shard)) == [(HONEST, "a"), (HONEST, "b")]
    assert not shard.server.reports  # rounds are no status


def test_an_observer_that_does_not_evaluate_hears_no_rounds():
    shard = Shard("asgd")
    shard.say({"report": pb.Report(rounds="a")})
    assert rounds_heard(shard.say(role=pb.ROLE_SUPERVISOR, id=0, fingerprint=[], model=[])) == []


def test_rounds_too_long_and_rounds_of_no_worker_end_the_stream():
    shard = Shard("asgd")
    long = shard.say({"report": pb.Report(rounds="x" * (256 * 1024 + 1))})
    odd = supervisor_of(shard, {"report": pb.Report(rounds="x")})
    for stream in (long, odd):
        assert stream.last("refusal")[0].reason == pb.REASON_MALFORMED
    assert rounds_heard(supervisor_of(shard)) == []
