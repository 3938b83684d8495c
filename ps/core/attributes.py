"""Saves and restores attributes of the core's parts by name, for their soft state."""

from __future__ import annotations

from collections.abc import Iterable

from thinwire.ops.types import State


def saved(part: object, names: Iterable[str]) -> State:
    """Return the values of the named attributes; the keys are the names without leading "_"."""
    return {name.lstrip("_"): getattr(part, name) for name in names}


def restore(part: object, names: Iterable[str], state: State) -> None:
    """Set the named attributes to the values in a state that `saved` returned."""
    for name in names:
        setattr(part, name, state[name.lstrip("_")])
