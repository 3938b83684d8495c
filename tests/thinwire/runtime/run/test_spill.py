"""Buffers beyond the memory limit are stored in files."""

import pathlib

import numpy as np
import pytest

from thinwire.ops.aggregation.merge import mean_update
from thinwire.ops.buffers import LEAST_BYTES, PIECE_BYTES, buffer, is_in_file, pieces, put_away
from thinwire.ops.types import SpareUpdate, Update
from thinwire.runtime.run.spill import FileCopy, Spill


def resident_bytes():
    return 4096 * int(pathlib.Path("/proc/self/statm").read_text().split()[1])


def filled(array, seed):
    np.copyto(array.view(np.float32), np.random.default_rng(seed).random(len(array) // 4, "f4"))
    return array.view(np.float32)


def test_what_is_beyond_two_buffers_waits_in_a_file_without_a_name(tmp_path):
    spill = Spill(tmp_path)
    first, second, third = (spill.buffer(LEAST_BYTES) for _ in range(3))
    assert [is_in_file(each) for each in (first, second, third)] == [False, False, True]
    assert third.ctypes.data % 64 == 0 and third.flags.writeable
    assert not list(tmp_path.iterdir())
    view = first[64:]
    del first
    assert is_in_file(spill.buffer(LEAST_BYTES))  # `view` has the first one still
    del view
    assert not is_in_file(spill.buffer(LEAST_BYTES))
    assert not is_in_file(spill.buffer(LEAST_BYTES - 1))


def test_what_is_put_away_leaves_this_process_and_stays_as_it_is(tmp_path):
    size = 16 * LEAST_BYTES
    spilled = Spill(tmp_path, in_memory=0).buffer(size)
    values = filled(spilled, 1)
    before = resident_bytes()
    put_away(memoryview(spilled)[100 : size // 2])
    assert resident_bytes() < before - size // 4
    put_away(values)
    assert resident_bytes() < before - 3 * size // 4
    expected = np.random.default_rng(1).random(size // 4, "f4")
    assert np.array_equal(np.concatenate(list(pieces(values))), expected)
    put_away(buffer(LEAST_BYTES)[:10])  # of memory: nothing


def test_pieces_are_put_away_behind_their_use(tmp_path):
    size = 16 * LEAST_BYTES
    values = filled(Spill(tmp_path, in_memory=0).buffer(size), 2)
    put_away(values)
    before, most = resident_bytes(), 0
    for piece in pieces(values):
        piece.max()
        most = max(most, resident_bytes())
    assert most < before + 4 * PIECE_BYTES


def test_a_copy_in_a_file_is_in_no_memory(tmp_path):
    values = np.arange(8 * LEAST_BYTES // 4, dtype=np.float32)
    before = resident_bytes()
    copy = Spill(tmp_path).copied(values)
    assert isinstance(copy, FileCopy) and copy.nbytes == values.nbytes
    assert resident_bytes() < before + 2 * PIECE_BYTES
    np.testing.assert_array_equal(copy[1234567:2345678], values[1234567:2345678])
    np.testing.assert_array_equal(copy[0 : values.size], values)
    assert copy[3:3].size == 0
    assert not list(tmp_path.iterdir())


def test_where_no_file_can_be_made_memory_is_taken(tmp_path):
    spill = Spill(tmp_path / "none", in_memory=0)
    assert not is_in_file(spill.buffer(LEAST_BYTES))
    values = np.arange(LEAST_BYTES, dtype=np.float32)
    np.testing.assert_array_equal(spill.copied(values)[0 : values.size], values)


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_updates_in_files_has_the_bits_of_those_in_memory(tmp_path, seed):
    size = 2 * LEAST_BYTES + 4 * seed
    spill = Spill(tmp_path)
    kinds = (SpareUpdate, Update, SpareUpdate, SpareUpdate)
    spilled = [kind(None, filled(spill.buffer(size), n)) for n, kind in enumerate(kinds)][::-1]
    plain = [Update(None, each.values.copy()) for each in spilled]
    merged, expected = mean_update(spilled, size // 4), mean_update(plain, size // 4)
    assert np.array_equal(merged.values, expected.values)
    assert not is_in_file(merged.values)
