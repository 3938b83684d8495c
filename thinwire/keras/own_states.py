"""Variables of a script that a run does not share, and whether training changes them.

An evaluator runs the script from its start and trains nothing, so it has the first values of such
variables: a weight of the loss that grows, a teacher that follows the model, a codebook. They may
stand anywhere in the script. So all variables of the process are compared, apart from those that an
evaluation does not read: states of optimizers, metrics and random numbers, and Thinwire's own.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

#: Of a larger variable evenly spaced entries are compared. Training that changes one of its entries
#: changes most of them.
_MOST_COMPARED = 1_000_000
#: How Keras names the state of a generator of random numbers, which Dropout draws from.
_RANDOM_STATE = "seed_generator_state"
#: Variables of this package have names that begin so.
OWN_PREFIX = "thinwire_"


class OwnStates:
    """Compares the values that a `fit` began with to the present ones."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, int]] = []  # a variable, and the checksum of its first value

    def forget(self) -> None:
        """Compare nothing."""
        self._known = []

    def begin(self, model: keras.Model, shared: Iterable[Any]) -> None:
        """Keep what the variables of a model, and all others of the process, have now.

        Args:
            model: That the `fit` trains.
            shared: Variables that an evaluator gets from the run.
        """
        left_out = {id(each) for each in shared}
        variables = {id(each): each for each in (*model.non_trainable_weights, *of_process())}
        self._known = [
            (each, _checksum(each)) for key, each in variables.items() if key not in left_out
        ]

    def changed(self) -> list[str]:
        """Return the paths of the variables that have other values now."""
        return [_path(each) for each, before in self._known if _checksum(each) != before]


def of_process() -> Iterator[Any]:
    """Yield the variables of this process that an evaluation may read, Keras' and TensorFlow's."""
    of_keras, of_tensorflow, unread = [], [], set()
    for each in gc.get_objects():
        kind = type(each)
        if issubclass(kind, keras.Variable):
            of_keras.append(each)
        elif issubclass(kind, tf.Variable):
            of_tensorflow.append(each)
        elif issubclass(kind, keras.Metric | keras.optimizers.Optimizer):
            unread |= {id(variable) for variable in each.variables}
    inner = {id(each._value) for each in of_keras}
    for each in of_keras:
        is_random = each.name == _RANDOM_STATE or each.name.startswith(OWN_PREFIX)
        if each._value is not None and id(each) not in unread and not is_random:
            yield each
    for each in of_tensorflow:
        if id(each) not in inner and not each.name.startswith(OWN_PREFIX):
            yield each


def _checksum(variable: Any) -> int:
    values = np.ravel(np.asarray(variable.numpy()))
    if values.size > _MOST_COMPARED:
        values = values[:: -(-values.size // _MOST_COMPARED)]
    return zlib.crc32(np.ascontiguousarray(values).tobytes())


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name))
