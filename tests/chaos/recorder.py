"""Records a history: hooks in the product's classes, for the Simulator and for real nodes.

A worker's requests and replies are recorded where `ShardProtocol` and `WorkerCore` handle them;
a shard's updates and replies where `JournaledCore` lets its core handle an event. Real streams
and the virtual clock run the same code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np

from tests.chaos.history import (
    Acknowledged,
    Arrived,
    BeganLife,
    Coded,
    Dropped,
    Ended,
    Followed,
    Forgot,
    Handed,
    Kept,
    Life,
    Made,
    Published,
    PutBack,
    Record,
    Released,
    Request,
    Restored,
    RuleCall,
    Snapshot,
    Took,
    Welcomed,
    digest,
)
from thinwire.ops.sharding.split import shard_positions
from thinwire.ops.sync.base import ArrivalToken, Draw, Joiners
from thinwire.ops.types import State, Update
from thinwire.ops.wire.low_rank import expanded
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.downlink import Downlink
from thinwire.ps.core.members import MemberTable
from thinwire.ps.core.model import ShardModel
from thinwire.ps.core.serialization import to_plain
from thinwire.ps.persistence.journal import JournaledCore
from thinwire.ps.persistence.replay import ReplaySettings
from thinwire.ps.wire.push_decoder import PushDecoder
from thinwire.simulator.exchange import SimulatedClient
from thinwire.simulator.shard import SimulatedShard
from thinwire.worker.client.protocol import ShardProtocol
from thinwire.worker.client.shard_client import ShardClient
from thinwire.worker.core.core import UpdatePacker, WorkerCore
from thinwire.worker.core.messages import PushRequest

#: Parts of a model's durable state that follow only from the applied updates.
FOLLOWS = ("version", "theta", "optimizer", "weighting")
#: Models larger than this are recorded by digests alone.
MOST_ENTRIES = 4096
_MUTATORS = (
    *("join", "leave", "submit", "withdraw", "follow", "expect", "release_late", "pause"),
    "regroup",
)


def follows(model: ShardModel) -> str:
    """Return the digest of the state that follows from a model's applied updates."""
    state = model.state_dict(soft=False)
    return digest([state[name] for name in FOLLOWS])


def backups(model: ShardModel) -> str:
    """Return the digest of the copies of workers' models."""
    return digest(model.state_dict(soft=False)["backups"])


def _plain(argument: Any) -> Any:
    """Return an argument of a rule's call as `checked_replay` reads it."""
    if isinstance(argument, ArrivalToken):
        return [argument.worker, argument.step]
    if isinstance(argument, tuple) and argument and isinstance(argument[0], Draw | Joiners):
        return [dataclasses.asdict(each) for each in argument]
    if isinstance(argument, Mapping):
        return {"steps": [list(pair) for pair in argument.items()]}
    return argument


class RecordingRounds:
    """Rounds that record the calls to them; otherwise they equal the wrapped rounds."""

    def __init__(self, rounds: Any, write: Callable[..., None]) -> None:
        self._rounds, self._write = rounds, write

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._rounds, name)
        if name not in _MUTATORS:
            return found

        def call(*arguments: Any) -> Any:
            result = found(*arguments)
            if name != "release_late" or arguments[0]:  # mostly there is nothing to release
                self._write(call=name, arguments=[_plain(each) for each in arguments])
            return result

        return call

    def advance(self, now: float) -> Any:
        """Let the rule settle; record the settled rounds, and each worker's step."""
        found = self._rounds.advance(now)
        self._write(
            call="advance",
            arguments=[now],
            released=[[[each.worker, each.step] for each in group] for group in found.released],
            proceeding=list(found.proceeding),
            clocks={str(worker): clock for worker, clock in self._rounds.clocks().items()},
            live=tuple(self._rounds.live()),
        )
        return found


class Recorder:
    """Records the events of this process.

    Args:
        write: Is called with each record.
        now: A clock that all nodes of the run share, in seconds.
        shard: Which shard this process is, if it is one; the Simulator's introduce themselves.
    """

    def __init__(
        self,
        write: Callable[[Record], None],
        now: Callable[[], float] = time.monotonic,
        shard: int = -1,
    ) -> None:
        self._write, self.now, self._shard = write, now, shard
        # In a node of one client or shard each; in the Simulator of all.
        self._owners: weakref.WeakKeyDictionary[ShardProtocol, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._numbers: dict[int, int] = {}  # id of a PsCore -> its shard
        self._lives: dict[int, JournaledCore] = {}  # shard -> its newest life
        self._of: dict[int, tuple[int, PsCore]] = {}  # id of a core's part -> (shard, core)
        self._accepted: dict[int, dict[tuple[int, int], events.Push]] = {}  # by shard
        # Records of the newest event that a real shard has replayed: see `OfShard`.
        self._replayed: list[tuple[type[Record], dict[str, Any]]] = []
        self._replaying: PsCore | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[Recorder]:
        """Record within this context."""
        with contextlib.ExitStack() as patches:
            for owner, name, around in self._hooks():
                outer = _around(getattr(owner, name), around)
                patches.enter_context(mock.patch.object(owner, name, outer))
            yield self

    def install(self) -> None:
        """Record for as long as this process lives."""
        for owner, name, around in self._hooks():
            setattr(owner, name, _around(getattr(owner, name), around))

    def _hooks(self) -> list[tuple[type, str, Callable[..., Any]]]:
        return [
            (SimulatedClient, "begin_life", self._on_simulated_life),
            (SimulatedShard, "take_core", self._on_simulated_shard),
            (ShardClient, "__init__", self._on_client),
            (ShardProtocol, "_open", self._on_open),
            (ShardProtocol, "_settle", self._on_settle),
            (ShardProtocol, "_on_welcome", self._on_welcome),
            (WorkerCore, "_request", self._on_made),
            (WorkerCore, "receive", self._on_receive),
            (WorkerCore, "save", self._on_keep),
            (WorkerCore, "restore", self._on_restore),
            (WorkerCore, "undelivered", self._on_put_back),
            (UpdatePacker, "__init__", self._on_packer),
            (UpdatePacker, "encode", self._on_encode),
            (UpdatePacker, "forget", self._on_drop),
            (JournaledCore, "handle", self._on_handle),
            (PsCore, "handle", self._on_core),
            (PsCore, "snapshot", self._on_snapshot),
            (MemberTable, "buffer", self._on_buffer),
            (ShardModel, "apply", self._on_apply),
            (Downlink, "record_reply", self._on_hand),
            (Downlink, "forget", self._on_forget),
        ]

    def write(self, kind: type[Record], **fields: Any) -> None:
        """Write a record with the present time."""
        self._write(kind(at=self.now(), **fields))

    # -- workers --------------------------------------------------------------------------------

    def _on_simulated_life(self, inner: Any, client: Any, *arguments: Any) -> None:
        inner(client, *arguments)
        self._owners[client.protocol] = (client._exchange.number, client._shard.number)

    def _on_client(self, inner: Any, client: Any, *arguments: Any, **named: Any) -> None:
        inner(client, *arguments, **named)
        self._owners[client.protocol] = (client.hello.id, client.hello.shard)

    def _of_worker(self, protocol: ShardProtocol) -> dict[str, int]:
        worker, shard = self._owners[protocol]
        return {"worker": worker, "shard": shard, "incarnation": protocol.incarnation}

    def _on_open(self, inner: Any, protocol: ShardProtocol, request: Any, step: int) -> Any:
        claims = {}
        if isinstance(request, PushRequest):
            origin = request.origins[self._owners[protocol][1]]
            claims = {
                "base_version": origin.base_version,
                "generation": origin.generation,
                "samples": request.head.samples,
                "local_steps": request.head.local_steps,
                "lag": origin.lag,
            }
        self.write(Request, step=step, **claims, **self._of_worker(protocol))
        return inner(protocol, request, step)

    def _on_settle(self, inner: Any, protocol: ShardProtocol, replied: Any) -> Any:
        reply, owner = replied.reply, self._of_worker(protocol)
        if reply is not None:
            fields = {"version": reply.version, "generation": reply.generation, "stop": reply.stop}
            refused = replied.is_outlier
            self.write(Acknowledged, step=reply.step, refused=refused, **fields, **owner)
        return inner(protocol, replied)

    def _on_welcome(self, inner: Any, protocol: ShardProtocol, *arguments: Any) -> Any:
        found = inner(protocol, *arguments)
        self.write(Welcomed, **self._of_worker(protocol))
        return found

    def _on_made(self, inner: Any, core: WorkerCore, *arguments: Any, **named: Any) -> Any:
        request = inner(core, *arguments, **named)
        worker = core._packer._number
        for shard, (layout, blocks) in enumerate(zip(core.layouts, request.shards, strict=True)):
            decoder = PushDecoder(layout, request.kind, core.kernels)
            found = digest_of(decoder.flatten([expanded(block) for block in blocks]))
            self.write(Made, worker=worker, shard=shard, step=request.head.step, digest=found)
        return request

    def _on_receive(self, inner: Any, core: WorkerCore, shard: int, reply: Any) -> Any:
        found = inner(core, shard, reply)
        where = shard_positions(core.spec, core.layouts[shard])
        held = digest(np.concatenate([core.base[at] for at in where]))
        of = {"version": core.versions[shard], "generation": core.generations[shard]}
        self.write(Took, worker=core._packer._number, shard=shard, digest=held, **of)
        return found

    def _on_keep(self, inner: Any, core: WorkerCore) -> Any:
        self.write(Kept, worker=core._packer._number, step=core.step)
        return inner(core)

    def _on_restore(self, inner: Any, core: WorkerCore, state: State, applied: int) -> Any:
        fields = {"saved": state["step"], "applied": applied}
        self.write(Restored, worker=core._packer._number, **fields)
        return inner(core, state, applied)

    def _on_put_back(self, inner: Any, core: WorkerCore) -> Any:
        self.write(PutBack, worker=core._packer._number)
        return inner(core)

    def _on_packer(self, inner: Any, packer: UpdatePacker, *arguments: Any, **named: Any) -> None:
        inner(packer, *arguments, **named)
        self.write(BeganLife, worker=packer._number)

    def _on_encode(
        self,
        inner: Any,
        packer: UpdatePacker,
        values: Any,
        step: int,
        learning_rate: float,
        epoch: float,
        touched: Any = None,
        group: int = 0,
        keep: float | None = None,
    ) -> Any:
        small = len(values) <= MOST_ENTRIES
        content = np.asarray(values, np.float32).tobytes() if small else b""
        packet = inner(packer, values, step, learning_rate, epoch, touched, group, keep)
        self.write(
            Coded,
            worker=packer._number,
            step=step,
            learning_rate=learning_rate,
            epoch=epoch,
            group=group,
            keep=keep,
            values=content,
            digest=digest(packet.blocks),
        )
        return packet

    def _on_drop(self, inner: Any, packer: UpdatePacker, shards: Any) -> None:
        self.write(Dropped, worker=packer._number)
        inner(packer, shards)

    # -- shards ---------------------------------------------------------------------------------

    def _on_simulated_shard(self, inner: Any, shard: Any, core: Any) -> None:
        self._numbers[id(core)] = shard.number
        inner(shard, core)

    def _on_handle(self, inner: Any, journaled: JournaledCore, event: Any, now: float) -> Any:
        shard = self._numbers.get(id(journaled.core), self._shard)
        if self._lives.get(shard) is not journaled:
            self._begin(shard, journaled)
        core = journaled.core
        actions = inner(journaled, event, now)
        about = {"shard": shard, "generation": core.config.generation}
        for action in actions:
            if isinstance(action, events.NewEpoch):
                epoch = action.epoch
                self.write(Published, number=epoch.number, live=tuple(epoch.live), **about)
        follows_leader = not core.membership.leads and journaled.failure is None
        if isinstance(event, events.MembershipEpoch) and follows_leader:
            self.write(
                Followed,
                number=event.number,
                live=tuple(event.live),
                epoch=core.membership.epoch,
                present=core.rounds.present(),
                **about,
            )
        return actions

    def _begin(self, shard: int, journaled: JournaledCore) -> None:
        """Record a shard's initial state."""
        before, core = self._lives.get(shard), journaled.core
        self._lives[shard] = journaled
        for kind, fields in self._replayed:
            self.write(kind, **fields)
        self._replayed, self._replaying = [], None
        model, scheduler = core.model, core._scheduler
        rounds = scheduler.rounds
        small = len(model.theta) <= MOST_ENTRIES
        generation = core.config.generation
        hard = rounds.state_dict(soft=False)
        soft = to_plain(rounds.state_dict(soft=True))
        self.write(
            Life,
            shard=shard,
            generation=generation,
            version=core.version,
            samples=core.samples,
            journal=journaled.journal is not None,
            digest=follows(model),
            backups=backups(model),
            rule={"hard": hard, "soft": soft},
            steps=dict(core._members.state_dict(soft=False)["steps"]),
            parts=_parts(core),
            before=None if before is None else _parts(before.core),
            disk_failed=before is not None and before.failure is not None,
            settings=ReplaySettings(core.config, 0.0).to_plain(),
            theta=model.theta.tobytes() if small else b"",
        )
        self._attach(shard, core)
        write = functools.partial(self.write, RuleCall, shard=shard, generation=generation)
        scheduler.rounds = core.rounds = RecordingRounds(rounds, write)  # type: ignore[assignment]

    def _attach(self, shard: int, core: PsCore) -> None:
        members = (core._members[worker] for worker in core._members)
        waiting = [push for each in members for push in (*each.submitted, each.buffered) if push]
        self._accepted[shard] = {(push.worker, push.head.step): push for push in waiting}
        for part in (core, core.model, core.model.downlink, core._members):
            self._of[id(part)] = (shard, core)

    def _on_core(self, inner: Any, core: PsCore, event: Any, now: float) -> Any:
        """Record a real shard's actions before it starts: it replays its journal."""
        if self._shard >= 0 and not self._lives:
            if core is not self._replaying:
                self._attach(self._shard, core)
                self._replaying = core
            self._replayed = []
        return inner(core, event, now)

    def _found(self, part: Any) -> tuple[dict[str, Any], PsCore] | None:
        """Return the shard that a part of a core belongs to; None: a simulated replay's."""
        shard, core = self._of.get(id(part), (-1, None))
        if core is None or part not in (core, core.model, core.model.downlink, core._members):
            return None
        about = {"shard": shard, "generation": core.config.generation}
        return about | ({"replayed": True} if core is self._replaying else {}), core

    def _write_entry(self, kind: type[Record], **fields: Any) -> None:
        """Write a record of a shard's past; during a replay, store it until the shard starts."""
        if "replayed" in fields:
            self._replayed.append((kind, fields))
        else:
            self.write(kind, **fields)

    def _on_snapshot(self, inner: Any, core: PsCore) -> Any:
        state = inner(core)
        found = self._found(core)
        if found is not None and core is not self._replaying:
            fields = {"version": core.version, "samples": core.samples}
            model = core.model
            kept = {"digest": follows(model), "backups": backups(model)}
            self.write(Snapshot, **fields, **kept, **found[0])
        return state

    def _on_buffer(self, inner: Any, table: MemberTable, push: events.Push) -> None:
        inner(table, push)
        if (found := self._found(table)) is not None:
            self._accepted[found[0]["shard"]][push.worker, push.head.step] = push

    def _on_apply(
        self,
        inner: Any,
        model: ShardModel,
        arrivals: Any,
        oldest_base: int,
        share: float = 1.0,
        empty_parts: int = 0,
    ) -> Any:
        found = self._found(model)
        if found is None:
            return inner(model, arrivals, oldest_base, share, empty_parts)
        about, core = found
        before, samples, epoch = model.version, model.samples, core.membership.epoch
        came = [dataclasses.replace(each) for each in arrivals]
        small = len(model.theta) <= MOST_ENTRIES
        content = [_content(each.update, small) for each in came]
        kept = inner(model, arrivals, oldest_base, share, empty_parts)
        keys = {(each.worker, each.head.step) for each in kept}
        accepted = self._accepted[about["shard"]]
        pushes = [accepted[each.worker, each.head.step] for each in came]
        self._write_entry(
            Released,
            before=before,
            version=model.version,
            samples=samples,
            oldest_base=oldest_base,
            share=share,
            epoch=epoch,
            arrivals=tuple(
                Arrived(
                    worker=push.worker,
                    incarnation=push.incarnation,
                    step=push.head.step,
                    base_version=push.origin.base_version,
                    generation=push.origin.generation,
                    epoch=push.epoch,
                    samples=push.head.samples,
                    local_steps=push.head.local_steps,
                    lag=push.origin.lag,
                    kept=(push.worker, push.head.step) in keys,
                    **update,
                )
                for push, update in zip(pushes, content, strict=True)
            ),
            digest=follows(model),
            theta=model.theta.tobytes() if small else b"",
            **about,
        )
        return kept

    def _on_hand(self, inner: Any, downlink: Downlink, worker: int, reply: Any) -> None:
        inner(downlink, worker, reply)
        if (found := self._found(downlink)) is not None:
            copy = downlink.copy_of(worker, reply.version)
            held = digest(downlink.seen if copy is None else copy)
            self._write_entry(Handed, worker=worker, version=reply.version, digest=held, **found[0])

    def _on_forget(self, inner: Any, downlink: Downlink, worker: int) -> None:
        inner(downlink, worker)
        if (found := self._found(downlink)) is not None:
            self._write_entry(Forgot, worker=worker, **found[0])

    def end(self, shard: int, core: PsCore) -> None:
        """Record a shard's final state."""
        self.write(
            Ended,
            shard=shard,
            generation=core.config.generation,
            version=core.version,
            samples=core.samples,
            lost_updates=core.counters.lost_updates,
            digest=follows(core.model),
            finite=bool(np.isfinite(core.model.theta).all()),
            reason=core.stop_reason or "",
        )


def _around(inner: Any, around: Callable[..., Any]) -> Any:
    @functools.wraps(inner)
    def outer(owner: Any, *arguments: Any, **named: Any) -> Any:
        return around(inner, owner, *arguments, **named)

    return outer


def _parts(core: PsCore) -> dict[str, str]:
    """Return the name of each part of a core, and the digest of its durable state."""
    states = {name: part.state_dict(soft=False) for name, part in core._parts().items()}
    states |= {f"members' {name}": state for name, state in states.pop("members").items()}
    return {name: digest(state) for name, state in states.items()}


def _content(update: Update, small: bool) -> dict[str, Any]:
    indices, values = update.indices, np.asarray(update.values, np.float32)
    where = None if indices is None else indices.astype(np.int64).tobytes()
    content = (where, values.tobytes()) if small else (None, b"")
    return {"digest": digest_of(update), "indices": content[0], "values": content[1]}


def digest_of(update: Update) -> str:
    """Return the digest of an update; a dense one equals itself with all positions."""
    indices = np.arange(len(update.values)) if update.indices is None else update.indices
    return digest(indices.astype(np.int64), np.asarray(update.values, np.float32))
