"""Detects variables that training changes although the workers do not share them.

An evaluator runs the script from its start and trains nothing, so its unshared variables keep their
first values. Examples of unshared variables are a loss weight that grows, a teacher that follows
the model, and a codebook. Unshared variables may be anywhere in the script, so all variables of the
process are compared. The comparison leaves out variables that an evaluation does not read: states
of optimizers, metrics and random number generators, and Thinwire's own variables.
"""

from __future__ import annotations

import gc
import sys
import weakref
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

#: Largest number of entries of a variable that are compared. Of a larger variable, evenly spaced
#: entries are compared, because training that changes one entry changes most entries.
_MOST_COMPARED = 1_000_000
#: Keras' name of the variable with a random number generator's state, for example in Dropout.
_RANDOM_STATE = "seed_generator_state"
#: Names which, in the code of a loss or a metric, show that the code reads an optimizer.
_OPTIMIZER_NAMES = frozenset({"optimizer", "opt", "learning_rate", "iterations"})
#: Prefix of the names of Thinwire's own variables.
OWN_PREFIX = "thinwire_"


class OwnStates:
    """Checksums of unshared variables at the first `fit`, to detect changes during training."""

    def __init__(self) -> None:
        # Maps the id of a variable to the variable and the checksum of its value at the first
        # `fit`.
        self._first: dict[int, tuple[weakref.ref[Any], int]] = {}

    @property
    def has_begun(self) -> bool:
        """True if the values of unshared variables have been recorded."""
        return bool(self._first)

    def begin(self, model: keras.Model, shared: Iterable[Any]) -> None:
        """Record the present values of all unshared variables of the process.

        A variable that is recorded already keeps its first recorded value, which is the value in
        the evaluator.

        Args:
            model: Keras model that the `fit` trains.
            shared: Variables that an evaluator loads from the shards; they are not recorded.
        """
        left_out = {id(variable) for variable in shared}
        for variable in (*model.non_trainable_weights, *of_process()):
            known = self._first.get(id(variable))
            if id(variable) not in left_out and (known is None or known[0]() is not variable):
                self._first[id(variable)] = weakref.ref(variable), _checksum(variable)

    def changed(self, shared: Iterable[Any]) -> list[str]:
        """Return the paths of the unshared variables that differ from their first recorded values.

        Args:
            shared: Variables that an evaluator loads from the shards in the present `fit`.
        """
        left_out, changed = {id(variable) for variable in shared}, []
        for number, (reference, before) in list(self._first.items()):
            variable = reference()
            if variable is None:
                del self._first[number]
            elif number not in left_out and _checksum(variable) != before:
                changed.append(_path(variable))
        return changed


def of_process() -> Iterator[Any]:
    """Yield the Keras and TensorFlow variables of this process that an evaluation may read."""
    of_keras, of_tensorflow, unread = [], [], set()
    tensorflow = sys.modules.get("tensorflow")
    kind_of_tensorflow: Any = () if tensorflow is None else tensorflow.Variable
    for candidate in gc.get_objects():
        kind = type(candidate)
        if issubclass(kind, keras.Variable):
            of_keras.append(candidate)
        elif issubclass(kind, kind_of_tensorflow):
            of_tensorflow.append(candidate)
        elif issubclass(kind, keras.Metric | keras.optimizers.Optimizer):
            unread |= {id(variable) for variable in candidate.variables}
    inner = {id(variable._value) for variable in of_keras}
    for candidate in of_keras:
        is_random = candidate.name == _RANDOM_STATE or candidate.name.startswith(OWN_PREFIX)
        if candidate._value is not None and id(candidate) not in unread and not is_random:
            yield candidate
    for candidate in of_tensorflow:
        if id(candidate) not in inner and not candidate.name.startswith(OWN_PREFIX):
            yield candidate


def _checksum(variable: Any) -> int:
    values = np.ravel(np.asarray(variable.numpy()))
    if values.size > _MOST_COMPARED:
        values = values[:: -(-values.size // _MOST_COMPARED)]
    return zlib.crc32(np.ascontiguousarray(values).tobytes())


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name))


def reads_optimizer(model: Any) -> bool:
    """Return True if a loss or a metric of a model may read an optimizer.

    For example, a metric may show the learning rate, or the weight of a loss may grow with
    `iterations`. An evaluator's optimizers have wrong values, because optimizers step only on the
    workers and the PS. To find reads of an optimizer, the code of losses and metrics is searched
    for names like "optimizer", but not run.

    Args:
        model: Keras model of the script, compiled or not.
    """
    loss, metrics = getattr(model, "_compile_loss", None), getattr(model, "_compile_metrics", None)
    functions = [
        getattr(loss, "_user_loss", None),
        getattr(metrics, "_user_metrics", None),
        getattr(metrics, "_user_weighted_metrics", None),
    ]
    return any(_names(function) & _OPTIMIZER_NAMES for function in keras.tree.flatten(functions))


def _names(given: Any) -> set[str]:
    """Return the names in the code of a function, or of a script's loss class or metric class."""
    if isinstance(given, keras.losses.Loss | keras.Metric):
        methods = [] if type(given).__module__.startswith("keras.") else vars(type(given)).values()
        functions = [*methods, getattr(given, "fn", None), getattr(given, "_fn", None)]
    else:
        functions = [given]
    codes = [getattr(function, "__code__", None) for function in functions]
    return {name for code in codes if code for name in (*code.co_names, *code.co_freevars)}
