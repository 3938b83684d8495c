"""Data that a script passes to `fit` or `shard`, in any form."""

import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.script.data.places import places, shared_by_all
from thinwire.ops.methods.builder import Choices, compose
from thinwire.ops.types import ConfigurationError
from thinwire.script.data.data import part_of_data


class IterDataset:
    """A stand-in for grain's class of this name."""

    __module__ = "grain.python"


@pytest.mark.parametrize(
    ("data", "what"),
    (
        ((row for row in range(3)), "a Python generator"),
        (IterDataset(), "a grain data set"),
    ),
)
def test_what_only_the_script_can_share_is_refused(data, what):
    with pytest.raises(ConfigurationError) as error:
        shared_by_all({"x": data}, 2)
    assert what in str(error.value)
    assert 'shard="off"' in str(error.value) and "thinwire.worker_id()" in str(error.value)
    assert shared_by_all({"x": data}, 1)[0].arguments == {"x": data}
    assert [s.arguments for s in shared_by_all({"x": data}, 2, shard="off")] == [{"x": data}] * 2


def rows_of(parts):
    return sorted(int(row) for part in parts for row in part)


@pytest.mark.parametrize(
    "data",
    (
        (np.arange(20),),
        (list(range(20)),),
        ([[row, 0] for row in range(20)], list(range(20))),
        ({"a": np.arange(20), "b": [np.zeros(20), tf.zeros(20)]}, np.arange(20)),
        (tf.ragged.constant([[row] for row in range(20)]), tf.range(20)),
    ),
)
def test_a_script_takes_its_part_of_any_arrays(data):
    parts = [part_of_data(data, place) for place in places(3)]
    if len(data) == 1:
        assert rows_of(parts) == list(range(20))
        return
    assert rows_of(part[-1] for part in parts) == list(range(20))
    for part in parts:
        assert isinstance(part, tuple) and len(part) == len(data)
        for leaf in tf.nest.flatten(part[0]):
            assert leaf.shape[0] == len(part[-1])


def test_what_has_no_rows_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="NoneType|object|set"):
        part_of_data(({1, 2},), places(2)[0])


@pytest.mark.parametrize(
    ("method", "together"),
    (
        ("bsp", True),
        ("ssgd", True),
        ("dgt", True),
        ("asgd", False),
        ("ssp", False),
        ("dgs", False),
        ("esync", False),
        ("adacomp", False),
    ),
)
def test_whose_the_batch_size_is_by_method(method, together):
    assert compose(Choices.of(method, 3)).steps_together is together
