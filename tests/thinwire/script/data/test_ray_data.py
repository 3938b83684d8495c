"""Sharing a ray.data.Dataset among workers; a stand-in has the used part of Ray's interface."""

import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.script.data.places import places, shared_by_all
from thinwire.ops.types import ConfigurationError
from thinwire.script.data.data import part_of_data

ROWS = 23


class Dataset:
    """Rows of columns, in memory."""

    def __init__(self, rows):
        self.rows = rows
        options = types.SimpleNamespace(preserve_order=False)
        self.context = types.SimpleNamespace(execution_options=options)

    def columns(self):
        return ["a", "b", "label", "weight"]

    def count(self):
        return len(self.rows)

    def iter_batches(self, batch_size, batch_format):
        assert batch_format == "numpy" and self.context.execution_options.preserve_order
        for start in range(0, len(self.rows), batch_size):
            rows = self.rows[start : start + batch_size]
            lists = np.empty(len(rows), object)
            lists[:] = [np.full(2, row) for row in rows]  # as Ray gives what differs in length
            yield {"a": rows, "b": lists, "label": rows + 0.5, "weight": rows * 2.0}

    def take_batch(self, batch_size, batch_format):
        self.context.execution_options.preserve_order = True
        return next(self.iter_batches(batch_size, batch_format))

    def split_at_indices(self, indices):
        return [Dataset(rows) for rows in np.split(self.rows, indices)]


@pytest.fixture
def dataset(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.data", types.SimpleNamespace(Dataset=Dataset))
    return Dataset(np.arange(ROWS))


@pytest.mark.parametrize(("batch", "size"), [("global", 7), ("worker", 4)])
def test_parts_are_disjoint_complete_and_together_the_scripts_batches(dataset, batch, size):
    given = {"x": dataset, "y": "label", "sample_weight": "weight", "batch_size": size}
    everyone = shared_by_all(given, 3, batch=batch)
    steps = [list(shared.arguments["x"]) for shared in everyone]
    run_batch = size if batch == "global" else 3 * size
    longest = max(map(len, steps))
    for number in range(longest):
        parts = [mine[number][0]["a"].numpy() for mine in steps if number < len(mine)]
        assert number % 2 or any(len(set(part % 3)) > 1 for part in parts), "dealt by a stride"
        rows = sorted(np.concatenate(parts))
        assert rows == list(range(number * run_batch, min(ROWS, (number + 1) * run_batch)))
    again = list(shared_by_all(given, 3, batch=batch)[1].arguments["x"])
    assert [step[0]["a"].numpy().tolist() for step in again] == [
        step[0]["a"].numpy().tolist() for step in steps[1]
    ]
    for shared, mine in zip(everyone, steps, strict=True):
        assert len(shared.arguments["x"]) == len(mine) == longest - shared.short_by
        assert (shared.batch_size, shared.num_examples) == (size, ROWS)
        for element in mine:
            x, labels, weights = tf.nest.map_structure(lambda column: column.numpy(), element)
            assert x["b"].shape == (len(labels), 2)
            assert np.allclose(labels, x["a"] + 0.5) and np.allclose(weights, 2 * x["a"])


def test_shard_gives_each_worker_rows_of_its_own(dataset):
    parts = [part_of_data((dataset,), place).rows for place in places(3)]
    assert [len(part) for part in parts] == [7, 8, 8]
    assert np.concatenate(parts).tolist() == list(range(ROWS))


def test_what_cannot_be_shared_is_refused(dataset):
    with pytest.raises(ConfigurationError, match=r"columns .*'label'.* y='target'"):
        shared_by_all({"x": dataset, "y": "target"}, 2)
    with pytest.raises(ConfigurationError, match="23 rows .* --nb_workers=23"):
        shared_by_all({"x": dataset, "y": "label", "batch_size": 64}, 24)
    with pytest.raises(ConfigurationError, match="--partition=class divides only arrays"):
        shared_by_all({"x": dataset, "y": "label"}, 2, partition="class")
