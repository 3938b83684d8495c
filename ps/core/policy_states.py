"""Saved states of policies (weighting, optimizer and codecs): nested dicts and lists of arrays."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.ops.frozen import Keep
from thinwire.ops.types import State

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Key of the working memory in a policy's state. Snapshots omit the working memory.
_SCRATCH = "scratch"


def have_one_form(one: Any, other: Any) -> bool:
    """Return whether two saved states have the same keys and array shapes, at any depth.

    >>> have_one_form({"steps": 3, "slots": {}}, {"steps": 0, "slots": {}})
    True
    >>> have_one_form({"velocity": np.zeros(2)}, {})
    False
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            have_one_form(one[key], other[key]) for key in one
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(have_one_form, one, other))
    shapes = [getattr(value, "shape", None) for value in (one, other)]
    return shapes[0] == shapes[1] and not isinstance(one, dict) and not isinstance(other, dict)


def without_set_rate(state: Any) -> Any:
    """Return an optimizer's saved state without the learning rates that a script has set."""
    if not isinstance(state, dict):
        return state
    return {
        key: None if key == "set_rate" else without_set_rate(value) for key, value in state.items()
    }


def durable(state: Any, keep: Keep) -> Any:
    """Return the part of a policy's state that checkpoints store: all except the working memory."""
    if isinstance(state, dict):
        return {key: durable(value, keep) for key, value in state.items() if key != _SCRATCH}
    if isinstance(state, (list, tuple)):
        return type(state)(durable(value, keep) for value in state)
    return keep(state) if isinstance(state, np.ndarray) else copy.deepcopy(state)


def of_workers(state: State) -> State:
    """Return the dicts, but not the arrays, in a policy's working memory; only dicts affect
    replies.
    """
    memory: State = {}
    for key, value in state.items():
        if key == _SCRATCH:
            memory[key] = {name: item for name, item in value.items() if isinstance(item, dict)}
        elif isinstance(value, dict) and (inner := of_workers(value)):
            memory[key] = inner
    return memory


def take_back(state: State, saved: State) -> None:
    """Copy a saved policy state into a new state in place; keep the new state's working memory."""
    for key, value in saved.items():
        if isinstance(value, dict) and isinstance(state.get(key), dict):
            take_back(state[key], value)
        else:
            state[key] = value


def num_bytes(state: Any) -> int:
    """Return the size of all arrays in a policy's state, in bytes."""
    return sum(array.nbytes for array in arrays_in(state))


def arrays_in(state: Any) -> Iterator[NDArray[Any]]:
    """Yield all arrays in a policy's state, at any depth."""
    if isinstance(state, np.ndarray):
        yield state
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    for part in parts:
        yield from arrays_in(part)
