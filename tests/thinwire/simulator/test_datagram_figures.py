"""A simulated run's datagram figures: summary, workers' reports, lines of --dgt_info."""

import json
import re

import pytest

from tests.thinwire.simulator.toy import played, simulated
from thinwire.ops.routing.base import Transport
from thinwire.ops.types import Link
from thinwire.proto.emulation.priority_link import HEADER_BYTES
from thinwire.runtime.telemetry import run_status
from thinwire.simulator.records import SimulationRecords

LOSSY = Link(1.0, 10, 0.2)
UPDATES = 30


def dgt(link=LOSSY, play=played, **settings):
    choices = {"dgt_block_size": 8, "dgt_k": 0.4} | settings.pop("choices", {})
    usual = {"steps": "0.1,0.3", "links": (link,), "nb_ps": 2, "iter_max": UPDATES}
    return play("dgt", 2, choices=choices, **(usual | settings))


def status_of(simulation):
    return SimulationRecords(simulation._run, None, None, simulation)._status("iter_max")


def block_of(simulation):
    status = status_of(simulation)
    again = run_status.RunStatus.from_json(status.to_json())  # as supervisors and files have it
    return run_status.summarise(again, [])["dgt"]


@pytest.fixture(scope="module")
def block():
    return block_of(dgt(choices={"dgt_wait_ms": 100.0}))


def test_every_push_of_every_shard_counts(block):
    assert block["pushes"] == 2 * 2 * UPDATES
    assert block["k"] == pytest.approx(0.4)
    assert 0.5 < block["fresh"] <= block["fill"] < 1
    assert [row["id"] for row in block["workers"]] == [1, 2]
    assert sum(row["pushes"] for row in block["workers"]) == block["pushes"]
    weighted = sum(row["pushes"] * row["fresh"] for row in block["workers"])
    assert weighted / block["pushes"] == pytest.approx(block["fresh"])


def test_what_was_sent_is_announced_and_then_arrives_or_is_lost(block):
    for row in block["channels"][1:]:
        assert row["datagrams_sent"] == row["announced"] > 0
        assert row["announced"] == row["arrived"] + row["late"] + row["lost"]
        assert row["datagrams_received"] == row["arrived"] + row["late"]
        assert row["bytes_sent"] > row["bytes_received"] > 0
    assert 0.1 < block["lost"] / block["announced"] < 0.3
    for name in ("announced", "arrived", "late", "lost"):
        assert block[name] == sum(row[name] for row in block["channels"][1:])
        assert block[name] == sum(row[name] for row in block["workers"])


def test_blocks_are_those_of_the_router(block):
    blocks, by_channel = block["blocks"], [row["blocks"] for row in block["channels"]]
    assert by_channel[0] == blocks["reliable"]
    assert sum(by_channel) + blocks["skipped"] + blocks["dropped"] == blocks["all"]
    assert blocks["all"] % (2 * UPDATES) == 0  # the same in every push of a worker


def test_bytes_up_are_those_of_all_channels():
    simulation = dgt()
    status = status_of(simulation)
    channels = run_status.summarise(status, [])["dgt"]["channels"]
    assert status.bytes_up == sum(row["bytes_sent"] for row in channels)
    wire = sum(row["bytes_sent"] for row in channels[1:])
    sent = simulation.workers[0]._exchange.channels
    payload = sum(channel.counts()[0].datagrams for channel in sent)
    assert wire > HEADER_BYTES * sum(row["datagrams_sent"] for row in channels[1:]) > payload > 0


def test_late_ones_have_an_age():
    block = block_of(dgt(Link(1.0, 10, reorder=0.5), choices={"dgt_k": 0.0}))
    assert block["late"] > 0 and block["lateness"] >= 1
    assert block["late_used"] <= block["late"]
    assert block["fill"] >= block["fresh"]


def test_who_fell_back_is_named_and_drops_have_a_reason():
    deaf = Transport(dgt_drop_rate=0.999, dgt_fallback_steps=5)
    block = block_of(dgt(transport=deaf, choices={"dgt_k": 0.0}))
    assert block["fallen_back"] == [1, 2]
    assert all(row["fallen_back"] for row in block["workers"])
    assert block["dropped"]["on purpose"] > 0


def test_sessions_that_have_ended_count_too():
    simulation = dgt(
        Link(0.05, 30),
        simulated,
        failures="2@8.35-9",
        lease_seconds=2.0,
        steps="0.5,0.7",
        iter_max=25,
        choices={"dgt_wait_ms": 200.0},
    )
    assert simulation.play(lambda now: None, lambda: simulation.clock.now > 300) == "iter_max"
    found = [shard.datagrams.receiver.counters() for shard in simulation.shards]
    assert any(worker == 2 and not counters.num_closed for worker, counters in found[0]) is False
    assert block_of(simulation)["pushes"] == sum(
        counters.num_closed for each in found for _, counters in each
    )


def test_other_routers_have_no_block():
    simulation = played("bsp", 2, iter_max=5)
    assert "dgt" not in status_of(simulation).policies
    report = json.loads(simulation.workers[0].report())
    assert report["datagrams"] is None


@pytest.mark.parametrize("asked", [True, False])
def test_info_is_a_line_for_each_step(caplog, asked):
    with caplog.at_level("INFO", logger="absl"):
        dgt(nb_ps=1, iter_max=5, transport=Transport(dgt_info=asked))
    sent = [
        line
        for line in caplog.messages
        if re.match(r"worker \d, step \d+: reliable fraction 0\.4", line)
    ]
    closed = [
        line
        for line in caplog.messages
        if re.match(r"worker \d, step \d+: .* datagrams in time", line)
    ]
    assert len(closed) == 2 * 5 * asked
    assert len(closed) - 2 <= len(sent) <= len(closed)  # the last replies may not arrive


def test_a_dropping_sender_says_so(caplog):
    with caplog.at_level("INFO", logger="absl"):
        simulation = dgt(choices={"dgt_send_drop": True}, transport=Transport(dgt_info=True))
    block, counts = block_of(simulation), simulation.workers[0]._exchange.datagrams
    assert block["announced"] == block["lost"] == 0 < block["blocks"]["dropped"]
    assert 0.4 < block["fresh"] == block["fill"] < 0.9
    assert counts.num_bytes[0] == simulation.workers[0]._exchange.bytes_up
    assert any(f"{counts.dropped // counts.pushes} dropped" in line for line in caplog.messages)
