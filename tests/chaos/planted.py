"""Planted bugs for the chaos tests: each bug patches classes of the product.

A plant is a function that patches classes within a context; the product does not know the plants.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from thinwire.ops.aggregation.aggregates import Mean
from thinwire.ops.optimizers.momentum_sgd import MomentumSGD
from thinwire.ops.sync.rounds import Rounds
from thinwire.ops.sync.rule import GroupSync
from thinwire.ops.types import Update
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.membership import FollowerMembership
from thinwire.ps.persistence.journal import JournaledCore
from thinwire.runtime.run.lock import DirectoryLock
from thinwire.worker.core.core import WorkerCore

#: (class, name of its method, what takes its place, called with the method first).
Patch = tuple[type, str, Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class Plant:
    """A bug.

    Attributes:
        patches: Returns new patches at each call.
        promises: A finding of any of these is of this bug.
        simulated: Whether it can show on a virtual clock.
    """

    patches: Callable[[], list[Patch]]
    promises: frozenset[str]
    simulated: bool = True

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the bug within this context."""
        with contextlib.ExitStack() as stack:
            for owner, name, around in self.patches():
                outer = _around(getattr(owner, name), around)
                stack.enter_context(mock.patch.object(owner, name, outer))
            yield

    def install(self) -> None:
        """Have the bug for as long as this process lives."""
        for owner, name, around in self.patches():
            setattr(owner, name, _around(getattr(owner, name), around))


def _around(inner: Any, around: Callable[..., Any]) -> Any:
    @functools.wraps(inner)
    def outer(owner: Any, *arguments: Any, **named: Any) -> Any:
        return around(inner, owner, *arguments, **named)

    return outer


def context(name: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return what makes the context of a plant; "" plants nothing."""
    return PLANTS[name].in_place if name else contextlib.nullcontext


PLANTS: dict[str, Plant] = {}


def _plant(
    *promises: str, simulated: bool = True
) -> Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]:
    def add(patches: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        name = patches.__name__.strip("_").replace("_", "-")
        PLANTS[name] = Plant(patches, frozenset(promises), simulated)
        return patches

    return add


@_plant("kept")
def _lost_after_the_acknowledgement() -> list[Patch]:
    """Every seventh round of a shard is answered and not applied."""
    counts: dict[int, int] = {}

    def release(inner: Any, core: PsCore, arrivals: Any, now: float) -> Any:
        counts[id(core)] = counts.get(id(core), 0) + 1
        if counts[id(core)] % 7:
            return inner(core, arrivals, now)
        core._members.take_submitted(arrivals)
        return []

    return [(PsCore, "_release", release)]


@_plant("once")
def _applied_twice() -> list[Patch]:
    """A push that comes once more counts once more."""

    def forget(core: PsCore, push: events.Push) -> None:
        member = core._members.get(push.worker)
        if member is not None and push.head.step == member.last_step and member.waiting is None:
            member.last_step -= 1

    # The table of handlers holds the functions themselves.
    def handle(inner: Any, core: PsCore, event: Any, now: float) -> Any:
        if isinstance(event, events.Push):
            forget(core, event)
        return inner(core, event, now)

    return [(PsCore, "handle", handle)]


@_plant("weights")
def _stale_divisor() -> list[Patch]:
    """A mean is divided by the most workers that there ever were."""
    most = [1]

    def merge(inner: Any, mean: Mean, updates: Any, size: int) -> Update:
        most[0] = max(most[0], len(updates))
        found: Update = inner(mean, updates, size)
        factor = np.float32(len(updates) / most[0])
        return Update(found.indices, found.values * factor)

    return [(Mean, "merge", merge)]


@_plant("bound", "rule")
def _bound_off_by_one() -> list[Patch]:
    """Workers may be one iteration further ahead than configured."""

    def may_proceed(inner: Any, rule: GroupSync, rounds: Rounds, worker: int) -> bool:
        later = rule if rule.bound is None else dataclasses.replace(rule, bound=rule.bound + 1)
        return bool(inner(later, rounds, worker))

    return [(GroupSync, "may_proceed", may_proceed)]


@_plant("kept", "weights", "versions")
def _snapshot_without_its_last_record() -> list[Patch]:
    """A snapshot lacks the last event, and the journal continues after this event."""
    before: dict[int, Any] = {}

    def handle(inner: Any, journaled: JournaledCore, event: Any, now: float) -> Any:
        before[id(journaled)] = journaled.core.state_dict()
        return inner(journaled, event, now)

    def consistent(inner: Any, journaled: JournaledCore, state: Any) -> Any:
        del inner
        return before.get(id(journaled), state)

    return [(JournaledCore, "handle", handle), (JournaledCore, "consistent", consistent)]


@_plant("residuals")
def _residual_restored_twice() -> list[Patch]:
    """A worker adds back its residual, although shards have applied updates that used it."""

    def restore(inner: Any, core: WorkerCore, state: Any, last_applied_step: int) -> Any:
        found = inner(core, state, state["step"])
        core.step = last_applied_step
        return found

    return [(WorkerCore, "restore", restore)]


@_plant("epochs")
def _epoch_skipped_by_one_shard() -> list[Patch]:
    """A following shard does not follow every third epoch."""

    def follow(inner: Any, member: FollowerMembership, epoch: Any, now: float) -> Any:
        return iter(()) if epoch.number % 3 == 0 else inner(member, epoch, now)

    return [(FollowerMembership, "follow", follow)]


@_plant("generations")
def _old_generation_accepted() -> list[Patch]:
    """A shard takes updates that were computed with a reply of a life before."""

    def usable_base(inner: Any, core: PsCore, held: Any) -> int | None:
        del inner, core
        base: int | None = held.base_version
        return base

    return [(PsCore, "_usable_base", usable_base)]


@_plant("generations")
def _reply_of_an_old_generation_accepted() -> list[Patch]:
    """A worker takes the last reply of a shard's former life for the first one of the next."""
    last: dict[tuple[int, int], Any] = {}

    def receive(inner: Any, core: WorkerCore, shard: int, reply: Any) -> None:
        old = last.get((id(core), shard), reply)
        last[id(core), shard] = reply
        inner(core, shard, old if old.generation < reply.generation else reply)

    return [(WorkerCore, "receive", receive)]


@_plant("weights")
def _momentum_of_a_lost_update_kept() -> list[Patch]:
    """A snapshot holds the velocity of when it is written, not of when it was taken."""

    def save(inner: Any, optimizer: MomentumSGD) -> Any:
        return inner(optimizer) | {"2": optimizer.velocity}

    return [(MomentumSGD, "save", save)]


@_plant("generations", simulated=False)
def _lock_that_is_not_held() -> list[Patch]:
    """A second process may write to the same files; the lock names the latest process."""

    def attempt(inner: Any, lock: DirectoryLock) -> bool:
        found: bool = inner(lock)
        if found and lock._descriptor is not None:
            fcntl.flock(lock._descriptor, fcntl.LOCK_UN)
        return found

    return [(DirectoryLock, "_try", attempt)]
