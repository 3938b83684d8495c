"""What a running shard knows beyond its durable state: who is here, and what is under way.

A shard that comes back forgets it and finds it out anew. A journal is replayed over it, so that the
same events find the same shard.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from thinwire.ops.types import State
from thinwire.ps.core.plain import from_plain, to_plain

if TYPE_CHECKING:
    from thinwire.ps.core.core import PsCore

#: Parts of the core, and their attributes that are settings, or parts by themselves.
_PARTS: dict[str, tuple[str, ...]] = {
    "": (
        *("config", "membership", "sync", "model", "aux", "accounts", "deadlines"),
        *("state_server", "regrouping", "_oldest_base", "guard"),
    ),
    "membership": (),
    "accounts": ("groups",),
    "accounts.groups": (),
    "deadlines": ("_config", "_accounts"),
    "state_server": ("_pacer",),
    "regrouping": ("_auto", "_nb_workers"),
    "_oldest_base": (),
    "guard": ("policy",),
}


def save(core: PsCore) -> State:
    """Return everything that `durable.save` leaves out, as plain data; arrays are not copied.

    None of these arrays is ever changed, so that they may be written by another thread.
    """
    parts = {
        path: {name: to_plain(value) for name, value in vars(part).items() if name not in fixed}
        for path, part, fixed in _parts(core)
    }
    return {
        "parts": parts,
        "groups": to_plain(core.sync.groups),
        "model": to_plain(core.model.save_under_way()),
    }


def restore(core: PsCore, state: State) -> None:
    """Bring a core that has its durable state back to exactly where it was."""
    for path, part, _ in _parts(core):
        for name, value in state["parts"][path].items():
            setattr(part, name, from_plain(value))
    core.sync = dataclasses.replace(core.sync, groups=from_plain(state["groups"]))
    core.model.restore_under_way(from_plain(state["model"]))


def _parts(core: PsCore) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    for path, fixed in _PARTS.items():
        part: Any = core
        for name in path.split(".") if path else ():
            part = getattr(part, name)
        yield path, part, fixed
