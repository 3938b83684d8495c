"""A worker's counts of sent datagrams: over shards, over incarnations, and as scalars."""

import dataclasses
import json
import types

import numpy as np
import pytest

from tests.thinwire.runtime.telemetry.test_tensorboard import read
from thinwire.ops.routing.base import Routed, UnreliableBlocks, ValueEncoding
from thinwire.ops.routing.counters import SentCounts
from thinwire.proto.udp.sender import ChannelCounts
from thinwire.runtime.persistence.documents import from_dict, to_dict
from thinwire.runtime.telemetry.run_status import WorkerMetrics
from thinwire.worker.client.datagrams import totals_of
from thinwire.worker.telemetry.tensorboard import WorkerScalars


def channel(*channels, fell_back=False):
    return types.SimpleNamespace(counts=lambda: channels, fell_back=fell_back)


def part(channels, **counts):
    values = np.zeros(1, np.float32)
    blocks = np.arange(len(channels))
    unreliable = UnreliableBlocks(
        0,
        1,
        1,
        blocks,
        np.array(channels, np.uint8),
        ValueEncoding.FLOAT32,
        None,
        values,
        values,
        values,
    )
    return Routed((), (unreliable,) if channels else (), **counts)


TWO_CHANNELS = [
    channel(ChannelCounts(3, 300, outdated=1), ChannelCounts(5, 500, too_large=2)),
    channel(ChannelCounts(1, 100), ChannelCounts(0, 0, refused=4), fell_back=True),
]
ROUTED = [
    part([1, 1, 2], k=0.5, num_reliable=4, num_skipped=1, num_dropped=2, num_nonfinite=1),
    part([], k=0.5, num_reliable=2),
]


def test_counts_are_over_all_shards_and_exchanges():
    totals = totals_of(1, TWO_CHANNELS, 2, lambda: 5000, False)
    totals.record(ROUTED)
    totals.record([dataclasses.replace(each, k=0.3) for each in ROUTED])
    counts = totals.counts()
    assert counts.sum_k == pytest.approx(0.8)
    assert dataclasses.replace(counts, sum_k=0.0) == SentCounts(
        2,
        0.0,
        [12, 4, 2],
        2,
        4,
        2,
        [0, 4, 5],
        [4100, 400, 500],
        {"outdated": 1, "refused": 4, "too_large": 2},
        1,
    )
    assert from_dict(SentCounts, json.loads(json.dumps(to_dict(counts)))) == counts


def test_earlier_lives_add_but_a_way_back_is_today_s():
    before = SentCounts(7, 3.5, fallen_back=2, unsent={"outdated": 1})
    now = SentCounts(1, 0.5, fallen_back=0)
    assert now.after(before) == SentCounts(8, 4.0, unsent={"outdated": 1})
    assert now.after(None) == now


def test_without_channels_nothing_is_counted():
    assert totals_of(1, [None, None], 0, lambda: 1, False) is None


def test_a_sender_without_datagrams_has_its_stream():
    counts = totals_of(1, [None], 3, lambda: 77, False).counts()
    assert counts.num_bytes == [77] and counts.fallen_back == 0


def test_a_line_says_what_is_new(caplog):
    sent = iter([5000, 6500])
    totals = totals_of(4, TWO_CHANNELS, 2, lambda: next(sent), True)
    with caplog.at_level("INFO", logger="absl"):
        for step in (1, 2):
            totals.record(ROUTED)
            totals.log(step)
    assert caplog.messages == [
        "worker 4, step 1: reliable fraction 0.500; blocks by channel (0 is reliable): 6 / 2 / 1; "
        "1 blocks of zeros skipped, 2 dropped, 1 not finite; bytes by channel: 4100 / 400 / 500",
        "worker 4, step 2: reliable fraction 0.500; blocks by channel (0 is reliable): 6 / 2 / 1; "
        "1 blocks of zeros skipped, 2 dropped, 1 not finite; bytes by channel: 1500 / 0 / 0",
    ]


def test_scalars_have_the_newest_k_and_all_bytes(tmp_path):
    now = [0.0]
    scalars = WorkerScalars(tmp_path, lambda: now[0])
    for pushes, sum_k in ((4, 2.0), (6, 2.4), (6, 2.4)):
        now[0] += 5.0
        counts = SentCounts(pushes, sum_k, num_bytes=[1000 * pushes, 10 * pushes])
        scalars.record(WorkerMetrics(id=1, datagrams=counts), 0.5, num_steps=1, version=pushes)
    seen = read(tmp_path)
    assert seen["dgt/k"] == [(4, 0.5), (6, pytest.approx(0.2))]
    assert [value for _, value in seen["dgt/bytes_channel_0"]] == [4000.0, 6000.0, 6000.0]
    assert seen["dgt/bytes_channel_1"][0] == (4, 40.0)
