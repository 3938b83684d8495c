"""A worker's client of one shard: quarantine, expulsion, giving up, listening while computing."""

import threading

import pytest

from thinwire.ops.push_head import PushHead, PushOrigin
from thinwire.ops.types import Kind
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import MessageAssembler
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.worker.client import shard_client, shard_connection
from thinwire.worker.client.messages import PushEncoder
from thinwire.worker.client.protocol import NewestEpoch
from thinwire.worker.client.shard_client import PushRefused, ShardClient, ShardGone
from thinwire.worker.core.messages import PushRequest

ADDRESS = "127.0.0.1:1"


class FakeClock:
    """Time that passes when a caller waits."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


class FakeStream:
    bytes_sent = bytes_received = 0
    send_seconds = 0.0

    def __init__(self, said):
        self.said = said

    def send(self, parts):
        assembler = MessageAssembler(pb.ToServer, lambda message: 1 << 20)
        found = [whole for part in parts if (whole := assembler.feed(part)) is not None]
        self.said += [(message.push.step, message.push.epoch) for message, _ in found]


class FakeSession:
    """A stream to a shard; a test has written its messages."""

    def __init__(self, clock, heard=()):
        self.clock, self.heard, self.said, self.closed = clock, list(heard), [], False
        self.stream, self.silent, self.lively = FakeStream(self.said), False, True
        self.chunk_bytes = 1 << 20

    def listen_for(self, seconds):
        return self._next(1.0)

    def poll(self, patience_seconds):
        return self._next(0.0) if self.heard else None

    def _next(self, seconds):
        if not self.heard:
            raise StreamLost("nothing more is written")
        self.clock.now += seconds
        message = self.heard.pop(0)
        if isinstance(message, Exception):
            raise message
        return message, memoryview(b"")

    def received_within(self, seconds):
        return self.lively

    def send_control(self, message, counted=False):
        self.said.append(message.WhichOneof("body"))

    def close(self, grace_seconds=1.0):
        self.closed = True


class Client:
    """A client that dials sessions written by a test."""

    def __init__(self, monkeypatch, *sessions, shard=0):
        self.clock, self.closing = FakeClock(), threading.Event()
        for module in (shard_client, shard_connection):
            monkeypatch.setattr(module, "time", self.clock)
        hello = pb.Hello(role=pb.ROLE_WORKER, id=1, shard=shard)
        self.client = ShardClient(
            ADDRESS,
            hello,
            1 << 20,
            None,
            20.0,
            self.closing,
            PushEncoder(shard, None),
            NewestEpoch(),
        )
        self.sessions = [FakeSession(self.clock, heard) for heard in sessions]
        self.waiting = list(self.sessions)
        self.client._dialler.dial = lambda patience: self._dialled()
        self.client._dialler.attempt = self._dialled
        self.client.connect()

    def _dialled(self):
        if not self.waiting:
            raise Unreachable("nobody is left")
        welcome = pb.Welcome(run_id="run", incarnation=7, lease_seconds=9.0, epoch=3)
        return self.waiting.pop(0), welcome

    def push(self, step=4):
        self.client.push(
            PushRequest(PushHead(step, 1, 1, 0.0), [PushOrigin()] * 2, Kind.GRADIENT, [(), ()])
        )
        return self.client

    def version(self):
        """Return the version of the reply that is waited for."""
        replied, _ = self.client.wait_for_reply()
        return replied.reply.version


def refusal(reason, step=4, **fields):
    return pb.ToClient(refusal=pb.Refusal(reason=reason, step=step, message="no", **fields))


def reply(step=4):
    return pb.ToClient(reply=pb.Reply(step=step, version=9))


def waiting(count=1):
    return [pb.ToClient(waiting=pb.Waiting())] * count


def put_out(seconds):
    return refusal(pb.REASON_QUARANTINED, retry_after_seconds=seconds)


def test_who_is_put_out_says_hello_again_when_its_term_is_over(monkeypatch):
    run = Client(monkeypatch, [put_out(5.0), *waiting(9)], [reply()])
    run.push()
    assert run.version() == 9
    first, second = run.sessions
    assert run.clock.now >= 106.0  # a second to notice, five to wait
    assert len(first.heard) == 4  # it listened for this long, and no longer
    assert first.closed
    assert second.said == [(4, 3)]  # the push again


def test_who_is_put_out_hears_of_the_run_s_end(monkeypatch):
    halt = pb.ToClient(halt=pb.Halt(cause="iter_max"))
    run = Client(monkeypatch, [put_out(1e6), *waiting(2), halt, *waiting()])
    with pytest.raises(ShardGone, match="iter_max"):
        run.push().wait_for_reply()


def test_another_shard_s_halt_is_not_the_run_s_end(monkeypatch):
    halt = pb.ToClient(halt=pb.Halt(cause="iter_max"))
    run = Client(monkeypatch, [put_out(2.0), halt, *waiting(3)], [reply()], shard=1)
    run.push()
    assert run.version() == 9
    assert run.client.halt_cause == ""


def test_a_term_does_not_outlive_its_stream(monkeypatch):
    run = Client(monkeypatch, [put_out(1e6), StreamLost("gone")], [*waiting(3), reply()])
    run.push()
    assert run.version() == 9


def test_a_push_of_an_older_epoch_is_sent_again_on_the_same_stream(monkeypatch):
    run = Client(monkeypatch, [refusal(pb.REASON_STALE_EPOCH, epoch=8), reply()])
    run.push().wait_for_reply()
    assert run.sessions[0].said == [(4, 3), (4, 8)]


def test_a_refusal_of_another_push_is_nothing(monkeypatch):
    run = Client(monkeypatch, [refusal(pb.REASON_OUTLIER, step=3), reply()])
    run.push()
    assert run.version() == 9


def test_what_nobody_can_mend_is_raised(monkeypatch):
    run = Client(monkeypatch, [refusal(pb.REASON_MALFORMED)])
    with pytest.raises(PushRefused) as refused:
        run.push().wait_for_reply()
    assert refused.value.reason == pb.REASON_MALFORMED


def test_after_an_outlier_the_model_is_pulled(monkeypatch):
    run = Client(monkeypatch, [refusal(pb.REASON_OUTLIER), reply(step=0)])
    replied, _ = run.push().wait_for_reply()
    assert (replied.reply.version, replied.is_outlier) == (9, True)
    assert run.sessions[0].said == [(4, 3), "pull"]


def test_who_is_let_go_reaches_the_others_before_it_says_hello_again(monkeypatch):
    run, order = Client(monkeypatch, [refusal(pb.REASON_NOT_MEMBER)], [reply()]), []
    run.client.before_rejoining = lambda: order.append(len(run.waiting))
    run.client.on_expelled = lambda: order.append("expelled")
    run.push().wait_for_reply()
    assert order == ["expelled", 1]  # the second stream was not open yet
    assert not run.client.protocol.is_expelled


def test_a_push_that_is_given_up_is_not_sent_again(monkeypatch):
    run = Client(monkeypatch, [refusal(pb.REASON_NOT_MEMBER)], [reply(step=0)], shard=1)
    run.client.on_expelled = run.client.abandon_push
    run.push()
    assert run.version() == 9
    assert run.sessions[1].said == ["pull"]


def test_a_pull_cannot_be_given_up(monkeypatch):
    run = Client(monkeypatch, [reply(step=0)])
    run.client.pull()
    run.client.abandon_push()
    assert run.version() == 9
    assert run.sessions[0].said == ["pull"]


def test_an_answer_that_comes_while_another_shard_is_waited_for_is_kept(monkeypatch):
    run = Client(monkeypatch, [reply()])
    run.push().poll()
    run.client.poll()  # nothing more is written
    assert run.version() == 9
    assert not run.client._in_use


def test_who_computes_hears_that_it_was_let_go_and_comes_back_when_it_may(monkeypatch):
    run = Client(monkeypatch, [*waiting(3), refusal(pb.REASON_NOT_MEMBER, step=0)], [])
    run.client.attend(lambda: False)
    assert run.client.protocol.is_expelled and not run.client.connected
    run.client.attend(lambda: True)
    assert run.client.connected and not run.client.protocol.is_expelled


def test_a_lost_stream_is_opened_again_while_the_worker_computes(monkeypatch):
    run = Client(monkeypatch, [StreamLost("cut")], [], [])
    run.client.attend()
    assert run.client.connected and run.client._session is run.sessions[1]
    run.sessions[1].silent = True
    run.client.attend()
    assert run.client._session is run.sessions[2]


def test_dialling_in_vain_is_not_repeated_at_once(monkeypatch):
    run = Client(monkeypatch, [StreamLost("cut")])
    run.client.attend()
    run.waiting = [FakeSession(run.clock)]
    run.client.attend()
    assert not run.client.connected
    run.clock.now += 1.0
    run.client.attend()
    assert run.client.connected


@pytest.mark.parametrize("ended", ["closing", "halted", "asking"])
def test_nobody_else_touches_a_stream_in_use_or_at_its_end(monkeypatch, ended):
    run = Client(monkeypatch, [StreamLost("cut")], [])
    if ended == "closing":
        run.closing.set()
    elif ended == "halted":
        run.client.protocol.halt_cause = "iter_max"
    else:
        run.push()
    run.client.attend()
    assert run.client._session is run.sessions[0]


def test_a_push_is_not_given_up_for_one_that_was_settled_before(monkeypatch):
    """The worker was expelled while the answer to its last push was on its way."""
    run = Client(monkeypatch, [reply(4), reply(5)], shard=1)
    listen = run.sessions[0].listen_for

    def listen_and_hear_of_it(seconds):
        run.client.abandon_push()
        run.sessions[0].listen_for = listen
        return listen(seconds)

    run.sessions[0].listen_for = listen_and_hear_of_it
    for step in (4, 5):
        run.push(step)
        assert run.version() == 9
    assert run.sessions[0].said == [(4, 3), (5, 3)]


def test_a_query_is_answered_unless_the_shard_is_being_dialled(monkeypatch):
    answer = pb.ToClient(answer=pb.Answer(step=4, local_steps=2, ready=True))
    run = Client(monkeypatch, [answer, answer])
    question = pb.Query(step=4, local_steps=2)
    monkeypatch.setattr(shard_client, "_QUERY_TURN_SECONDS", 0.0)
    with run.client._turn:  # as another thread does that dials
        assert run.client.query(question, 1.0) is None
    assert run.sessions[0].said == []
    for _ in range(2):
        assert run.client.query(question, 1.0).ready
    assert run.sessions[0].said == ["query", "query"]


def test_a_stream_is_opened_again_only_where_the_shard_seems_away(monkeypatch):
    run = Client(monkeypatch, [], [])
    run.client.ensure_connected()
    assert run.client._session is run.sessions[0]
    run.sessions[0].lively = False
    run.client.ensure_connected()
    assert run.client._session is run.sessions[1]
