"""No client's value reaches a document unchecked: invalid values are rejected and counted.

After each invalid value the shard makes every document that it sends, and a reader accepts each.
"""

import json
import math

import pytest
from absl import logging
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ps.streams import HONEST, ROGUE, Shard, push_frame
from tests.ps.telemetry.test_instruments import instruments_of
from tests.virtual.toy import SPEC
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import MAX_MESSAGE_BYTES
from thinwire.ps.service.handshake import Identity
from thinwire.ps.telemetry.status import StatusReporter
from thinwire.ps.wire.reports import MAX_DOCUMENT_BYTES
from thinwire.runtime.telemetry.run_status import RunStatus, summarise

SCRIPT = {"role": pb.ROLE_SCRIPT, "id": ROGUE, "incarnation": 3, "fingerprint": [], "model": []}
SHARD = {"role": pb.ROLE_SHARD, "id": 1, "fingerprint": [], "model": []}
LOOKS = {"role": pb.ROLE_SUPERVISOR, "id": 0, "fingerprint": [], "model": []}
EVALUATOR = LOOKS | {"role": pb.ROLE_EVALUATOR, "incarnation": 4}


@pytest.fixture(autouse=True)
def quiet():
    before = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)
    yield
    logging.set_verbosity(before)


class Leader(Shard):
    """Shard 0 of two."""

    def __init__(self, *method, **choices):
        super().__init__(*method, **choices)
        mine = Identity("run", 0, 2, 0, self.fingerprint, SPEC, [])
        self.server.open_for(mine, "{}")

    def hello(self, **fields):
        return super().hello(**{"num_shards": 2} | fields)


def check_documents(shard):
    """Make the status, the summary, a shard's report and the metrics; what reads them agrees."""
    status = RunStatus.from_json(shard.board.document())
    json.dumps(summarise(status, []), allow_nan=False)
    json.loads(shard.board.shard_document(), parse_constant=pytest.fail)
    read, _ = instruments_of(shard)
    assert all(math.isfinite(v) for each in read._read() for v in each.values.values())
    return status


def report(**document):
    return {"report": pb.Report(document=json.dumps(document))}


def raw(text):
    return {"report": pb.Report(document=text)}


def metric(**fields):
    values = {"name": "loss", "values": [0.5]} | fields
    return {"evaluated": pb.Evaluated(fit=1, versions=[1], metrics=[pb.Metric(**values)])}


LIES = {
    "report_nan": ({}, raw('{"id": 2, "compute_seconds": NaN}')),
    "report_infinite": ({}, raw('{"id": 2, "compute_seconds": 1e999}')),
    "report_huge": ({}, raw(f'{{"id": 2, "bytes_up": {10**400}}}')),
    "report_negative": ({}, report(id=2, bytes_up=-1)),
    "report_large": ({}, report(id=2, bytes_up=2**60)),
    "report_deep": ({}, raw("[" * 50_000)),
    "report_empty": ({}, raw("x")),
    "report_state": ({}, report(id=2, state="\x1b[2J")),
    "report_labels": ({}, report(id=2, labels={"1": 2**60})),
    "report_bytes": ({}, raw("é" * (MAX_DOCUMENT_BYTES - 1))),
    "rounds_bytes": ({}, {"report": pb.Report(rounds="é" * (MAX_DOCUMENT_BYTES - 1))}),
    "shard_nan": (SHARD, raw('{"bytes_down": NaN}')),
    "shard_worker": (SHARD, report(bytes_down={"9" * 5000: 1})),
    "shard_huge": (SHARD, report(bytes_down={"1": 10**400})),
    "shard_large": (SHARD, report(rejected={"stale": 2**62})),
    "shard_reason": (SHARD, report(rejected={"a\nb": 1})),
    "shard_long": (SHARD, report(refused_peers={"a" * 2000: 1})),
    "shard_deep": (SHARD, raw('{"x":' * 30 + "1" + "}" * 30)),
    "shard_list": (SHARD, raw("[]")),
    "shard_datagrams": (SHARD, report(datagrams={"workers": {"1": 3}})),
    "metric_control": (EVALUATOR, metric(name="a\x1b[2Jb")),
    "metric_nameless": (EVALUATOR, metric(name="")),
    "metric_long": (EVALUATOR, metric(name="a" * 1001)),
    "metric_shape": (EVALUATOR, metric(shape=[7])),
    "metric_large": (EVALUATOR, metric(values=[0.5] * 130_000, shape=[130_000])),
    "versions_none": (
        EVALUATOR,
        {"evaluated": pb.Evaluated(fit=1, metrics=[pb.Metric(name="loss", values=[0.5])])},
    ),
    "versions_huge": (EVALUATOR, {"evaluated": pb.Evaluated(fit=1, versions=[2**64 - 1])}),
    "nobody": (EVALUATOR, {"evaluated": pb.Evaluated(fit=1, nobody="a\nb")}),
    "history": (SCRIPT, {"fit_ended": pb.FitEnded(fit=1, history="é" * 524_100)}),
    "fit_begun": (SCRIPT, {"fit_begun": pb.FitBegun(fit=0)}),
    "epoch_ended": (SCRIPT, {"epoch_ended": pb.EpochEnded(fit=0)}),
    "fit_ended": (SCRIPT, {"fit_ended": pb.FitEnded(fit=0)}),
    "barrier": (SCRIPT, {"barrier": pb.Barrier(name="fit-\u0663-begin")}),
    "stop_fit": (SCRIPT, {"stop_fit": pb.StopFit(fit=2**32 - 1, epochs=2**32 - 1)}),
    "leave": ({}, {"leave": pb.Leave(cause="a" * 100_000)}),
    "halt": (LOOKS, {"halt": pb.Halt(cause="a\nb")}),
}


@pytest.mark.parametrize("name", sorted(LIES))
def test_a_lie_is_rejected_and_counted_and_every_document_can_be_made(name):
    hello, message = LIES[name]
    shard = Leader("asgd")
    stream = shard.say(message, **hello)
    refusal, _ = stream.last("refusal")
    assert refusal.reason == pb.REASON_MALFORMED, refusal
    assert shard.server.guard.refused == {"malformed": 1}
    assert not shard.server.reports
    status = check_documents(shard)
    assert status.policies["refused_peers"] == {"malformed": 1}
    good = push_frame(incarnation=5, epoch=shard.core.membership.epoch + 1)
    shard.say(good, report(id=HONEST, bytes_up=7), id=HONEST, incarnation=5)
    assert check_documents(shard).version == 1
    assert shard.server.guard.refused == {"malformed": 1}


@pytest.mark.parametrize("address", ["a" * 301, "a\nb", "\x1b[2J"])
def test_an_address_that_no_node_has_is_rejected(address):
    shard = Leader("asgd")
    for hello in ({}, SHARD, LOOKS):
        stream = shard.say(peer_address=address, **hello)
        assert stream.last("refusal")[0].reason == pb.REASON_MALFORMED
    assert shard.server.guard.refused == {"malformed": 3}
    check_documents(shard)


def test_what_honest_nodes_report_is_taken():
    shard = Leader("asgd")
    shard.say(report(id=ROGUE, bytes_up=7, labels={"1": 5}, loss=None))
    other = shard.board.shard_document()
    shard.say(raw(other), **SHARD)
    shard.say(metric(values=[math.nan]), metric(name="val/auc é"), **EVALUATOR)
    assert not shard.server.guard.refused
    assert check_documents(shard).workers[0].labels == {1: 5}


def test_bytes_sent_to_a_worker_are_those_of_all_shards():
    shard = Leader("asgd")
    shard.server.connections.restore_bytes_down({ROGUE: 200})
    shard.say(report(id=ROGUE))
    assert check_documents(shard).workers[0].bytes_down == 200
    shard.say(report(bytes_down={str(ROGUE): 1000}), **SHARD)
    status = check_documents(shard)
    assert (status.workers[0].bytes_down, status.bytes_down) == (1200, 1200)


def test_a_script_s_last_words_are_logged_in_one_line():
    shard = Leader("asgd")
    shard.say({"finished": pb.Finished(failed=True, message="one\n\x1b[2Jtwo")}, **SCRIPT)
    assert shard.server.scripts.barriers.ended.message.isprintable()


def test_a_status_with_all_labels_fits_into_one_message(monkeypatch):
    """Many workers' labels together are longer; the status then comes without."""
    shard = Leader("asgd")
    labels = {str(10**17 + n): 2**52 for n in range(5000)}
    for worker in (HONEST, ROGUE):
        stream = shard.say(report(id=worker, labels=labels, restarts=1), id=worker)
        assert stream.last("refusal")[0] is None
    assert len(check_documents(shard).workers[0].labels) == 5000
    monkeypatch.setattr(
        StatusReporter, "_workers", lambda self, made=StatusReporter._workers: made(self) * 3
    )
    text = shard.board.document()
    assert len(text) < MAX_MESSAGE_BYTES
    assert RunStatus.from_json(text).workers[0].restarts == 1
    looks = shard.say(**LOOKS)
    assert looks.last("report")[0].document
    assert "internal" not in shard.server.guard.refused


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
)
VALUES = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=5,
)
FIELDS = [
    *("id", "state", "bytes_up", "compute_seconds", "labels", "loss", "restarts", "datagrams"),
    *("bytes_down", "rejected", "weighting", "down", "group_staleness", "guards"),
    *("refused_peers", "is_last", "membership", "non_finite", "steps_per_second"),
]


@settings(max_examples=150, deadline=None)
@given(
    document=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4),
    hello=st.sampled_from([{}, SHARD]),
)
def test_any_report_is_rejected_or_every_document_can_be_made(document, hello):
    shard = Leader("asgd")
    stream = shard.say(report(**{"id": 2} | document), **hello)
    refusal, _ = stream.last("refusal")
    assert refusal is None or refusal.reason == pb.REASON_MALFORMED
    assert (refusal is None) == (not shard.server.guard.refused)
    check_documents(shard)


@settings(max_examples=100, deadline=None)
@given(
    numbers=st.tuples(*[st.floats(width=64)] * 3),
    step=st.integers(0, 2**63),
    steps=st.integers(0, 2**32 - 1),
)
def test_any_query_is_rejected_or_every_document_can_be_made(numbers, step, steps):
    shard = Leader("esync", max_local_steps=4)
    step_seconds, age_seconds, query_seconds = numbers
    query = pb.Query(
        incarnation=5,
        step=step,
        local_steps=steps,
        step_seconds=step_seconds,
        age_seconds=age_seconds,
        query_seconds=query_seconds,
    )
    shard.say({"query": query}, incarnation=5)
    check_documents(shard)


@settings(max_examples=100, deadline=None)
@given(
    loss=st.floats(width=32),
    rate=st.floats(),
    counts=st.tuples(*[st.integers(0, 2**32 - 1)] * 3),
)
def test_any_head_of_a_push_is_rejected_or_every_document_can_be_made(loss, rate, counts):
    shard = Leader("asgd")
    samples, local_steps, lag = counts
    push = push_frame(
        incarnation=5,
        loss=loss,
        learning_rate=rate,
        sets_rate=True,
        samples=samples,
        local_steps=local_steps,
        lag=lag,
    )
    shard.say(push, incarnation=5)
    check_documents(shard)
