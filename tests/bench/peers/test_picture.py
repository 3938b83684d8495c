"""The peers' picture shows the values of the records in bench/results."""

import re

import pytest

from bench import origin
from bench.peers import picture, work
from bench.peers.__main__ import read_records
from bench.peers.subjects import SUBJECTS
from tests.bench.peers.test_report import record

CNN, DECODER = SUBJECTS[work.MNIST_CNN], SUBJECTS[work.DECODER]


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
    found = picture.bars(CNN, records, "100")
    # 800 steps at two a second.
    assert [(bar.name, bar.text) for bar in found] == [
        ("thinwire dgs", "45 s"),
        ("torch DDP", "400 s (computed)"),
    ]
    assert [bar.is_ours for bar in found] == [True, False]
    target = tmp_path / "peers.svg"
    picture.draw(CNN, records, target)
    assert {"thinwire dgs", "45 s", "400 s (computed)"} <= set(texts(target))


def test_the_one_in_the_readme_is_of_the_newest_records(tmp_path):
    target = tmp_path / "peers.svg"
    picture.draw(CNN, read_records(picture.newest_records(CNN)), target)
    assert texts(target) == texts(picture.IMAGES / "peers.svg")


def test_a_decoder_has_bars_for_each_link(tmp_path):
    scores = (-2.9, -2.3)
    records = [
        record(name, link, reached=seconds, scores=scores)
        for name, link, seconds in (
            ("thinwire diloco", "10", 31.0),
            ("torchft DiLoCo", "10", 47.0),
            ("thinwire diloco", "1", 53.0),
        )
    ]
    target = tmp_path / "peers.svg"
    picture.draw(DECODER, records, target)
    found = texts(target)
    assert {"31 s", "47 s", "53 s", "torchft DiLoCo"} <= set(found)
    captions = [text for text in found if text.startswith("seconds to a loss")]
    assert [text.rpartition(" over ")[2] for text in captions] == ["10 Mbit/s", "1 Mbit/s"]


def test_without_records_it_says_how_to_make_them(tmp_path, monkeypatch):
    monkeypatch.setattr(origin, "RESULTS", tmp_path)
    with pytest.raises(FileNotFoundError, match="run python -m bench.peers"):
        picture.newest_records(CNN)
    with pytest.raises(FileNotFoundError, match="--model decoder"):
        picture.newest_records(DECODER)
