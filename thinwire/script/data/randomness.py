"""What a worker draws at random during `fit`: something else than the others."""

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
    """The `fit` of this thread.

    Attributes:
        place: This worker's; None: there is no `fit`, or one worker.
        common: State of Keras' global generator that all workers have alike; None: Keras has no
            generator so far.
    """

    place: WorkerPlace | None = None
    common: NDArray[np.integer[Any]] | None = None

    def begin(self, place: WorkerPlace) -> None:
        self.place, self.common = place, None
        if (generator := _generator()) is not None:
            self.common = generator.state.numpy()
            generator.state.assign(self.common + np.uint32(place.worker - 1))

    def new_generator(self, place: WorkerPlace) -> keras.random.SeedGenerator:
        """Return a generator that differs by worker, at the cost of the same random numbers."""
        seed = seed_generator.make_default_seed()
        self.common = np.array([seed, 0])
        return keras.random.SeedGenerator(seed + place.worker - 1)

    def end(self) -> None:
        """Let the generator draw the same numbers on all workers.

        How often each worker drew from it may differ. The seeds that the others had in this `fit`
        are left out: no worker draws in the next one what another has drawn in this. Where nothing
        drew, the script draws behind its `fit` what it would alone.
        """
        place, common, generator = self.place, self.common, _generator()
        self.place = None
        if place is not None and common is not None and generator is not None:
            has_drawn = np.any(generator.state.numpy() != common + np.uint32(place.worker - 1))
            generator.state.assign(common + np.uint32(place.num_workers if has_drawn else 0))


_FIT = _FitOfThread()


@contextlib.contextmanager
def own_randomness(place: WorkerPlace) -> Iterator[None]:
    """Let random ops draw other numbers than on the other workers.

    The launcher seeds all workers alike, so that a script's own draws agree. Within `fit` that
    would give each worker the same noise. Worker 1 draws what the script alone would. Afterwards
    all workers agree again. The seeds of a model's layers are not among these.

    Args:
        place: This worker's.
    """
    if place.num_workers == 1:
        yield
        return
    _watch_generator()
    tensorflow, seed = context.context(), context.global_seed()
    _FIT.begin(place)
    if seed is not None:  # what is traced in `fit` takes its seeds from it
        tensorflow._seed = own_seed(seed, place.worker)
    try:
        yield
    finally:
        tensorflow._seed = seed
        _FIT.end()


def _generator() -> Any:
    """Return Keras' global generator; None: nothing has drawn from it so far."""
    return global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)


@functools.cache
def _watch_generator() -> None:
    """Vary a global generator that Keras makes within a `fit`; once for the process.

    Keras makes it where something first draws from it. Its seed comes from Python's `random`, from
    which later models have their initial weights. So it is not made before a script needs it.
    """
    alone = seed_generator.global_seed_generator

    @functools.wraps(alone)
    def global_seed_generator() -> Any:
        if _generator() is None and _FIT.place is not None:
            new = _FIT.new_generator(_FIT.place)
            global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, new)
        return alone()

    seed_generator.global_seed_generator = global_seed_generator
