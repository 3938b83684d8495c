"""A shard's metrics equal its counters, and publishing never blocks the writer thread."""

import threading
import types

from tests.ps.streams import HONEST, Shard, push_frame
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.telemetry.instruments import ShardInstruments
from thinwire.runtime.telemetry.instruments import Instrument
from thinwire.runtime.telemetry.run_status import WorkerMetrics, summarise


class FakeClock:
    now = 0.0

    def __call__(self):
        return self.now


def instruments_of(shard, received=lambda: None):
    clock = FakeClock()
    return ShardInstruments(shard.server, shard.board, received, clock), clock


def read(instruments, shard):
    """Read the instruments while the writer thread runs."""
    over = threading.Event()
    writer = threading.Thread(target=shard.server.run_until, args=(over.is_set,), daemon=True)
    writer.start()
    try:
        return values(instruments.collect())
    finally:
        over.set()
        writer.join(20)


def values(told):
    found = {}
    for instrument in told:
        assert isinstance(instrument, Instrument)
        assert instrument.name not in found
        found[instrument.name] = {
            " ".join(labels): value for labels, value in instrument.values.items()
        }
    return found


def test_it_tells_what_the_status_tells():
    shard = Shard("asgd")
    instruments, clock = instruments_of(shard)
    shard.say(push_frame(incarnation=5), push_frame(incarnation=5, step=2), incarnation=5)
    shard.say({"pull": pb.Pull()}, {"leave": pb.Leave(cause="done")}, id=HONEST)
    shard.say(shard=3)
    clock.now = 5.0
    found, status = read(instruments, shard), shard.board.status()
    assert found["updates"][""] == found["model_version"][""] == status.version == 2
    assert found["pushes"][""] == status.pushes == 2
    assert found["samples"][""] == status.samples == 16
    assert found["staleness"] == {"0": 1, "1": 1}
    assert found["workers"] == {"waiting": 0, "training": 0, "suspect": 1, "left": 1, "done": 0}
    assert found["refused_peers"] == {"hello": 1}
    assert found["queue_length"] == {"events": 0, "replies": 0}
    assert found["bytes_sent"] == {"down": status.bytes_down}
    assert found["membership_epoch"][""] == shard.core.membership.epoch
    assert found["figures_age_seconds"][""] == 0
    assert "datagrams" not in found


def test_who_asks_often_does_not_keep_the_writer_busy():
    shard = Shard("asgd")
    instruments, clock = instruments_of(shard)
    for _ in range(100):
        values(instruments.collect())
    assert shard.server.queue.empty()
    clock.now = 1.5
    read(instruments, shard)
    assert shard.server.queue.empty()


def test_a_writer_that_is_stuck_leaves_the_last_figures(monkeypatch):
    monkeypatch.setattr("thinwire.ps.telemetry.instruments._PATIENCE_SECONDS", 0.01)
    shard = Shard("asgd")
    instruments, clock = instruments_of(shard)
    clock.now = 50.0
    for _ in range(3):
        assert values(instruments.collect())["figures_age_seconds"][""] == 50.0
    assert shard.server.queue.qsize() == 1  # read once, not once a reader
    assert read(instruments, shard)["figures_age_seconds"][""] == 0.0


def test_what_goes_wrong_in_telling_does_not_end_the_run(caplog):
    def received():
        if clock.now:
            raise ValueError("a mistake")

    shard = Shard("asgd")
    clock = FakeClock()
    instruments = ShardInstruments(shard.server, shard.board, received, clock)
    clock.now = 9.0
    with caplog.at_level("ERROR", logger="absl"):
        assert read(instruments, shard)["figures_age_seconds"][""] == 9.0
    assert "could not be collected" in caplog.text
    shard.say(push_frame(incarnation=5), incarnation=5)
    assert shard.core.version == 1


def test_what_becomes_of_datagrams():
    shard = Shard("asgd")
    instruments, _ = instruments_of(shard, lambda: DatagramCounts({}, {"tag": 3}))
    found = values(instruments.collect())
    assert found["datagrams"] == {"announced": 0, "arrived": 0, "late": 0, "late_used": 0}
    assert found["datagrams_dropped"] == {"tag": 3}


def test_a_journal_is_told_of():
    shard = Shard("asgd")
    shard.server.journaled.journal = types.SimpleNamespace(
        num_records=4, num_bytes=900, bytes_since_snapshot=300
    )
    found = values(instruments_of(shard)[0].collect())
    assert found["journal_on"][""] == 1
    assert (found["journal_events"][""], found["journal_bytes"][""]) == (4, 900)
    assert found["journal_lag_bytes"][""] == 300


def test_the_real_journal_has_what_is_told():
    from thinwire.ps.persistence.journal import Journal, JournalPosition

    assert Journal(None, None, 0, JournalPosition(3, 77)).bytes_since_snapshot == 77


def test_the_summary_says_how_often_workers_were_started_again():
    shard = Shard("asgd")
    shard.say(id=HONEST)
    assert "restarted_workers" not in shard.board.status().policies
    report = WorkerMetrics(id=HONEST, restarts=2).to_json()
    shard.server.reports[(pb.ROLE_WORKER, HONEST)] = report
    assert summarise(shard.board.status(), [])["restarted_workers"] == {str(HONEST): 2}


def test_every_name_is_legal_and_explained():
    for instrument in instruments_of(Shard("asgd"))[0].collect():
        assert instrument.text.endswith(".") and instrument.name.replace("_", "").isalpha()
        assert not instrument.name.endswith("_total")
