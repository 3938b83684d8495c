"""The picture of the peers shows what the records in bench/results say."""

import re

import pytest

from bench import machine
from bench.peers import picture
from bench.peers.__main__ import read_records
from tests.bench.test_peers_report import record


def texts(path):
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def test_bars_go_from_quick_to_slow_and_say_what_is_computed(tmp_path):
    records = [
        record("torch DDP"),
        record("torch DDP", "100", 128.0, reached=0),
        record("thinwire dgs"),
        record("thinwire dgs", "100", reached=45.0),
        record("MXNet dist_sync", "100", reached=0),
    ]
    found = picture.bars(records)
    # 800 steps at two a second.
    assert [(bar.name, bar.text) for bar in found] == [
        ("thinwire dgs", "45 s"),
        ("torch DDP", "400 s (computed)"),
    ]
    assert [bar.is_ours for bar in found] == [True, False]
    target = tmp_path / "peers.svg"
    picture.draw(found, target)
    assert {"thinwire dgs", "45 s", "400 s (computed)"} <= set(texts(target))


def test_the_one_in_the_readme_is_of_the_newest_records(tmp_path):
    target = tmp_path / "peers.svg"
    picture.draw(picture.bars(read_records(picture.newest_records())), target)
    assert texts(target) == texts(picture.PICTURE)


def test_without_records_it_says_how_to_make_them(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match="run python -m bench.peers"):
        picture.newest_records()
