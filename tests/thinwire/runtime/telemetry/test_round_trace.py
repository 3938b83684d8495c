"""Batches of rounds: packing round-trips within the limit, and invalid batches are rejected."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.runtime.telemetry import round_trace
from thinwire.runtime.telemetry.round_trace import (
    MAX_BATCH_BYTES,
    MeasuredBy,
    Round,
    line_of,
    pack,
    unpack,
)

ORIGIN = MeasuredBy("alpha", "gpu1", 2, "0000002a")
SECONDS = st.floats(0, 1e6)
COUNT = st.integers(0, 2**40)
PHASES = st.dictionaries(
    st.sampled_from([round_trace.GET_BATCH, round_trace.GLOBAL_UPDATE]), SECONDS
)


def row(number=1, **changes):
    values = {
        "num_iters": number,
        "num_samples": 64,
        "total_time": 1.5,
        "n_local": 1,
        "epoch": 0,
        "version": number,
        "staleness": 0,
        "loss": 0.5,
        "bytes_sent": 10,
        "bytes_received": 20,
        "barrier_wait": 0.25,
        "transfer": 0.125,
        "time": {"get_batch": 0.5},
        "steps": None,
    }
    return Round(**values | changes)


@given(
    st.lists(
        st.builds(
            Round,
            num_iters=COUNT,
            num_samples=COUNT,
            total_time=SECONDS,
            n_local=COUNT,
            epoch=COUNT,
            version=COUNT,
            staleness=COUNT,
            loss=st.none() | st.floats(-1e6, 1e6),
            bytes_sent=COUNT,
            bytes_received=COUNT,
            barrier_wait=SECONDS,
            transfer=SECONDS,
            time=PHASES,
            steps=st.none() | st.lists(PHASES, max_size=3),
        ),
        max_size=5,
    )
)
def test_what_is_packed_is_unpacked(rows):
    back = [each for text in pack(ORIGIN, rows) for each in unpack(text)]
    assert len(back) == len(rows)
    for before, after in zip(rows, back, strict=True):
        assert after.num_iters == before.num_iters
        assert after.total_time == pytest.approx(before.total_time, abs=1e-6)
        assert after.time == pytest.approx(before.time, abs=1e-6)
        assert (after.steps is None) == (before.steps is None)
        assert (after.host, after.device, after.rank, after.life) == (
            "alpha",
            "gpu1",
            2,
            "0000002a",
        )
        assert json.loads(line_of(after))["num_iters"] == before.num_iters


def test_batches_stay_within_what_a_shard_takes():
    texts = pack(ORIGIN, [row(number) for number in range(1, 5001)])
    assert len(texts) > 1
    assert max(map(len, texts)) <= MAX_BATCH_BYTES
    numbers = [each.num_iters for text in texts for each in unpack(text)]
    assert numbers == list(range(1, 5001))


def test_a_round_too_long_for_a_batch_loses_its_steps_alone():
    long = row(2, steps=[{"get_batch": 0.123456}] * 20_000)
    texts = pack(ORIGIN, [row(1), long, row(3)])
    back = [each for text in texts for each in unpack(text)]
    assert [each.num_iters for each in back] == [1, 2, 3]
    assert back[1].steps is None
    assert back[1].time == {"get_batch": 0.5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [[1]]}, "expected 14 values"),
        ({"rows": 3}, "no columns and rows"),
        ({"columns": [[]]}, "expected names"),
        ({"host": 5}, "host"),
        ({"rank": -1}, "rank"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_nothing_else_is_believed(change, message):
    batch = json.loads(pack(ORIGIN, [row()])[0]) | change
    with pytest.raises(ValueError, match=message):
        unpack(json.dumps(batch))


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"rows":[],"columns":[]}', "{" * 5000])
def test_no_batch_at_all(text):
    with pytest.raises(ValueError):
        unpack(text)


@pytest.mark.parametrize(
    ("column", "value"), [("loss", "x"), ("num_iters", 1.5), ("time", {"get_batch": None})]
)
def test_a_cell_of_another_kind(column, value):
    batch = json.loads(pack(ORIGIN, [row()])[0])
    batch["rows"][0][batch["columns"].index(column)] = value
    with pytest.raises(ValueError, match=column):
        unpack(json.dumps(batch))
