"""Datagram counters of shards: sums over sessions, shards and workers, and their block."""

import dataclasses
import json

import pytest

from tests.ps.port import LocalPort
from thinwire.ops.routing.counters import ReassemblyCounters, SentCounts
from thinwire.ops.routing.reassembler import ReassembledStep
from thinwire.ps.core import events
from thinwire.ps.datagrams.counters import DatagramCounts, log_step, summary_block

#: Two channels in addition to the stream.
COUNTERS = dataclasses.replace(
    ReassemblyCounters.zero(2),
    num_announced=[0, 10, 20],
    num_arrived=[0, 9, 12],
    num_late=[0, 0, 5],
    num_datagrams=[0, 9, 18],
    num_bytes=[0, 900, 1800],
    num_closed=4,
    num_incomplete=2,
    num_late_used=4,
    sum_of_ages=6,
    blocks=80,
    blocks_skipped=4,
    blocks_reliable=40,
    sum_k=2.0,
    sum_fresh=3.0,
    sum_fill=3.6,
)
COUNTERS.dropped["duplicate"] = 3
OTHER = dataclasses.replace(
    ReassemblyCounters.zero(2), num_closed=1, sum_k=1.0, sum_fresh=1.0, sum_fill=1.0
)
SENT = SentCounts(5, 2.5, [40, 10, 26], 4, 0, 1, [0, 10, 21], [7000, 1300, 2600], {"outdated": 2})


def test_sessions_of_one_worker_are_one():
    found = DatagramCounts.of_sessions(
        [(2, COUNTERS), (1, OTHER), (2, OTHER)], {"unknown session": 5, "truncated": 0}
    )
    assert list(found.workers) == [1, 2]
    assert found.workers[2].num_closed == 5
    assert found.workers[2].dropped == {"duplicate": 3}
    assert found.dropped == {"unknown session": 5}
    assert found.total().num_closed == 6
    assert (
        COUNTERS.num_closed == 4 and COUNTERS.dropped["short"] == 0
    )  # nothing of it was written to


def test_what_was_received_travels_and_is_kept():
    found = DatagramCounts.of_sessions([(2, COUNTERS), (1, OTHER)], {"truncated": 1})
    assert DatagramCounts.from_dict(json.loads(found.to_json())) == found
    assert found.with_dropped("truncated", 2).dropped == {"truncated": 3}
    assert found.with_dropped("kept out", 0) == found


def test_a_shard_that_comes_back_goes_on_counting():
    before = one_push().port.counts()
    assert before.workers[1].num_closed == 1 and before.dropped == {"unknown session": 1}
    saved = json.loads(before.to_json())
    again = one_push(DatagramCounts.from_dict(saved)).port.counts()
    assert again.workers[1] == before.workers[1].plus(before.workers[1])
    assert again.dropped == {"unknown session": 2}


def one_push(before=None):
    """Return a port of one worker that has pushed, after a stranger's datagram."""
    port = LocalPort(nb_workers=1)
    if before is not None:
        port.receiver.restore(before)
    worker = port.join(1)
    outgoing = worker.begin()
    data, size = worker.datagrams(outgoing)[0]
    foreign = bytearray(data[:size])
    foreign[8] ^= 1  # the first byte of the session's number
    assert port.receiver.receive(memoryview(foreign), size) == 0
    worker.push(outgoing)
    return port


def test_a_crowd_is_told_in_one():
    crowd = DatagramCounts({number: OTHER for number in range(1, 1001)}, {"truncated": 1})
    told = crowd.summarized()
    assert len(told.to_json()) < 1000
    assert told.total() == crowd.total() and told.dropped == crowd.dropped
    several = DatagramCounts({number: COUNTERS for number in range(1, 201)})
    assert several.summarized() is several
    assert len(several.to_json()) < 256 << 10  # as long as a report is allowed to be


def test_the_block_means_over_all_pushes_and_shards():
    shards = [
        DatagramCounts({1: COUNTERS, 2: OTHER}, {"truncated": 1}),
        DatagramCounts({1: OTHER}, {}),
    ]
    found = summary_block(shards, {1: SENT, 2: SentCounts(fallen_back=1)}, 2)
    assert (found["pushes"], found["k"]) == (6, pytest.approx(4 / 6))
    assert found["fresh"] == pytest.approx(5 / 6)
    assert found["fill"] == pytest.approx(5.6 / 6)
    assert found["lateness"] == 1.5
    losses = {name: found[name] for name in ("announced", "arrived", "late", "lost")}
    assert losses == {"announced": 30, "arrived": 21, "late": 5, "lost": 4}
    assert found["blocks"] == {
        "all": 80,
        "reliable": 40,
        "skipped": 4,
        "dropped": 0,
        "non_finite": 1,
    }
    assert found["dropped"] == {"duplicate": 3, "truncated": 1}
    assert found["unsent"] == {"outdated": 2}
    assert found["fallen_back"] == [2]
    assert json.loads(json.dumps(found)) == found


def test_the_block_has_a_row_for_each_channel_and_worker():
    found = summary_block([DatagramCounts({1: COUNTERS}), DatagramCounts({0: OTHER})], {1: SENT}, 2)
    stream, first, second = found["channels"]
    assert stream == {"channel": 0, "blocks": 40, "bytes_sent": 7000}
    assert first["lost"] == 1
    assert second == {
        "channel": 2,
        "blocks": 26,
        "bytes_sent": 2600,
        "datagrams_sent": 21,
        "datagrams_received": 18,
        "bytes_received": 1800,
        "announced": 20,
        "arrived": 12,
        "late": 5,
        "lost": 3,
    }
    (row,) = found["workers"]  # counts without a worker are only in the totals
    assert (row["id"], row["pushes"], row["fresh"], row["lost"]) == (1, 4, 0.75, 4)
    assert row["datagrams_sent"] == 31 and row["fallen_back"] is False
    assert found["pushes"] == 5


def test_the_block_before_anything_is_known():
    found = summary_block([DatagramCounts()], {}, 3)
    assert len(found["channels"]) == 4
    assert found["fresh"] is None and found["lateness"] is None
    assert found["pushes"] == found["lost"] == 0
    assert found["workers"] == found["fallen_back"] == []


def test_more_late_than_announced_is_no_gain():
    """A worker may send any counters."""
    liar = dataclasses.replace(ReassemblyCounters.zero(1), num_announced=[0, 1], num_late=[0, 7])
    assert summary_block([DatagramCounts({1: liar})], {}, 1)["lost"] == 0


def test_a_closed_step_is_a_line(caplog):
    assembled = ReassembledStep(7, (), None, 0.9, 0.95, 1.5, 2, 10, 8, None)
    with caplog.at_level("INFO", logger="absl"):
        log_step(3, assembled, COUNTERS)
    assert caplog.messages == [
        "worker 3, step 7: fraction of blocks in time 0.900, with late blocks 0.950; 8 of 10 "
        "datagrams in time, 2 late datagrams used (1.50 steps late); "
        "datagrams dropped so far: duplicate 3"
    ]


def test_any_number_of_lives_leaves_one_book_of_a_worker():
    port = LocalPort(nb_workers=1)
    worker = port.join(1)
    worker.send(worker.begin())
    once = sum(port.counters(1)[0].num_datagrams)
    for life in range(2000, 2050):
        port.queue.append(events.WorkerDisconnected(1, worker.incarnation))
        port.turn()
        worker = port.join(1, life)
        worker.send(worker.begin())
    assert len(port.receiver.counters()) == 2  # the sum of closed sessions, and the open one
    assert sum(sum(each.num_datagrams) for each in port.counters(1)) == 51 * once
