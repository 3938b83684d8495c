"""Sharing the keras.utils.PyDataset of a `fit` among workers."""

import collections
import math
import pickle
import random
import threading

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from tests.thinwire.script.data.places import places, shared_by_all
from thinwire.ops.types import ConfigurationError
from thinwire.script.data.data import part_of_data


class Rows(keras.utils.PyDataset):
    """Batches of the numbers 0..total-1, in a shuffled order if `rng` is given."""

    def __init__(self, total, batch_size, rng=None, draws=0, **more):
        super().__init__(**more)
        self.order = np.arange(total)
        self.batch_size, self.rng, self.draws = batch_size, rng, draws
        self.made = collections.Counter()

    def __len__(self):
        return math.ceil(len(self.order) / self.batch_size)

    def __getitem__(self, index):
        self.made[index] += 1
        if self.rng is not None:
            self.rng.random(self.draws)
        rows = self.order[index * self.batch_size : (index + 1) * self.batch_size]
        return rows[:, None].astype("float32"), {"y": rows}

    def on_epoch_end(self):
        if self.rng is not None:
            self.rng.shuffle(self.order)


class Endless(Rows):
    """Batches without an end."""

    __len__ = None

    @property
    def num_batches(self):
        return None

    def __getitem__(self, index):
        return (np.arange(4)[:, None] + 4 * index,)


def epoch_of(shared):
    """Return an epoch's batches as Keras' fit receives them; the previous epoch ends first."""
    adapter = PyDatasetAdapter(shared.arguments["x"], shuffle=shared.arguments["shuffle"])
    adapter.on_epoch_end()
    adapter.on_epoch_begin()
    return [batch[0][:, 0].tolist() for batch in adapter._get_iterator()]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 60), st.integers(2, 4), st.integers(1, 16), st.booleans(), st.booleans(),
    st.sampled_from((None, "global", "worker")),
)  # fmt: skip
def test_parts_are_disjoint_and_complete(total, num_workers, size, one_group, shuffle, batch):
    everyone = []
    for place in places(num_workers, one_group, batch=batch):
        given_ = {"x": Rows(total, size), "shuffle": shuffle}
        try:
            everyone += shared_by_all(given_, num_workers, one_group, batch=batch)[
                place.worker - 1 : place.worker
            ]
        except ConfigurationError as error:
            assert "--batch=worker" in str(error) or "--nb_workers" in str(error)
            return
    for _ in range(2):
        steps = [epoch_of(shared) for shared in everyone]
        rows = sorted(row for mine in steps for batch_ in mine for row in batch_)
        assert rows == list(range(total))
        assert all(batch_ for mine in steps for batch_ in mine)
        if one_group:
            longest = max(map(len, steps))
            assert [longest - len(mine) for mine in steps] == [s.short_by for s in everyone]
    for shared in everyone:
        assert shared.num_examples == total
        assert shared.batch_size == min(size, total)


def test_the_scripts_own_order_gives_the_scripts_batches():
    whole = Rows(31, 8)
    everyone = [epoch_of(s) for s in shared_by_all({"x": whole, "shuffle": False}, 3)]
    for number in range(4):
        rows = sorted(row for mine in everyone for row in mine[number])
        assert rows == whole[number][0][:, 0].tolist()


@pytest.mark.parametrize("batch", ["global", "worker"])
def test_each_epoch_has_an_order_of_its_own(batch):
    shared = shared_by_all({"x": Rows(128, 4)}, 2, batch=batch)[0]
    epochs = [epoch_of(shared) for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    again = shared_by_all({"x": Rows(128, 4)}, 2, batch=batch)[0]
    assert [epoch_of(again) for _ in range(3)] == epochs


def test_each_epoch_of_a_shuffled_dataset_has_its_batches_in_another_order():
    everyone = shared_by_all({"x": Rows(64, 4), "shuffle": True}, 2)
    orders = set()
    for _ in range(3):
        steps = [set() for _ in range(16)]
        for shared in everyone:
            for step in range(16):
                steps[step] |= set(shared.arguments["x"][step][1]["y"].tolist())
            shared.arguments["x"].on_epoch_end()
        assert set().union(*steps) == set(range(64))
        # two batches are spread over two steps of two workers
        pairs = zip(steps[::2], steps[1::2], strict=True)
        orders.add(tuple(tuple(sorted(one | other)) for one, other in pairs))
    assert len(orders) == 3


def test_a_shuffled_batch_is_made_by_one_worker():
    for one_group, leftovers in ((True, 1), (False, 0)):
        data = [Rows(56, 8), Rows(56, 8)]
        for place, whole in zip(places(2, one_group), data, strict=True):
            shared = shared_by_all({"x": whole}, 2, one_group)[place.worker - 1]
            whole.made.clear()
            for step in range(shared.arguments["x"].num_batches):
                shared.arguments["x"][step]
        together = data[0].made + data[1].made
        assert set(together) == set(range(7))
        assert sorted(together.values()) == [1] * (7 - leftovers) + [2] * leftovers


@pytest.mark.parametrize(
    "new_rng",
    (
        lambda: np.random.default_rng(),
        lambda: np.random.RandomState(),
        lambda: np.random,
        lambda: random.Random(),
    ),
)
@pytest.mark.parametrize("one_group", (True, False))
def test_orders_drawn_at_the_end_of_an_epoch_are_the_same_everywhere(new_rng, one_group):
    everyone = []
    for place in places(2, one_group):
        rng = new_rng()
        draws = 0 if isinstance(rng, random.Random) else place.worker
        whole = Rows(40, 8, rng if draws else _Shuffler(rng), draws)
        everyone.append(shared_by_all({"x": whole}, 2, one_group)[place.worker - 1])
    orders = []
    for _ in range(3):
        rows = [row for shared in everyone for batch in epoch_of(shared) for row in batch]
        assert sorted(rows) == list(range(40))
        orders.append(tuple(everyone[0].arguments["x"]._whole.order))
    assert len(set(orders)) == 3


class _Shuffler(random.Random):
    """Python's generator; its `random` takes a number of draws."""

    def __init__(self, rng):
        super().__init__(rng.random())

    def random(self, draws=None):
        return super().random()


def test_threads_make_each_batch_once():
    shared = shared_by_all({"x": Rows(64, 8, workers=3)}, 4)[1]
    mine, whole = shared.arguments["x"], shared.arguments["x"]._whole
    mine.on_epoch_end()
    whole.made.clear()
    rows = []
    threads = [
        threading.Thread(target=lambda step=step: rows.extend(mine[step][0][:, 0]))
        for step in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(rows)) == 16 and set(whole.made.values()) == {1}
    assert (mine.workers, mine.use_multiprocessing, mine.max_queue_size) == (3, False, 10)


def test_it_can_go_to_another_process():
    shared = shared_by_all({"x": Rows(64, 8)}, 4)[1]
    copy = pickle.loads(pickle.dumps(shared.arguments["x"]))  # noqa: S301 - our own
    assert copy[3][0].tolist() == shared.arguments["x"][3][0].tolist()


def test_datasets_without_an_end():
    for one_group, shuffle in ((True, False), (True, True), (False, True)):
        given_ = {"x": Endless(1, 1), "shuffle": shuffle, "steps_per_epoch": 6}
        everyone = shared_by_all(given_, 2, one_group)
        steps = [s.arguments["steps_per_epoch"] for s in everyone]
        assert steps == ([6, 6] if one_group else [3, 3])
        rows = [
            s.arguments["x"][step][0][:, 0].tolist()
            for s in everyone
            for step in range(s.arguments["steps_per_epoch"])
        ]
        assert sorted(row for batch in rows for row in batch) == list(range(24))
        assert {(s.batch_size, s.num_examples) for s in everyone} == {(4, None)}


def test_refusals_name_what_helps():
    with pytest.raises(ConfigurationError, match=r"2 batches .* 3 workers.*--nb_workers=2"):
        shared_by_all({"x": Rows(16, 8)}, 3, False)
    with pytest.raises(ConfigurationError, match="--partition=iid"):
        shared_by_all({"x": Rows(16, 8)}, 2, True, "class")
    with pytest.raises(ConfigurationError, match="no batches"):
        shared_by_all({"x": Rows(0, 8)}, 2)


def test_a_part_that_the_script_takes_itself():
    parts = [part_of_data((Rows(50, 8),), place) for place in places(3)]
    rows = [row for part in parts for step in range(part.num_batches) for row in part[step][1]["y"]]
    assert sorted(rows) == list(range(50))


def test_one_worker_keeps_the_scripts_own():
    given_ = {"x": Rows(16, 8), "shuffle": True}
    assert shared_by_all(given_, 1)[0].arguments == given_
    assert [s.arguments for s in shared_by_all(given_, 2, shard="off")] == [given_] * 2
