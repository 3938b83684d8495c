"""Placement by speed covers every entry once, in order, with the best possible cuts."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.virtual.run import MiniRun
from tests.virtual.toy import method
from thinwire.ops.sharding import placement
from thinwire.ops.sharding import split as sharding_split
from thinwire.ops.sharding.placement import ByHash, BySpeed
from thinwire.ops.sharding.split import place_tensors
from thinwire.ops.types import ConfigurationError, ModelSpec, TensorSpec

LIMIT = 20
falling = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0, 4.0]), min_size=1, max_size=4).map(
    lambda speeds: tuple(sorted(speeds, reverse=True))
)
sizes_of_tensors = st.lists(st.integers(1, 60), min_size=1, max_size=7)


@pytest.fixture(autouse=True)
def low_limit(monkeypatch):
    for module in (sharding_split, placement):
        monkeypatch.setattr(module, "MAX_SLICE_ENTRIES", LIMIT)


def model(sizes):
    return ModelSpec(tuple(TensorSpec(f"t{number}", (size,)) for number, size in enumerate(sizes)))


def points_of(sizes):
    """Every entry of a tensor above the limit may begin a block (a sixteenth of 20 is 1)."""
    points = {0}
    for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        points |= set(range(start, start + size)) if size > LIMIT else {start}
    return sorted(points | {sum(sizes)})


@given(sizes_of_tensors, falling)
@settings(max_examples=200)
def test_blocks_hold_every_entry_once_and_in_order(sizes, speeds):
    spec = model(sizes)
    if len(points_of(sizes)) - 1 < len(speeds):
        with pytest.raises(ConfigurationError, match=f"--nb_ps={len(speeds)}.*pieces"):
            BySpeed(speeds).place(spec, len(speeds))
        return
    layouts = BySpeed(speeds).place(spec, len(speeds))
    assert layouts == BySpeed(speeds).place(spec, len(speeds))
    walked = [
        (s.tensor, entry)
        for layout in layouts
        for s in layout.slices
        for entry in range(s.start, s.stop)
    ]
    assert walked == [(t, entry) for t, size in enumerate(sizes) for entry in range(size)]
    assert all(layout.slices for layout in layouts)
    for layout in layouts:  # a shard holds one slice of a tensor at most
        assert len({piece.tensor for piece in layout.slices}) == len(layout.slices)
    cut = {
        piece.tensor
        for layout in layouts
        for piece in layout.slices
        if piece.size < sizes[piece.tensor]
    }
    assert all(sizes[tensor] > LIMIT for tensor in cut)


def worst(edges, speeds):
    return max(
        (b - a) / speed for (a, b), speed in zip(itertools.pairwise(edges), speeds, strict=True)
    )


def squares(edges, speeds):
    return sum(
        (b - a) ** 2 / speed
        for (a, b), speed in zip(itertools.pairwise(edges), speeds, strict=True)
    )


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), falling)
@settings(max_examples=300)
def test_no_cut_is_better(sizes, speeds):
    points = list(itertools.accumulate(sizes, initial=0))
    if len(sizes) < len(speeds):
        return
    every = [
        (0, *(points[at] for at in inner), points[-1])
        for inner in itertools.combinations(range(1, len(sizes)), len(speeds) - 1)
    ]
    edges = [points[at] for at in placement.best_cuts(points, speeds)]
    least = min(worst(each, speeds) for each in every)
    assert worst(edges, speeds) == least
    ties = [squares(each, speeds) for each in every if worst(each, speeds) == least]
    assert squares(edges, speeds) == pytest.approx(min(ties))


def test_sizes_follow_speeds_and_the_first_shard_is_nearest_the_input():
    layouts = BySpeed((4.0, 2.0, 1.0)).place(model([40, 30, 70]), 3)
    assert [layout.size for layout in layouts] == [80, 40, 20]
    assert [layout.slices[0].tensor for layout in layouts] == [0, 2, 2]
    assert [layout.size for layout in BySpeed().place(model([70, 70]), 2)] == [70, 70]


def test_a_tensor_up_to_the_limit_stays_whole():
    assert [each.size for each in BySpeed((3.0, 1.0)).place(model([LIMIT, 4]), 2)] == [LIMIT, 4]
    with pytest.raises(ConfigurationError, match="--nb_ps=2: .*only 1 pieces"):
        BySpeed().place(model([LIMIT]), 2)


def test_a_large_model_on_many_shards_is_placed_at_once(monkeypatch):
    monkeypatch.undo()
    layouts = BySpeed().place(model([38_000_000, 10, 16_000_000, 4_000_000]), 16)
    sizes = [layout.size for layout in layouts]
    assert sum(sizes) == 58_000_010
    assert max(sizes) <= 58_000_010 * (1 / 16 + 1 / 512) + 10


@pytest.mark.parametrize(
    ("speeds", "words"),
    [
        ((1.0, 2.0), "--ps_speeds=1,2: "),
        ((1.0, 0.0), "finite numbers above 0"),
        ((float("nan"),), "finite numbers above 0"),
        ((float("inf"), 1.0), "finite numbers above 0"),
    ],
)
def test_speeds_that_are_none(speeds, words):
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        BySpeed(speeds)


def test_one_speed_a_shard():
    with pytest.raises(ConfigurationError, match="has 2 values for 3 PS shards"):
        BySpeed((2.0, 1.0)).place(model([9, 9, 9]), 3)


def test_hash_is_as_ever():
    spec = model([40, 5, 9])
    assert ByHash().place(spec, 2) == place_tensors(spec, 2)


def test_nodes_of_another_placement_are_told_apart():
    rows = [
        dict(method(placement=name, ps_speeds=speeds).fingerprint())
        for name, speeds in [("hash", ()), ("speed", ()), ("speed", (2.0, 1.0))]
    ]
    assert [row["placement"] for row in rows] == ["hash", "speed", "speed"]
    assert [row.get("placement.ps_speeds") for row in rows] == [None, "()", "(2.0, 1.0)"]


def test_speeds_without_placement_by_speed_are_refused():
    with pytest.raises(ConfigurationError, match="--ps_speeds is for --placement=speed"):
        method(ps_speeds=(2.0, 1.0))


def test_one_worker_trains_to_the_same_bits_wherever_tensors_lie():
    """SGD works entry by entry, and the codec has seen whole tensors."""
    runs = [
        MiniRun(
            method("adacomp", nb_workers=1, compression_rate=0.3, placement=name, ps_speeds=speeds),
            nb_ps=nb_ps,
            iter_max=40,
        ).run()
        for nb_ps, name, speeds in [
            (1, "hash", ()),
            (2, "hash", ()),
            (3, "hash", ()),
            (1, "speed", ()),
            (2, "speed", (3.0, 1.0)),
            (3, "speed", ()),
            (3, "speed", (4, 2, 1)),
        ]
    ]
    for run in runs:
        assert not run.deadlocked()
        np.testing.assert_array_equal(run.theta, runs[0].theta)
    assert {run.layouts for run in runs[1:3]} != {run.layouts for run in runs[4:6]}


def test_a_shard_is_described():
    spec = model([40, 30, 70])
    first, second = BySpeed((3.0, 1.0)).place(spec, 2)
    assert placement.describe_shard(spec, first) == (
        "3 of 3 tensors, 105 entries (75.0 %), t0 .. t2[0:35]"
    )
    assert placement.describe_shard(spec, second) == (
        "1 of 3 tensors, 35 entries (25.0 %), t2[35:70]"
    )
