"""A frozen value stays unchanged while its owner changes the original."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.ops import buffers
from thinwire.ops.frozen import Freezer, FrozenArray
from thinwire.runtime.run.spill import Spill

SIZE = 1_000_003  # pieces of 2**18, and a rest


def freezer_on(copy=buffers.copied):
    freezer = Freezer()
    freezer.turn_on(copy)
    return freezer


def change(freezer, array, rng, is_dense):
    if is_dense:
        freezer.before_change(array)
        array += 1
        return
    indices = np.sort(rng.choice(SIZE, 1000, replace=False))
    freezer.before_change(array, indices)
    array[indices] = rng.standard_normal(1000, np.float32)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["read", "dense", "sparse", "again"]), max_size=12), st.integers())
def test_pieces_are_those_of_the_moment(steps, seed):
    rng = np.random.default_rng(abs(seed))
    freezer, array = freezer_on(), rng.standard_normal(SIZE, np.float32)
    expected = array.tobytes()
    frozen = freezer.freeze(array)
    others, came = [], []
    reader = frozen.pieces()
    for step in steps:
        if step == "again" and not came:
            others.append(frozen.again())
        elif step == "read":
            came += [bytes(piece) for piece in [next(reader, b"")]]
        elif step != "again":
            change(freezer, array, rng, step == "dense")
    came += map(bytes, reader)
    assert b"".join(came) == expected
    for other in others:
        assert np.asarray(other).tobytes() == expected
        assert b"".join(other.pieces()) == expected


@pytest.mark.parametrize("in_file", [True, False])
def test_a_reader_on_another_thread_sees_no_change(in_file, tmp_path, monkeypatch):
    monkeypatch.setattr(buffers, "LEAST_BYTES", 1)
    rng = np.random.default_rng(1)
    copy = Spill(tmp_path).copied if in_file else buffers.copied
    freezer, array = freezer_on(copy), np.zeros(SIZE, np.float32)
    for number in range(20):
        expected = array.tobytes()
        frozen, came = freezer.freeze(array), []
        thread = threading.Thread(target=lambda f=frozen, c=came: c.extend(map(bytes, f.pieces())))
        thread.start()
        while thread.is_alive():
            change(freezer, array, rng, number % 2)
        assert b"".join(came) == expected


def test_what_nobody_reads_any_more_costs_nothing():
    freezer, array = freezer_on(), np.zeros(SIZE, np.float32)
    read, dropped = freezer.freeze(array), freezer.freeze(array)
    assert len(list(read.pieces())) == 4
    del dropped
    freezer.before_change(array)
    assert not read._aside
    assert not freezer._found


def held_bytes(frozen):
    bases = {}
    for _, indices, values in frozen._aside:
        for part in (indices, values):
            if part is not None:
                whole = part if part.base is None else part.base
                bases[id(whole)] = getattr(whole, "nbytes", part.nbytes)
    return sum(bases.values())


@pytest.mark.parametrize(("rate", "updates"), [(0.1, 12), (0.00001, 300)])
def test_sparse_changes_while_a_slow_client_reads_cost_less_than_two_arrays(rate, updates):
    rng = np.random.default_rng(2)
    freezer, array = freezer_on(), rng.standard_normal(SIZE, np.float32)
    expected, frozen = array.tobytes(), freezer.freeze(array)
    reader = frozen.pieces()
    came, most = [bytes(next(reader))], 0
    for _ in range(updates):
        indices = np.unique(rng.integers(SIZE, size=int(SIZE * rate)))
        freezer.before_change(array, indices)
        array[indices] += 1
        most = max(most, held_bytes(frozen))
    assert most < 2 * array.nbytes
    assert len(frozen._aside) < 300  # each piece that is read scans all entries
    assert b"".join([*came, *map(bytes, reader)]) == expected


@pytest.mark.parametrize(("is_on", "size"), [(False, SIZE), (True, 100)])
def test_copies_where_nobody_else_reads_and_of_small_arrays(is_on, size):
    freezer, array = Freezer(), np.zeros(size, np.float32)
    freezer.is_on = is_on
    kept = freezer.freeze(array)
    array += 1
    assert not isinstance(kept, FrozenArray)
    assert not kept.any()
