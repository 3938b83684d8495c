"""Clients learn the new addresses of shards that have moved."""

import pytest

from thinwire.proto import moved
from thinwire.proto.grpc import ClientStream
from thinwire.proto.moved import (
    MOVED_VARIABLE,
    ShardDirectory,
    moved_lines,
    note_announced,
    present_address,
)


@pytest.fixture(autouse=True)
def nothing_announced(monkeypatch):
    monkeypatch.setattr(moved, "_announced", {})


def test_every_attempt_goes_where_the_shard_is_now(monkeypatch, tmp_path):
    former, now = "10.0.0.1:2223", "[fd00::2]:40001"
    assert present_address(former) == former
    monkeypatch.setenv(MOVED_VARIABLE, str(tmp_path / "moved"))
    assert present_address(former) == former, "nothing has moved yet"
    (tmp_path / "moved").write_text(moved_lines({former: "10.0.0.2:5", "10.0.0.3:1": now}))
    assert present_address(former) == ClientStream(former).address == "10.0.0.2:5"
    assert present_address("10.0.0.3:1") == present_address(now) == now
    (tmp_path / "moved").write_text("no line of ours\n\n")
    assert present_address(former) == former


def test_an_announced_address_and_the_former_one_take_turns_until_one_answers():
    former, now, later = "10.0.0.1:2223", "10.0.0.2:2223", "10.0.0.3:2223"
    note_announced(former, former, former)
    assert present_address(former) == former
    found = []
    for announced in (now, now, now, later):
        note_announced(former, present_address(former), announced)
        found.append(present_address(former))
    assert found == [now, former, now, later]


def test_clients_of_one_process_that_note_the_same_agree():
    for _ in range(2):  # both tried the previous address
        note_announced("d:1", "d:1", "e:2")
    assert present_address("d:1") == "e:2"


def test_an_engine_knows_better(monkeypatch, tmp_path):
    (tmp_path / "moved").write_text(moved_lines({"a:1": "b:2"}))
    monkeypatch.setenv(MOVED_VARIABLE, str(tmp_path / "moved"))
    note_announced("a:1", "a:1", "c:3")
    assert present_address("a:1") == "b:2"


def test_the_newest_generation_of_a_shard_counts():
    directory = ShardDirectory(3)
    assert directory.addresses == ["", ""]
    assert directory.announce(2, 1, "a:1") is None
    assert directory.announce(2, 3, "b:1") is None
    assert "at b:1 as generation 3" in str(directory.announce(2, 1, "a:1"))
    assert directory.announce(2, 0, "b:1") is None, "begun anew in the same place"
    assert directory.addresses == ["", "b:1"]
