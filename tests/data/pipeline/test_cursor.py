"""The cursor: full batches, each example once an epoch, equal batches after a restore."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.data.pipeline.cursor import Cursor
from thinwire.ops.types import ConfigurationError


def draw(cursor: Cursor, count: int) -> list[list[int]]:
    return [cursor.next().tolist() for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 40), seed=st.integers(0, 2**31), data=st.data())
def test_every_batch_is_full_and_nothing_is_lost(size: int, seed: int, data: st.DataObject) -> None:
    batch_size = data.draw(st.integers(1, size))
    indices = np.arange(100, 100 + size)
    cursor = Cursor(indices, batch_size, seed)
    batches = draw(cursor, 3 * size)
    assert all(len(batch) == batch_size for batch in batches)
    flat = np.array(batches).reshape(-1, size)
    assert (np.sort(flat, axis=1) == indices).all()


@settings(max_examples=40, deadline=None)
@given(before=st.integers(0, 30), batch_size=st.integers(1, 10))
def test_equal_batches_after_restore(before: int, batch_size: int) -> None:
    cursor = Cursor(np.arange(10), batch_size, seed=3)
    draw(cursor, before)
    other = Cursor(np.arange(10), batch_size, seed=3)
    other.restore(cursor.state())
    assert draw(other, 12) == draw(cursor, 12)


def test_orders_differ_by_epoch_and_seed() -> None:
    first, second = draw(Cursor(np.arange(50), 50, seed=1), 2)
    assert first != second
    assert first != draw(Cursor(np.arange(50), 50, seed=2), 1)[0]


def test_a_batch_belongs_to_the_caller() -> None:
    cursor, untouched = (Cursor(np.arange(6), 2, seed=1) for _ in range(2))
    for _ in range(9):
        batch = cursor.next()
        np.testing.assert_array_equal(batch, untouched.next())
        batch[:] = -1


@pytest.mark.parametrize("batch_size", [0, -1, 11])
def test_batch_that_does_not_fit(batch_size: int) -> None:
    with pytest.raises(ConfigurationError, match=f"--batch_size {batch_size} .* 10 training"):
        Cursor(np.arange(10), batch_size, seed=0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"seed": 9}, "seed 9, but this run has seed 0"),
        ({"shard_size": 11}, "shard_size 11, but this run has shard_size 10"),
        ({"position": 10}, "example 10"),
        ({"position": -1}, "example -1"),
        ({"epoch": -1}, "epoch -1"),
    ],
)
def test_foreign_state_is_refused(change: dict[str, int], expected: str) -> None:
    cursor = Cursor(np.arange(10), 3, seed=0)
    with pytest.raises(ConfigurationError, match=expected):
        cursor.restore(cursor.state() | change)
