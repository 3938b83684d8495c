"""Variables of a script that a run does not share, and whether training changes them.

An evaluator runs the script from its start and trains nothing, so it has the first values of such
variables: a weight of the loss that grows, a teacher that follows the model, a codebook. They may
stand anywhere in the script. So all variables of the process are compared, apart from those that an
evaluation does not read: states of optimizers, metrics and random numbers, and Thinwire's own.
"""

from __future__ import annotations

import gc
import weakref
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
#: What a loss or a metric refers to that reads an optimizer.
_OPTIMIZER_NAMES = frozenset({"optimizer", "opt", "learning_rate", "iterations"})
#: Variables of this package have names that begin so.
OWN_PREFIX = "thinwire_"


class OwnStates:
    """Compares the values that variables had when a `fit` first saw them to the present ones."""

    def __init__(self) -> None:
        # By identity: a variable, and the checksum of the value that it had first.
        self._first: dict[int, tuple[weakref.ref[Any], int]] = {}

    @property
    def has_begun(self) -> bool:
        """Whether any variable is known."""
        return bool(self._first)

    def begin(self, model: keras.Model, shared: Iterable[Any]) -> None:
        """Keep what the variables of a model, and all others of the process, have now.

        Those that are known already keep their first value: an evaluator has that one.

        Args:
            model: That the `fit` trains.
            shared: Variables that an evaluator gets from the run.
        """
        left_out = {id(each) for each in shared}
        for each in (*model.non_trainable_weights, *of_process()):
            known = self._first.get(id(each))
            if id(each) not in left_out and (known is None or known[0]() is not each):
                self._first[id(each)] = weakref.ref(each), _checksum(each)

    def changed(self, shared: Iterable[Any]) -> list[str]:
        """Return the paths of the variables that have other values now.

        Args:
            shared: As `begin`, of the present `fit`.
        """
        left_out, changed = {id(each) for each in shared}, []
        for number, (reference, before) in list(self._first.items()):
            variable = reference()
            if variable is None:
                del self._first[number]
            elif number not in left_out and _checksum(variable) != before:
                changed.append(_path(variable))
        return changed


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


def reads_optimizer(model: Any) -> bool:
    """Return whether a loss or a metric of a model may read its optimizer, which trains here alone.

    A metric that shows the learning rate does, and a loss whose weight grows with `iterations`.
    What their code names is looked at, not what it does.

    Args:
        model: Compiled, or not.
    """
    loss, metrics = getattr(model, "_compile_loss", None), getattr(model, "_compile_metrics", None)
    given = [
        getattr(loss, "_user_loss", None),
        getattr(metrics, "_user_metrics", None),
        getattr(metrics, "_user_weighted_metrics", None),
    ]
    return any(_names(each) & _OPTIMIZER_NAMES for each in keras.tree.flatten(given))


def _names(given: Any) -> set[str]:
    """Return the names that a function, or the methods of a class of the script, refer to."""
    if isinstance(given, keras.losses.Loss | keras.Metric):
        methods = [] if type(given).__module__.startswith("keras.") else vars(type(given)).values()
        functions = [*methods, getattr(given, "fn", None), getattr(given, "_fn", None)]
    else:
        functions = [given]
    codes = [getattr(each, "__code__", None) for each in functions]
    return {name for code in codes if code for name in (*code.co_names, *code.co_freevars)}
