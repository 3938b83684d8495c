"""Lets random numbers differ between workers in Keras' `fit`, and be equal outside of `fit`."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from tensorflow.python.eager import context

from thinwire.models.seeds import own_seed
from thinwire.script.data.place import WorkerPlace

if TYPE_CHECKING:
    from numpy.typing import NDArray


class _FitOfThread(threading.local):
    """Random number state for the call of `fit` that runs in one thread.

    Attributes:
        place: This worker's number in the run, and the rules that divide data; None if no `fit`
            runs or the run has one worker.
        common: State of Keras' global random generator at the start of the `fit`, equal on all
            workers; None if Keras has not created the generator.
    """

    place: WorkerPlace | None = None
    common: NDArray[np.integer[Any]] | None = None

    def begin(self, place: WorkerPlace) -> None:
        self.place, self.common = place, None
        if (generator := _generator()) is not None:
            self.common = generator.state.numpy()
            generator.state.assign(self.common + np.uint32(place.worker - 1))

    def new_generator(self, place: WorkerPlace) -> keras.random.SeedGenerator:
        """Return a random generator that differs by worker; its seed is a draw from `random`."""
        seed = seed_generator.make_default_seed()
        self.common = np.array([seed, 0])
        return keras.random.SeedGenerator(seed + place.worker - 1)

    def end(self) -> None:
        """Reset Keras' generator so that it draws the same numbers on all workers again.

        Workers may have drawn different counts of numbers, so the new state of Keras' generator
        depends only on `common`, its state before the `fit`. The new state of the generator skips
        the n states from which the n workers started, so that no worker's next `fit` repeats
        numbers of another worker. If this worker drew no random number in `fit`, the new state of
        Keras' generator is `common`, as in a script without Thinwire.
        """
        place, common, generator = self.place, self.common, _generator()
        self.place = None
        if place is not None and common is not None and generator is not None:
            has_drawn = np.any(generator.state.numpy() != common + np.uint32(place.worker - 1))
            generator.state.assign(common + np.uint32(place.num_workers if has_drawn else 0))


_FIT = _FitOfThread()


@contextlib.contextmanager
def own_randomness(place: WorkerPlace) -> Iterator[None]:
    """Make random ops draw different numbers on each worker within the `with` block.

    The launcher gives all workers the same seed, so that the script draws the same numbers on all
    workers. With equal seeds in `fit`, each worker would draw the same noise, for example in
    Dropout. Within the `with` block of `own_randomness`, worker 1 draws the numbers that the script
    would draw without Thinwire. After the `with` block of `own_randomness`, all workers draw equal
    random numbers again. `own_randomness` does not change the seeds of a model's layers.

    Args:
        place: This worker's number in the run, and the rules that divide the training data among
            workers.
    """
    if place.num_workers == 1:
        yield
        return
    _watch_generator()
    tensorflow, seed = context.context(), context.global_seed()
    _FIT.begin(place)
    # functions traced in `fit` take the seeds of their random ops from this global seed
    if seed is not None:
        tensorflow._seed = own_seed(seed, place.worker)
    try:
        yield
    finally:
        tensorflow._seed = seed
        _FIT.end()


def _generator() -> Any:
    """Return Keras' global random generator; None if nothing has drawn from the generator yet."""
    return global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)


@functools.cache
def _watch_generator() -> None:
    """Patch Keras so that its global random generator, if created within `fit`, differs by worker.

    Keras creates its global generator at the first draw and takes the generator's seed from
    Python's `random`. Initial weights of later models take their seeds from Python's `random`, like
    Keras' global generator. So Thinwire must not create Keras' generator earlier than the script
    does. The patch of Keras' generator takes effect at the generator's first draw.
    `_watch_generator` patches Keras only once per process.
    """
    original = seed_generator.global_seed_generator

    @functools.wraps(original)
    def global_seed_generator() -> Any:
        if _generator() is None and _FIT.place is not None:
            new = _FIT.new_generator(_FIT.place)
            global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, new)
        return original()

    seed_generator.global_seed_generator = global_seed_generator
