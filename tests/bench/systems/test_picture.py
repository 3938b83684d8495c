"""The README's picture shows the values of EXPERIMENTS.md."""

import re

from bench.systems import picture


def test_bytes_and_accuracies_are_the_table_s():
    arms, alone = picture.read(picture.TABLE.read_text())
    assert list(arms) and set(arms) == set(picture.ARMS)
    dense = 2 * 4 * picture.PARAMETERS * picture.UPDATES / 1e9
    assert abs(arms["asgd"].gigabytes - dense) < 0.1
    assert 34 < arms["asgd"].gigabytes / arms["dgs"].gigabytes < 36
    assert arms["asgd"].accuracy < arms["dgs"].accuracy < alone


def test_it_is_drawn_from_the_same_numbers(tmp_path):
    target = tmp_path / "picture.svg"
    arms, alone = picture.read(picture.TABLE.read_text())
    picture.draw(arms, alone, target)
    texts = [re.findall(r"<!-- (.*?) -->", path.read_text()) for path in (target, picture.PICTURE)]
    assert texts[0] == texts[1]
    assert any("1.3 GB, accuracy 91.0 %" in text for text in texts[0])
