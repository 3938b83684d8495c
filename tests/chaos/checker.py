"""Checks of histories: pure functions of the records and of the run's settings.

The checks use only the policies' interfaces: a synchronization rule is replayed call by call,
a model is rebuilt by the composition's weighting, aggregate and optimizer, and a codec encodes
the same values again. A new policy is therefore covered without further code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from tests.chaos.checked_replay import replayed_codecs, replayed_model, replayed_rule
from tests.chaos.history import (
    Acknowledged,
    Arrived,
    CutOff,
    Ended,
    Followed,
    Forgot,
    Handed,
    History,
    Life,
    Made,
    Published,
    Released,
    Request,
    RuleCall,
    Snapshot,
    Took,
)
from thinwire.ops.methods.method import Method
from thinwire.ops.types import ModelSpec, ShardLayout
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.wire.claims import ClaimBounds

#: Parts of the durable state that a restarted shard has bit for bit as before its death.
COMES_BACK = (
    *("model", "scheduler", "members' steps", "members' bases", "averages", "counters", "guard"),
    "quarantine",
)


@dataclasses.dataclass(frozen=True)
class Declared:
    """The settings of a run: its policies, and values derived from its flags."""

    method: Method
    spec: ModelSpec
    layouts: tuple[ShardLayout, ...]
    seed: int
    iter_max: int  # versions
    claims: ClaimBounds


@dataclasses.dataclass(frozen=True)
class Violation:
    """A promise that a history breaks."""

    promise: str  # one of PROMISES
    text: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.text}"


@dataclasses.dataclass
class Past:
    """The state of a shard at the end of a history.

    Attributes:
        entries: Events of its model, in order, without the events that restarts undid.
        undone: Rounds that restarts have undone.
        num_undone: Number of versions that restarts have undone.
        num_cut: Upper bound of the undone versions that a test cut from the journal on purpose.
    """

    shard: int
    lives: list[Life] = dataclasses.field(default_factory=list)
    entries: list[Released | Handed | Forgot] = dataclasses.field(default_factory=list)
    undone: list[Released] = dataclasses.field(default_factory=list)
    num_undone: int = 0
    num_cut: int = 0

    @property
    def applied(self) -> list[Released]:
        """The rounds that were not undone."""
        return [entry for entry in self.entries if isinstance(entry, Released)]

    @property
    def version(self) -> int:
        """The version after these rounds."""
        applied = self.applied
        return applied[-1].version if applied else self.lives[0].version

    @property
    def digest(self) -> str:
        """The digest of the state after these rounds."""
        applied = self.applied
        return applied[-1].digest if applied else self.lives[0].digest

    def pushes(self) -> Iterator[tuple[Released, Arrived]]:
        """Iterate over the applied pushes."""
        return ((each, push) for each in self.applied for push in each.arrivals)


def check(history: History, declared: Declared) -> list[Violation]:
    """Return the violations in a history; an empty list if there are none."""
    found: list[Violation] = []
    pasts = {}
    for shard in history.shards:
        pasts[shard] = Past(shard)
        found += [Violation(*each) for each in _follow(history, pasts[shard])]
    for promise, proof in PROMISES.items():
        found += [Violation(promise, text) for text in proof(history, pasts, declared)]
    return found


def _follow(history: History, past: Past) -> Iterator[tuple[str, str]]:
    """Work out a shard's past; yield what its restarts break."""
    collected: list[tuple[Snapshot | Life, int]] = []  # and how many entries there were
    cut = 0  # updates that were cut from the journal on purpose
    for record in history:
        if getattr(record, "shard", None) != past.shard:
            continue
        if isinstance(record, Released | Handed | Forgot):
            known = record.replayed and isinstance(record, Released)
            if not known or record.version > past.version:
                past.entries.append(record)
        elif isinstance(record, Snapshot):
            collected.append((record, len(past.entries)))
        elif isinstance(record, CutOff):
            cut += record.updates
            past.num_cut += record.updates
        elif isinstance(record, Life):
            if past.lives:
                yield from _come_back(past, record, collected, cut)
                cut = 0
            past.lives.append(record)
            collected.append((record, len(past.entries)))


def _come_back(
    past: Past, life: Life, collected: list[tuple[Snapshot | Life, int]], cut: int
) -> Iterator[tuple[str, str]]:
    """Compare a restarted shard's state with its state before the restart."""
    before = past.version
    name = f"shard {past.shard}, generation {life.generation}"
    if past.lives[-1].journal:
        if not before - cut <= life.version <= before:
            yield (
                "kept",
                f"{name}, comes back at version {life.version}; with a journal at "
                f"{before}{f' less {cut} cut off' * bool(cut)}",
            )
        kept = [e for e in past.entries if not isinstance(e, Released) or e.version <= life.version]
    else:
        states = [
            number
            for state, number in collected
            if (state.digest, state.backups) == (life.digest, life.backups)
        ]
        if not states and past.entries:
            yield "weights", f"{name}, comes back with a state that was never saved"
        at = states[-1] if states else len(past.entries)
        kept = past.entries[:at]
    there = {id(each) for each in kept}
    past.undone += [each for each in past.applied if id(each) not in there]
    past.entries = kept
    past.num_undone += before - life.version
    if past.version != life.version:
        yield (
            "versions",
            f"{name}, begins at version {life.version}; its past ends at {past.version}",
        )
    elif past.digest != life.digest:
        yield "weights", f"{name}, begins with other weights or another optimizer's state"
    if past.lives[-1].journal and not cut and life.before is not None and not life.disk_failed:
        other = [each for each in COMES_BACK if life.before[each] != life.parts[each]]
        if other:
            yield "kept", f"{name}, comes back with another state of {', '.join(other)}"


Pasts = dict[int, Past]
Proof = Callable[[History, Pasts, Declared], Iterable[str]]


def _kept(history: History, pasts: Pasts, declared: Declared) -> Iterator[str]:
    """No acknowledged update is lost, except updates undone by restarts without a journal."""
    there = {
        shard: {(push.worker, push.step) for _, push in past.pushes()}
        | {(push.worker, push.step) for each in past.undone for push in each.arrivals}
        for shard, past in pasts.items()
    }
    for each in history.of(Acknowledged):
        if not each.step or each.stop or each.refused or each.version >= declared.iter_max:
            continue
        if (each.worker, each.step) not in there[each.shard]:
            yield (
                f"shard {each.shard} acknowledged step {each.step} of worker {each.worker} "
                f"(version {each.version}) and has not applied it"
            )


def _losses(history: History, pasts: Pasts, declared: Declared) -> Iterator[str]:
    """A shard's count of lost updates equals the number that restarts have undone."""
    for end in history.of(Ended):
        undone = pasts[end.shard].num_undone
        if not undone - pasts[end.shard].num_cut <= end.lost_updates <= undone:
            yield f"shard {end.shard} counts {end.lost_updates} lost updates; {undone} were undone"


def _once(history: History, pasts: Pasts, declared: Declared) -> Iterator[str]:
    """No update is applied twice, in any incarnation."""
    for shard, past in pasts.items():
        seen: set[tuple[int, int]] = set()
        for _, push in past.pushes():
            if (push.worker, push.step) in seen:
                yield f"shard {shard} applied step {push.step} of worker {push.worker} twice"
            seen.add((push.worker, push.step))


def _versions(history: History, pasts: Pasts, declared: Declared) -> Iterator[str]:
    """A version follows the one before, and goes back only with a generation that undoes some."""
    for shard, past in pasts.items():
        version = past.lives[0].version
        for each in past.applied:
            if each.before != version or each.version - each.before not in (0, 1):
                yield f"shard {shard} went from {version} over {each.before} to {each.version}"
            version = each.version
    journaled = {
        (p.shard, life.generation): life.journal for p in pasts.values() for life in p.lives
    }
    cut = {record.shard for record in history.of(CutOff)}
    newest: dict[tuple[int, int], Acknowledged] = {}
    for each in history.of(Acknowledged):
        known = newest.get((each.worker, each.shard))
        newest[each.worker, each.shard] = each
        if known is None or each.version >= known.version:
            continue
        announced = each.generation > known.generation and (
            not journaled.get((each.shard, known.generation), True) or each.shard in cut
        )
        if not announced:
            yield (
                f"worker {each.worker} had version {known.version} of shard {each.shard} "
                f"(generation {known.generation}) and got {each.version} ({each.generation})"
            )


def _generations(history: History, pasts: Pasts, declared: Declared) -> Iterator[str]:
    """Only the newest incarnation of a shard applies updates, and only its replies are accepted."""
    newest: dict[int, int] = {}  # shard -> generation
    accepted: dict[tuple[int, int], int] = {}
    for record in history:
        if isinstance(record, Life):
            if record.generation <= newest.get(record.shard, -1):
                yield f"shard {record.shard} began generation {record.generation} once more"
            newest[record.shard] = max(record.generation, newest.get(record.shard, -1))
        elif isinstance(record, Released):
            if record.generation != newest.get(record.shard):
                yield (
                    f"shard {record.shard} applied version {record.version} in generation "
                    f"{record.generation}, when generation {newest.get(record.shard)} had begun"
                )
            for push in record.arrivals:
                if push.generation != record.generation:
                    yield (
                        f"shard {record.shard} of generation {record.generation} applied step "
                        f"{push.step} of worker {push.worker}, computed with generation "
                        f"{push.generation}"
                    )
        elif isinstance(record, Acknowledged):
            known = accepted.get((record.worker, record.shard), 0)
            if record.generation < known:
                yield (
                    f"worker {record.worker} accepted a reply of generation {record.generation} "
                    f"of shard {record.shard} after one of {known}"
                )
            accepted[record.worker, record.shard] = max(known, record.generation)
        elif isinstance(record, Took):
            known = accepted.get((record.worker, record.shard), 0)
            if record.generation < known:
                yield (
                    f"worker {record.worker} took over a model of generation {record.generation} "
                    f"of shard {record.shard}; it had been answered by {known}"
                )


def _bound(history: History, pasts: Pasts, declared: Declared) -> Iterator[str]:
    """Nobody proceeds further ahead of the slowest than the rule's bound."""
    bound = declared.method.sync.bound
    for each in history.of(RuleCall) if bound is not None else ():
        if each.shard or not each.proceeding:
            continue
        least = min(each.clocks[str(worker)] for worker in each.live)
        for worker in each.proceeding:
            if (ahead := each.clocks[str(worker)] - least) > bound:
                yield f"worker {worker} proceeds {ahead} iterations ahead; the bound is {bound}"


def _rule(history: History, pasts: Pasts, declared: Declared) -> Iterator[str]:
    """A replayed rule with the same input releases the same, and lets the same workers proceed."""
    policy = declared.method.sync
    calls: dict[tuple[int, int], list[RuleCall]] = {}
    for each in history.of(RuleCall):
        calls.setdefault((each.shard, each.generation), []).append(each)
    for shard, past in pasts.items():
        for life in past.lives:
            mine = calls.get((shard, life.generation), [])
            yield from replayed_rule(policy, bool(shard), life, mine)


def _weights(history: History, pasts: Pasts, declared: Declared) -> Iterator[str]:
    """Replayed policies make the same weights of the updates, with the same divisor."""
    for past in pasts.values():
        if past.lives[0].theta:
            yield from replayed_model(declared.method, past.lives[0], past.entries)
    for end in history.of(Ended):
        if not end.finite:
            yield f"shard {end.shard} holds NaN or infinity"
        past = pasts[end.shard]
        if (end.version, end.digest) != (past.version, past.digest):
            yield f"shard {end.shard} ended with version {end.version}, not with what it applied"


def _contents(history: History, pasts: Pasts, declared: Declared) -> Iterator[str]:
    """The applied updates equal the sent updates, where no message may be lost."""
    if declared.method.router.uses_datagrams:
        return
    made = {(each.worker, each.shard, each.step, each.digest) for each in history.of(Made)}
    for shard, past in pasts.items():
        for _, push in past.pushes():
            if (push.worker, shard, push.step, push.digest) not in made:
                what = f"step {push.step} of worker {push.worker}"
                yield f"shard {shard} applied something else as {what} than was sent"


def _claims(history: History, pasts: Pasts, declared: Declared) -> Iterator[str]:
    """The counted examples equal the worker's claim, within the bounds, and are counted once."""
    claims = ("base_version", "generation", "samples", "local_steps", "lag")
    requested: dict[tuple[int, int, int], list[Request]] = {}
    for each in history.of(Request):
        requested.setdefault((each.worker, each.shard, each.step), []).append(each)
    handed = {(e.shard, e.generation, e.worker, e.version) for e in history.of(Handed)}
    kind = pb.UpdateKind.Value(f"UPDATE_KIND_{declared.method.kind.name}")
    for shard, past in pasts.items():
        samples = past.lives[0].samples
        for released, push in past.pushes():
            what = f"step {push.step} of worker {push.worker} on shard {shard}"
            claimed = {name: getattr(push, name) for name in claims}
            known = requested.get((push.worker, shard, push.step), [])
            if not any(claimed == {n: getattr(e, n) for n in claims} for e in known):
                yield f"{what} counts as {claimed}, which the worker has not claimed"
            try:
                declared.claims.check_push(pb.Push(step=push.step, kind=kind, **claimed))
            except Malformed as error:
                yield f"{what}: {error}"
            if push.base_version > released.before:
                yield f"{what} is of version {push.base_version}, {released.before} was there"
            if (shard, push.generation, push.worker, push.base_version) not in handed:
                yield f"{what} is of version {push.base_version}, which the worker was not sent"
            samples += push.samples if push.kept else 0
        for end in (each for each in history.of(Ended) if each.shard == shard):
            if end.samples != samples:
                yield f"shard {shard} counts {end.samples} examples of {samples}"


def _epochs(history: History, pasts: Pasts, declared: Declared) -> Iterator[str]:
    """Every shard applies every epoch that it receives, and releases no push of a later epoch."""
    published: dict[int, set[int]] = {}
    for record in history:
        if isinstance(record, Published):
            published[record.number] = set(record.live)
        elif isinstance(record, Followed):
            if record.epoch < record.number:
                yield (
                    f"shard {record.shard} was told of epoch {record.number} and is in "
                    f"{record.epoch}"
                )
            elif record.epoch == record.number and set(record.present) != set(record.live):
                yield (
                    f"shard {record.shard} has workers {sorted(record.present)} in epoch "
                    f"{record.number}; {sorted(record.live)} are"
                )
        elif isinstance(record, Released):
            for push in record.arrivals:
                if push.epoch > record.epoch:
                    yield (
                        f"shard {record.shard}, in epoch {record.epoch}, released a push of "
                        f"epoch {push.epoch}"
                    )


def _residuals(history: History, pasts: Pasts, declared: Declared) -> Iterator[str]:
    """A replayed codec with the same input sends the same: no residual is lost or sent twice."""
    return replayed_codecs(declared.method, declared.spec, declared.seed, history)


def _copies(history: History, pasts: Pasts, declared: Declared) -> Iterator[str]:
    """A worker's model equals the shard's copy of the worker's model."""
    handed = {(e.shard, e.worker, e.generation, e.version): e.digest for e in history.of(Handed)}
    for each in history.of(Took):
        known = handed.get((each.shard, each.worker, each.generation, each.version))
        if known != each.digest:
            yield (
                f"worker {each.worker} at version {each.version} of generation {each.generation} "
                f"does not have what shard {each.shard} has for it"
            )


#: Name -> what proves it: yields how a history breaks it.
PROMISES: dict[str, Proof] = {
    "kept": _kept,
    "losses": _losses,
    "once": _once,
    "versions": _versions,
    "generations": _generations,
    "bound": _bound,
    "rule": _rule,
    "weights": _weights,
    "contents": _contents,
    "claims": _claims,
    "epochs": _epochs,
    "residuals": _residuals,
    "copies": _copies,
}
