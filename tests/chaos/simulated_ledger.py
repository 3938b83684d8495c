"""What one simulated shard really did, written down beside it, and what must follow from that.

Nothing here goes through the product's journal or snapshots: what a life did is noted as it is
done, and what a restart has to bring back is worked out from that alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from thinwire.ops.types import State, Update
from thinwire.ops.weighting.base import Arrival
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.model import model_for

#: Of the durable state: what a shard that comes back has bit for bit as the one that died.
COMES_BACK = (*("model", "scheduler", "members", "averages", "counters", "guard", "quarantine"),)
#: Of the model: what follows from the pushes alone.
FOLLOWS = ("version", "samples", "theta", "optimizer", "weighting", "backups")

Key = tuple[int, int, int]  # worker, incarnation, step


@dataclasses.dataclass(frozen=True)
class Applied:
    """One release."""

    pushes: tuple[tuple[Key, int, Update], ...]  # whose, base version, and the update as it came
    oldest_base: int
    version: int  # that it made, or left
    samples: int  # before


@dataclasses.dataclass(frozen=True)
class Handed:
    """What a worker was told."""

    worker: int
    version: int


@dataclasses.dataclass(frozen=True)
class Forgot:
    """A worker that has left."""

    worker: int


class Fork(AssertionError):
    """A shard is not what its own past makes of it."""


class Ledger:
    """The past of one shard.

    Attributes:
        entries: What happened to the model, in order, as far as it still counts.
        num_restarts: How often it came back.
    """

    def __init__(self, number: int, keeps_journal: bool) -> None:
        self.number, self.keeps_journal = number, keeps_journal
        self.entries: list[Applied | Handed | Forgot] = []
        self.thetas: dict[tuple[int, int], bytes] = {}  # (generation, version) -> weights
        self.held: dict[tuple[int, int, int], bytes] = {}  # (worker, generation, version) -> copy
        self.marks: dict[int, tuple[State, int]] = {}  # id of a snapshot's state -> (it, entries)
        self.on_disk = 0  # entries that the newest whole snapshot holds
        self.heard: dict[int, int] = {}  # generation -> the highest version a reply brought
        self.num_undone = 0  # updates that restarts have undone ...
        self.num_acknowledged_undone = 0  # ... and workers had heard of
        self.num_restarts = 0
        self.undone: set[Key] = set()
        self.tolerates_end = False  # the disk was full: the last answers are not in the journal
        self._core: PsCore | None = None

    @property
    def applied(self) -> list[Applied]:
        return [entry for entry in self.entries if isinstance(entry, Applied)]

    # -- writing down -----------------------------------------------------------------------

    def begin(self, core: PsCore) -> None:
        """Compare what came back with what had been, and note what it does from now on."""
        before, self._core = self._core, core
        if before is not None:
            self.num_restarts += 1
            self._compare(before, core)
        self._note_calls(core)

    def _compare(self, before: PsCore, core: PsCore) -> None:
        if self.keeps_journal:
            was, now = before.state_dict(), core.state_dict()
            what = ("scheduler", "members", "model") if self.tolerates_end else COMES_BACK
            for name in what:
                one, other = was[name], now[name]
                if name == "model" and self.tolerates_end:
                    one, other = ({key: each[key] for key in FOLLOWS} for each in (one, other))
                same(one, other, f"shard {self.number} after restart {self.num_restarts}: {name}")
            if before.groups != core.groups:
                raise Fork(f"shard {self.number}: {before.groups} became {core.groups}")
        else:
            gone = [each for each in self.entries[self.on_disk :] if isinstance(each, Applied)]
            self.undone |= {key for entry in gone for key, _, _ in entry.pushes}
            del self.entries[self.on_disk :]
            heard = self.heard.get(before.config.generation, 0)
            self.num_acknowledged_undone += max(0, heard - core.version)
            self.num_undone += before.version - core.version
        versions = [entry.version for entry in self.applied]
        if (versions[-1] if versions else 0) != core.version:
            raise Fork(f"shard {self.number} is at {core.version}, it had applied {versions[-1:]}")

    def _note_calls(self, core: PsCore) -> None:
        model, apply, record_reply = core.model, core.model.apply, core.model.record_reply
        state_dict, forget = core.state_dict, core.model.forget
        kind = type(core)
        generation = core.config.generation

        def noted_apply(arrivals: list[Arrival], oldest_base: int) -> list[Arrival]:
            samples = model.samples
            pushes = tuple((self._key(core, a), a.base_version, a.update) for a in arrivals)
            kept = apply(arrivals, oldest_base)
            self.entries.append(Applied(pushes, oldest_base, model.version, samples))
            self.thetas[generation, model.version] = model.theta.tobytes()
            return kept

        def noted_reply(worker: int, handed: Any) -> None:
            record_reply(worker, handed)
            self.entries.append(Handed(worker, handed.version))
            copy = model._copy_of(worker, handed.version)
            known = model.theta if copy is None else copy
            self.held[worker, generation, handed.version] = known.tobytes()

        def noted_forget(worker: int) -> None:
            forget(worker)
            self.entries.append(Forgot(worker))

        def noted_state_dict(core: PsCore, soft: bool = False) -> State:
            state = state_dict(soft)
            if not soft:
                self.marks[id(state)] = (state, len(self.entries))
            return state

        model.apply, model.record_reply = noted_apply, noted_reply  # type: ignore[method-assign]
        model.forget = noted_forget  # type: ignore[method-assign]
        # Of its class: what a core knows is written down by its attributes.
        core.__class__ = type(kind.__name__, (kind,), {"state_dict": noted_state_dict})

    def _key(self, core: PsCore, arrival: Arrival) -> Key:
        return (arrival.worker, core.incarnation_of(arrival.worker), arrival.step)

    def note_saved(self, state: State) -> None:
        """Hear that a snapshot is whole on disk."""
        self.on_disk = self.marks[id(state["core"])][1]
        self.marks = {key: mark for key, mark in self.marks.items() if mark[1] >= self.on_disk}

    # -- what must be true --------------------------------------------------------------------

    def check_losses(self, counted: int) -> None:
        """What the shard counts as lost is what restarts have undone, and no acknowledged less."""
        if counted != self.num_undone or self.num_acknowledged_undone > counted:
            raise Fork(
                f"shard {self.number} counts {counted} lost updates; {self.num_undone} were "
                f"undone, {self.num_acknowledged_undone} of them acknowledged"
            )

    def check_once(self) -> None:
        """No (worker, step) was applied twice, in whichever life."""
        seen: set[tuple[int, int]] = set()
        for entry in self.applied:
            for (worker, _, step), _, _ in entry.pushes:
                if (worker, step) in seen:
                    raise Fork(f"shard {self.number} applied step {step} of worker {worker} twice")
                seen.add((worker, step))

    def check_replay(self, theta: np.ndarray, sent: dict[Key, Update] | None) -> None:
        """A fresh model that is told the same, without any fault, comes to the same bits.

        Args:
            theta: Initial weights of the shard.
            sent: What workers say that they sent; None: take what arrived.
        """
        core = self._core
        fresh = model_for(core.model.method, theta.copy(), core.model.kernels, core.config)
        for entry in self.entries:
            if isinstance(entry, Handed):
                fresh.record_reply(entry.worker, _Told(entry.version))
                continue
            if isinstance(entry, Forgot):
                fresh.forget(entry.worker)
                continue
            fresh.samples = entry.samples
            arrivals = [
                Arrival(key[0], update if sent is None else sent[key], base, key[2])
                for key, base, update in entry.pushes
            ]
            fresh.apply(arrivals, entry.oldest_base)
        fresh.count(core.model.samples - fresh.samples)
        one, other = fresh.state_dict(soft=False), core.model.state_dict(soft=False)
        for name in FOLLOWS:
            same(one[name], other[name], f"shard {self.number}: {name}")


@dataclasses.dataclass(frozen=True)
class _Told:
    """What `record_reply` looks at."""

    version: int
    kind: str = "full"
    is_resync: bool = False


def same(one: Any, other: Any, where: str) -> None:
    """Compare plain data, bit for bit.

    Raises:
        Fork: They differ; the message says where.
    """
    if isinstance(one, dict):
        if sorted(map(str, one)) != sorted(map(str, other)):
            raise Fork(f"{where}: {sorted(map(str, one))} is not {sorted(map(str, other))}")
        for key in one:
            same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            raise Fork(f"{where}: {one} is not {other}")
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            same(left, right, f"{where}[{number}]")
    elif isinstance(one, np.ndarray):
        if one.dtype != other.dtype or one.tobytes() != other.tobytes():
            raise Fork(f"{where}: {one} is not {other}")
    elif one != other:
        raise Fork(f"{where}: {one!r} is not {other!r}")
