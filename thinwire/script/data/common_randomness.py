"""Lets code of a script that orders data draw the same random numbers on every worker."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from thinwire.script.data.place import WorkerPlace


@contextlib.contextmanager
def same_randomness(owners: Iterable[Any], place: WorkerPlace, number: int) -> Iterator[None]:
    """Make all random generators draw the same numbers on every worker in the `with` block.

    The random generators are the global generators of Python, NumPy and PyTorch (if the script uses
    PyTorch), and the random generators in attributes of some objects. At the end of the `with`
    block, the random generators return to their states before the block. Workers compute different
    batches, so the states of their random generators differ. So the random generators get new,
    common seeds in each `with` block, which make the draws of all workers equal.

    Args:
        owners: Objects whose attributes may be random generators: a PyDataset, or the samplers of a
            DataLoader.
        place: This worker's place in the run, with the number of the call of `fit`. The global
            generators draw different numbers in each `fit`. The objects' random generators draw
            different numbers in each `fit` on the same data set. A data set that the script creates
            for each `fit` draws equal numbers in each `fit`, as it does without Thinwire.
        number: Number of the `with` block within one call of `fit`. Each number gives different
            random draws.
    """
    seed, uses = place.rule.seed, 0 if place.fit is None else place.fit.uses
    common = np.random.SeedSequence([seed, number, place.fits_before])
    sequence = np.random.SeedSequence([seed, number, uses])
    torch = sys.modules.get("torch")
    kinds = _GENERATORS if torch is None else (*_GENERATORS, torch.Generator)
    attributes = (value for owner in owners for value in vars(owner).values())
    generators = [value for value in attributes if isinstance(value, kinds)]
    global_generators = (random, np.random, *([] if torch is None else [torch.default_generator]))
    with contextlib.ExitStack() as at_end:
        for generator in (*global_generators, *generators):
            at_end.callback(_restorer(generator))
        random.seed(f"{seed} {number} {place.fits_before}")
        np.random.seed(common.generate_state(4))
        if torch is not None:
            torch.default_generator.manual_seed(int(common.generate_state(5)[4]))
        for generator, child in zip(generators, sequence.spawn(len(generators)), strict=True):
            _reseed(generator, child)
        yield


_GENERATORS: tuple[type, ...] = (np.random.Generator, np.random.RandomState, random.Random)


def _restorer(generator: Any) -> Callable[[], None]:
    """Return a function that puts a random generator back into its present state."""
    if isinstance(generator, np.random.Generator):
        source = generator.bit_generator
        return functools.partial(setattr, source, "state", source.state)
    if hasattr(generator, "get_state"):
        return functools.partial(generator.set_state, generator.get_state())
    return functools.partial(generator.setstate, generator.getstate())


def _reseed(generator: Any, sequence: np.random.SeedSequence) -> None:
    if isinstance(generator, np.random.Generator):
        kind = type(generator.bit_generator)
        generator.bit_generator.state = kind(sequence).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(sequence.generate_state(4))
    elif isinstance(generator, random.Random):
        generator.seed(int(sequence.generate_state(1)[0]))
    else:
        generator.manual_seed(int(sequence.generate_state(1)[0]))
