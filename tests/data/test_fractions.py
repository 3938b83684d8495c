"""Fractions files: each worker's range of the stored order, checked line by line."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.data.fractions import ranges, read_fractions
from thinwire.ops.types import ConfigurationError


@settings(max_examples=100, deadline=None)
@given(
    shares=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    total=st.integers(700, 100_000),
    digits=st.integers(7, 16),
    data=st.data(),
)
def test_neighbours_meet(shares: list[int], total: int, digits: int, data: st.DataObject) -> None:
    cuts = [sum(shares[:place]) / sum(shares) for place in range(len(shares) + 1)]
    cuts = [round(cut, digits) for cut in cuts]
    lines = data.draw(st.permutations(list(itertools.pairwise(cuts))))
    runs = ranges(total, len(lines), lines)
    assert sorted(itertools.chain.from_iterable(runs)) == list(range(total))
    for (start, end), run in zip(lines, runs, strict=True):
        assert abs(len(run) - (end - start) * total) <= 1


def test_thirds_of_six_digits_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "thirds"
    path.write_text("0 0.333333\n0.333334 0.666667\n0.666667 1\n")
    runs = ranges(3_000_000, 3, read_fractions(path, 3))
    assert [run.start for run in runs[1:]] == [run.stop for run in runs[:-1]]
    assert (runs[0].start, runs[-1].stop) == (0, 3_000_000)


def test_lines_are_in_order_of_id(tmp_path: Path) -> None:
    path = tmp_path / "fractions.txt"
    path.write_text("# worker 1, then 2\n0.3 1\n\n0 0.3  # the slow one\n")
    assert read_fractions(path, 2) == ((0.3, 1.0), (0.0, 0.3))
    assert ranges(10, 2, read_fractions(path, 2)) == [range(3, 10), range(0, 3)]


def test_the_original_example(tmp_path: Path) -> None:
    path = tmp_path / "shares"
    path.write_text("0 0.3\n0.3 1\n")
    assert ranges(60_000, 2, read_fractions(path, 2)) == [range(18_000), range(18_000, 60_000)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0 0.5\n0.4 1\n", "overlap between 0.4 and 0.5 (lines 1 and 2)"),
        ("0.4 1\n# all\n0 0.5\n", "overlap between 0.4 and 0.5 (lines 3 and 1)"),
        ("0 0.5\n0.4 1\n", "Let line 2 start at 0.5"),
        ("0 1\n0.2 0.4\n", "overlap between 0.2 and 1 (lines 1 and 2)"),
        ("0 1\n0 1\n", "overlap between 0 and 1"),
        ("0 0.5\n0.6 1\n", "gap between 0.5 and 0.6 (lines 1 and 2)"),
        ("0.1 0.5\n0.5 1\n", "gap between 0 and 0.1 (line 1)"),
        ("0 0.5\n0.5 0.9\n", "gap between 0.9 and 1 (line 2)"),
        ("0 0.5\n0.5 1.5\n", "line 2"),
        ("-0.5 0.5\n0.5 1\n", "line 1"),
        ("0.5 0\n0.5 1\n", "line 1"),
        ("0 0.5\n0.5 0.5\n", "line 2"),
        ("0 0.5\n\nnan 1\n", "line 3"),
        ("0 half\n0.5 1\n", "line 1 reads '0 half'"),
        ("0 0.5 0.7\n0.7 1\n", "two numbers"),
        ("0 1\n", "1 lines"),
        ("0 0.5\n0.5 0.8\n0.8 1\n", "3 lines"),
        ("", "0 lines"),
    ],
)
def test_bad_files_are_refused_by_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "fractions.txt"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="fractions.txt") as caught:
        read_fractions(path, 2)
    assert expected in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="absent"):
        read_fractions(tmp_path / "absent", 2)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="binary"):
        read_fractions(tmp_path / "binary", 2)


def test_fractions_of_all_workers_are_needed() -> None:
    with pytest.raises(ConfigurationError, match="--data_sharding_file"):
        ranges(9, 2, None)
    with pytest.raises(ConfigurationError, match="2 workers, but has 1"):
        ranges(9, 2, [(0, 1)])


def test_a_fraction_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="worker 1"):
        ranges(9, 2, [(0, 0.01), (0.01, 1)])
