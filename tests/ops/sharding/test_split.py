"""Placement and cutting put every entry on exactly one shard and change no value."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.virtual.run import MiniRun
from tests.virtual.toy import method
from thinwire.ops.sharding import split as sharding_split
from thinwire.ops.sharding.split import MAX_SLICE_ENTRIES, place_tensors, split_packet
from thinwire.ops.types import (
    Block,
    CodedValues,
    ConfigurationError,
    Kind,
    ModelSpec,
    Packet,
    TensorSpec,
)

LIMIT = 7
SHARDS = range(1, 6)
shapes = st.lists(
    st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple), min_size=1, max_size=8
)


@pytest.fixture(autouse=True)
def low_limit(monkeypatch):
    monkeypatch.setattr(sharding_split, "MAX_SLICE_ENTRIES", LIMIT)


def model(given_shapes):
    return ModelSpec(
        tuple(TensorSpec(f"t{number}", shape) for number, shape in enumerate(given_shapes))
    )


def pieces_of(spec, shards):
    return sum(shards if tensor.size > LIMIT else 1 for tensor in spec.tensors)


def placed(spec, shards):
    """The layouts, or None where `place` rightly refuses them."""
    if pieces_of(spec, shards) >= shards:
        return place_tensors(spec, shards)
    with pytest.raises(ConfigurationError, match=f"--nb_ps={shards}.*only {pieces_of(spec, 1)}"):
        place_tensors(spec, shards)
    return None


@given(shapes, st.sampled_from(SHARDS))
@settings(max_examples=200)
def test_every_entry_lives_on_exactly_one_shard(given_shapes, shards):
    spec = model(given_shapes)
    layouts = placed(spec, shards)
    if layouts is None:
        return
    homes = np.zeros(spec.num_parameters, int)
    for layout in layouts:
        assert layout.slices, "a shard without work"
        assert list(layout.slices) == sorted(layout.slices, key=lambda s: (s.tensor, s.start))
        for piece in layout.slices:
            start = spec.offsets[piece.tensor]
            assert 0 <= piece.start < piece.stop <= spec.tensors[piece.tensor].size
            homes[start + piece.start : start + piece.stop] += 1
        assert layout.size == layout.offsets[-1] == sum(piece.size for piece in layout.slices)
    assert (homes == 1).all()


@given(shapes, st.sampled_from(SHARDS))
def test_only_large_tensors_are_cut_and_the_shards_are_even(given_shapes, shards):
    spec = model(given_shapes)
    layouts = placed(spec, shards)
    if layouts is None:
        return
    slices = sorted(
        (piece for layout in layouts for piece in layout.slices), key=lambda s: (s.tensor, s.start)
    )
    for number, group in itertools.groupby(slices, key=lambda piece: piece.tensor):
        sizes = [piece.size for piece in group]
        assert len(sizes) == (shards if spec.tensors[number].size > LIMIT else 1)
        assert max(sizes) - min(sizes) <= 1
    loads = [layout.size for layout in layouts]
    # Largest piece first to the least loaded shard: loads differ by at most one piece.
    assert max(loads) - min(loads) <= max(piece.size for piece in slices)
    assert place_tensors(spec, shards) == layouts


def test_a_tensor_is_cut_from_the_first_entry_above_the_limit():
    at, above = model([(LIMIT,), (1,), (1,)]), model([(LIMIT + 1,)])
    assert [len(layout.slices) for layout in place_tensors(at, 3)] == [1, 1, 1]
    assert [layout.size for layout in place_tensors(above, 3)] == [3, 3, 2]


def test_the_limit_is_a_million_entries(monkeypatch):
    monkeypatch.undo()
    assert MAX_SLICE_ENTRIES == 1_000_000
    kernel, bias = model([(1000, 1000), (1000,)]), model([(1000, 1001), (1000,)])
    assert [layout.size for layout in place_tensors(kernel, 2)] == [1_000_000, 1000]
    assert [layout.size for layout in place_tensors(bias, 2)] == [501_500, 500_500]


@st.composite
def packets(draw):
    """A model with one or more tensors, and a packet for it: dense, sparse, empty, absent."""
    spec = model(draw(shapes))
    blocks = []
    for slot, tensor in enumerate(spec.tensors):
        form = draw(st.sampled_from(["dense", "sparse", "absent"]))
        if form == "absent":
            continue
        indices = None
        if form == "sparse":
            chosen = draw(st.sets(st.integers(0, tensor.size - 1)))
            indices = np.array(sorted(chosen), np.int64)
        count = tensor.size if indices is None else len(indices)
        data = draw(
            st.lists(st.integers(-127, 127), min_size=count, max_size=count).map(
                lambda values: np.array(values, np.int8)
            )
        )
        blocks.append(Block(slot, tensor.size, indices, CodedValues("int8", data, 0.25)))
    return spec, Packet(tuple(blocks), Kind.GRADIENT)


def flat(spec, blocks, home):
    """Positions of the blocks' values in the model; `home`: block -> (tensor, first entry)."""
    whole = np.full(spec.num_parameters, np.nan)
    for block in blocks:
        tensor, first = home(block)
        start = spec.offsets[tensor] + first
        where = np.arange(block.size) if block.indices is None else block.indices
        assert (np.diff(where) > 0).all() and ((where >= 0) & (where < block.size)).all()
        assert np.isnan(whole[start + where]).all(), "sent twice"
        whole[start + where] = block.values.data * block.values.scale
    return whole


@given(packets(), st.sampled_from(SHARDS))
def test_split_loses_nothing_and_doubles_nothing(case, shards):
    spec, packet = case
    layouts = placed(spec, shards)
    if layouts is None:
        return
    parts = split_packet(packet, layouts)
    assert len(parts) == shards
    before = flat(spec, packet.blocks, lambda block: (block.slot, 0))
    after = np.full(spec.num_parameters, np.nan)
    for layout, blocks in zip(layouts, parts, strict=True):
        slots = [block.slot for block in blocks]
        assert slots == sorted(set(slots))
        for block in blocks:
            piece = layout.slices[block.slot]
            assert block.size == piece.size
            assert block.values.dtype == "int8" and block.values.scale == 0.25
        own = flat(spec, blocks, lambda b, s=layout.slices: (s[b.slot].tensor, s[b.slot].start))
        assert np.isnan(after[~np.isnan(own)]).all(), "sent to two shards"
        after = np.where(np.isnan(own), after, own)
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        *(("adacomp", {}), ("asgd", {}), ("gsp", {})),
        ("asgd", {"powersgd_rank": 1, "overrides": {"codec": "powersgd"}}),
    ],
)
def test_cut_tensors_give_one_worker_the_same_run(name, choices):
    """Tensors of 16 and 8 entries are cut over 2 and 3 shards; selection saw them whole."""
    runs = []
    for nb_ps in (1, 2, 3):
        chosen = method(name, nb_workers=1, compression_rate=0.2, **choices)
        runs.append(MiniRun(chosen, iter_max=40, nb_ps=nb_ps).run())
    cut = [sum(piece.size < 8 for layout in run.layouts for piece in layout.slices) for run in runs]
    assert cut == [1, 3, 7]
    for run in runs[1:]:
        np.testing.assert_array_equal(run.theta, runs[0].theta)
        assert [core.version for core in run.shards] == [40] * run.nb_ps


def test_variables_without_entries_are_placed_and_make_no_shard():
    spec = model([(2, 3), (0, 4), (5,), (0,)])
    layouts = place_tensors(spec, 2)
    assert sorted(piece.tensor for layout in layouts for piece in layout.slices) == [0, 1, 2, 3]
    assert all(layout.size for layout in layouts)
    with pytest.raises(ConfigurationError, match=r"--nb_ps=3.*only 2 tensors with entries"):
        place_tensors(spec, 3)


def test_an_empty_part_is_left_out_even_of_a_whole_tensor():
    spec = model([(4,), (3,)])
    empty = Block(0, 4, np.empty(0, np.int64), CodedValues("float32", np.empty(0, np.float32)))
    packet = Packet((empty,), Kind.GRADIENT)
    assert split_packet(packet, place_tensors(spec, 1)) == [()]
