"""The torch DataLoader of a `fit` on each backend of Keras, divided among workers."""

import math
import random

import keras
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils import data as torch_data  # noqa: E402 - below, for PyTorch may be absent

from tests.backends.test_pass_numbers import (  # noqa: E402
    epochs_of,
    places,
    shared_by_all,
    together,
)
from thinwire.ops.types import ConfigurationError  # noqa: E402
from thinwire.script.data.data import part_of_data, share  # noqa: E402


class Numbers(torch_data.Dataset):
    """The numbers 0..total-1 as examples (x [1], y)."""

    def __init__(self, total):
        self.total, self.loaded = total, []

    def __len__(self):
        return self.total

    def __getitem__(self, index):
        self.loaded.append(int(index))
        return np.float32([index]), np.float32(index)


class Shuffled(torch_data.Sampler):
    """A script's own sampler, which draws from a generator that it does not seed."""

    def __init__(self, total, draw):
        self.total, self.draw = total, draw

    def __iter__(self):
        return iter(self.draw(self.total))

    def __len__(self):
        return self.total


class Buckets(torch_data.Sampler):
    """A script's own batch sampler, with batches of different sizes in a random order."""

    def __init__(self, total):
        self.batches = [list(range(start, total, 5)) for start in range(5)]
        self.batches[0], self.batches[1] = self.batches[0] + self.batches[1], []
        self.batches = [batch for batch in self.batches if batch]

    def __iter__(self):
        return (self.batches[i] for i in torch.randperm(len(self.batches)))

    def __len__(self):
        return len(self.batches)


def python_order(total):
    order = list(range(total))
    random.shuffle(order)
    return order


def loaders(total, size):
    """Return functions that make a script's loader of some numbers."""

    def loader(more):
        return lambda: torch_data.DataLoader(Numbers(total), batch_size=size, **more())

    def drawn(draw):
        return loader(lambda: {"sampler": Shuffled(total, draw)})

    weights = torch.ones(total)
    return {
        "in order": loader(dict),
        "shuffle": loader(lambda: {"shuffle": True}),
        "drop_last": loader(lambda: {"shuffle": True, "drop_last": True}),
        "generator": loader(lambda: {"shuffle": True, "generator": torch.Generator()}),
        "subset": loader(lambda: {"sampler": torch_data.SubsetRandomSampler(range(total))}),
        "weighted": loader(
            lambda: {"sampler": torch_data.WeightedRandomSampler(weights, total, replacement=False)}
        ),
        "torch": drawn(lambda n: torch.randperm(n).tolist()),
        "numpy": drawn(lambda n: np.random.permutation(n)),
        "python": drawn(python_order),
        "buckets": lambda: torch_data.DataLoader(Numbers(total), batch_sampler=Buckets(total)),
    }


KINDS = tuple(loaders(1, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", ["global", "worker"])
@pytest.mark.parametrize(("total", "num_workers", "size"), [(24, 2, 6), (22, 3, 7), (25, 4, 6)])
def test_the_parts_of_a_loader_are_together_its_batches(total, num_workers, size, batch, kind):
    def arguments():
        # the workers' own generators differ
        for generator in (random, np.random, torch.random):
            getattr(generator, "manual_seed", getattr(generator, "seed", None))(len(drawn))
        drawn.append(1)
        return {"x": loaders(total, size)[kind]()}

    drawn = []
    everyone = shared_by_all(arguments, num_workers, batch=batch)
    read = [epochs_of(shared.arguments, 3, builds=True) for shared in everyone]
    again = [epochs_of(s.arguments, 3) for s in shared_by_all(arguments, num_workers, batch=batch)]
    assert read == again, "a batch read to build the model has used up a pass"
    expected = total // size * size if kind == "drop_last" else total
    for epoch in range(3):
        parts = [mine[epoch] for mine in read]
        rows = sorted(row for mine in parts for step in mine for row in step)
        assert len(rows) == expected and len(set(rows)) == expected
        longest = max(map(len, parts))
        assert [longest - len(mine) for mine in parts] == [shared.short_by for shared in everyone]
        if batch == "global" and kind == "in order":
            for step in range(math.ceil(total / size)):
                whole = list(range(step * size, min(total, (step + 1) * size)))
                assert together(parts, step) == whole
        if batch == "global" and everyone[0].rounds is not None:
            for step in range(longest):
                own = [len(mine[step]) if step < len(mine) else 0 for mine in parts]
                if kind != "buckets":
                    assert list(everyone[0].rounds.of_step(step)) == own
    if kind != "in order":
        assert len({str(epoch) for epoch in zip(*read, strict=True)}) > 1
    for shared in everyone:
        assert shared.num_examples == expected
        assert shared.arguments["shuffle"] is False


def test_a_worker_loads_only_its_own_examples():
    data = [Numbers(24), Numbers(24)]
    for numbers, place in zip(data, places(2), strict=True):
        loader = torch_data.DataLoader(numbers, batch_size=6, shuffle=True)
        epochs_of(share({"x": loader}, place).arguments, 1)
    if keras.backend.backend() == "torch":
        assert [len(numbers.loaded) for numbers in data] == [12, 12]
    assert sorted(set(data[0].loaded) | set(data[1].loaded)) == list(range(24))


def test_the_loader_keeps_the_scripts_settings():
    class Loader(torch_data.DataLoader):
        pass

    def collate(examples):
        return tuple(torch.as_tensor(np.stack(column)) for column in zip(*examples, strict=True))

    generator = torch.Generator()
    settings = {
        "collate_fn": collate,
        "num_workers": 2,
        "persistent_workers": True,
        "worker_init_fn": print,
        "generator": generator,
        "timeout": 9.0,
        "prefetch_factor": 3,
        "multiprocessing_context": torch.multiprocessing.get_context("fork"),
    }
    loader = Loader(Numbers(24), batch_size=6, shuffle=True, **settings)
    part = part_of_data((loader,), places(2)[0])
    assert type(part) is Loader and len(part) == 2 and part.dataset is loader.dataset
    assert {name: getattr(part, name) for name in settings} == settings
    assert loader.batch_size == 6 and len(loader) == 4


@pytest.mark.parametrize("kind", ["in order", "shuffle", "buckets"])
def test_a_part_that_the_script_takes_itself(kind):
    parts = [part_of_data((loaders(40, 8)[kind](),), place) for place in places(2)]
    orders = set()
    for _ in range(3):
        rows = [int(row) for part in parts for x, _ in part for row in x]
        assert sorted(rows) == list(range(40))
        orders.add(str(rows))
    assert len(orders) > 1
    whole = loaders(40, 8)[kind]()
    assert part_of_data((whole,), places(1)[0]) is whole


@pytest.mark.parametrize("steps", [2, 4])
def test_steps_per_epoch_run_over_several_passes(steps):
    def arguments():
        loader = loaders(24, 6)["shuffle"]()
        return {"x": loader, "steps_per_epoch": steps, "epochs": 8 // steps}

    read = [epochs_of(s.arguments, 8 // steps) for s in shared_by_all(arguments, 2)]
    flat = [[batch for epoch in mine for batch in epoch] for mine in read]
    for start in (0, 4):
        rows = [row for mine in flat for batch in mine[start : start + 4] for row in batch]
        assert sorted(rows) == list(range(24))


class Stream(torch_data.IterableDataset):
    """Examples without indices."""

    def __iter__(self):
        return iter([np.zeros(1)])


class Endless(Shuffled):
    """Batches without an end, of a stated length."""

    def __iter__(self):
        while True:
            yield [0, 1]


NUMBERS = Numbers(8)
REFUSED = {
    "IterableDataset.*worker_id": lambda: torch_data.DataLoader(Stream()),
    "batch_size=None": lambda: torch_data.DataLoader(NUMBERS, batch_size=None),
    "DistributedSampler": lambda: torch_data.DataLoader(
        NUMBERS, sampler=torch_data.DistributedSampler(NUMBERS, num_replicas=2, rank=0)
    ),
    "other indices .*same random seeds": lambda: torch_data.DataLoader(
        NUMBERS,
        sampler=Shuffled(8, lambda n: random.SystemRandom().sample(range(n), n)),
        batch_size=4,
    ),
    "yields more than the 3 batches": lambda: torch_data.DataLoader(
        NUMBERS, batch_sampler=Endless(3, None)
    ),
    "batch of 1 rows.*--batch=worker": lambda: torch_data.DataLoader(NUMBERS),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_loader_that_cannot_be_divided_is_refused(message):
    with pytest.raises(ConfigurationError, match=message):
        shared_by_all(lambda: {"x": REFUSED[message]()}, 2)
    loader = REFUSED[message]()
    for place in (places(1)[0], places(2, shard="off")[1]):
        assert share({"x": loader}, place).arguments == {"x": loader}


def test_other_refusals_name_what_helps():
    whole = loaders(16, 8)["shuffle"]
    with pytest.raises(ConfigurationError, match=r"2 batches .* 3 workers.*--nb_workers=2"):
        shared_by_all(lambda: {"x": whole()}, 3, False)
    with pytest.raises(ConfigurationError, match="--partition=class divides only arrays"):
        shared_by_all(lambda: {"x": whole()}, 2, partition="class")
    with pytest.raises(ConfigurationError, match=r"batch 2 .*steps_per_epoch=1"):
        loader = torch_data.DataLoader(Numbers(9), batch_size=8)
        shared_by_all(lambda: {"x": loader, "steps_per_epoch": 1, "epochs": 2}, 2)
    with pytest.raises(ValueError, match="targets"):
        shared_by_all(lambda: {"x": whole(), "y": np.zeros(16)}, 2)


def test_fit_trains_on_a_loader_with_processes_over_twenty_epochs():
    """Keras' own fit reads persistent processes; every epoch has all rows."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    for shared in shared_by_all(
        lambda: {
            "x": torch_data.DataLoader(
                Numbers(26), 6, shuffle=True, num_workers=2, persistent_workers=True
            )
        },
        2,
    ):
        model = Model()
        model.compile("sgd", "mse")
        history = model.fit(**shared.arguments, epochs=20, verbose=0)
        assert len(history.history["loss"]) == 20
