"""Lets random numbers differ between workers in Keras' `fit`, and be equal outside of `fit`.

The random numbers are those of Keras on every backend, and those of TensorFlow and PyTorch in
scripts that use them. The module imports neither TensorFlow nor PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random import seed_generator

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
    with _own_tensorflow_seed(place), _own_torch_numbers(place):
        _FIT.begin(place)
        try:
            yield
        finally:
            _FIT.end()


@contextlib.contextmanager
def _own_tensorflow_seed(place: WorkerPlace) -> Iterator[None]:
    """Give TensorFlow, if the script has imported it, a global seed that differs by worker."""
    module = sys.modules.get("tensorflow.python.eager.context")
    if module is None:
        yield
        return
    tensorflow, seed = module.context(), module.global_seed()
    # Functions traced in `fit` take the seeds of their random ops from this global seed.
    if seed is not None:
        tensorflow._seed = own_seed(seed, place.worker)
    try:
        yield
    finally:
        tensorflow._seed = seed


@contextlib.contextmanager
def _own_torch_numbers(place: WorkerPlace) -> Iterator[None]:
    """Let PyTorch's default generators, if the script uses PyTorch, differ by worker.

    Worker 1 draws the numbers that the script would draw without Thinwire. At the end, the state of
    each generator depends only on its state before the `fit`. If the generator has drawn nothing,
    it gets this state back. With PyTorch as its backend, Keras draws a number for each pass over
    validation data, which not all workers read. So the generators then always get a new state.
    """
    generators = _torch_generators()
    common = [generator.get_state() for generator in generators]
    seeds = [_seed_of(state) for state in common]
    if place.worker > 1:
        for generator, seed in zip(generators, seeds, strict=True):
            generator.manual_seed(own_seed(seed, place.worker))
    begun = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        has_drawn = keras.backend.backend() == "torch"
        for generator, seed, state, start in zip(generators, seeds, common, begun, strict=True):
            if has_drawn or _seed_of(generator.get_state()) != _seed_of(start):
                generator.manual_seed(own_seed(seed, place.num_workers + 1))
            else:
                generator.set_state(state)
        # GPUs that the script first used in `fit`
        for generator in _torch_generators()[len(generators) :] if generators else ():
            generator.manual_seed(own_seed(seeds[0], place.num_workers + 1))


def _torch_generators() -> list[Any]:
    """Return the default generators of PyTorch for the processor and for each GPU in use."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *gpus]


def _seed_of(state: Any) -> int:
    """Return a seed that depends on the whole state of a generator of PyTorch."""
    return int.from_bytes(hashlib.sha256(state.numpy().tobytes()).digest()[:4])


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
