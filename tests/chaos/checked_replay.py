"""Replay a run's policies with the inputs that its history recorded.

Every policy is built again from the composition and called through its interface.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.chaos.history import (
    BeganLife,
    Coded,
    Dropped,
    Forgot,
    Handed,
    History,
    Kept,
    Life,
    PutBack,
    Released,
    Restored,
    RuleCall,
    digest,
)
from tests.chaos.recorder import follows
from thinwire.ops.codecs.base import EncodeContext, NonFiniteUpdate
from thinwire.ops.kernels import load_kernels
from thinwire.ops.methods.method import Method
from thinwire.ops.push_head import PushHead
from thinwire.ops.sync.base import ArrivalToken, Draw, Joiners, SyncRule
from thinwire.ops.sync.rounds import Rounds
from thinwire.ops.types import ModelSpec, Packet, Update
from thinwire.ops.weighting.base import Arrival
from thinwire.ps.core.model import model_for
from thinwire.ps.core.serialization import from_plain
from thinwire.ps.persistence.replay import ReplaySettings

_KERNELS = load_kernels("numpy")


# -- the rule of synchronisation ----------------------------------------------------------------


def replayed_rule(
    rule: SyncRule, follows: bool, life: Life, calls: Sequence[RuleCall]
) -> Iterator[str]:
    """Yield where a rule in force settled differently from a replayed rule with the same input."""
    rounds = Rounds(rule, follows=follows)
    rounds.load_state_dict(life.rule["hard"], soft=False)
    rounds.load_state_dict(from_plain(life.rule["soft"]), soft=True)
    where = f"shard {life.shard}, generation {life.generation}"
    for number, call in enumerate(calls):
        if call.call != "advance":
            getattr(rounds, call.call)(*map(_argument, call.arguments))
            continue
        found = rounds.advance(*call.arguments)
        released = [[[each.worker, each.step] for each in group] for group in found.released]
        if released != call.released:
            yield f"{where}, call {number}: released {call.released}; by its rule {released}"
            return
        if list(found.proceeding) != call.proceeding:
            yield (
                f"{where}, call {number}: {call.proceeding} proceed; by its rule "
                f"{list(found.proceeding)}"
            )
            return


def _argument(plain: Any) -> Any:
    """Return the arguments of a call: a token, draws, joiners, steps of workers, or groups."""
    if isinstance(plain, dict):
        return dict(plain["steps"])
    if not isinstance(plain, list | tuple):
        return plain
    if plain and isinstance(plain[0], dict):
        kind = Draw if "of_round" in plain[0] else Joiners
        return tuple(
            kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in each.items()})
            for each in plain
        )
    if plain and isinstance(plain[0], int):
        return ArrivalToken(*plain)
    return tuple(tuple(group) for group in plain)


# -- the model ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Reply:
    """The fields that `record_reply` reads."""

    version: int
    kind: str = "full"
    is_resync: bool = False


def replayed_model(
    method: Method, life: Life, entries: Sequence[Released | Handed | Forgot]
) -> Iterator[str]:
    """Yield each place where a shard's weights differ from the policies' result for its updates."""
    config = ReplaySettings.of(life.settings).config
    theta = np.frombuffer(life.theta, np.float32).copy()
    model = model_for(method, theta, _KERNELS, config)
    for entry in entries:
        if isinstance(entry, Handed):
            model.downlink.record_reply(entry.worker, _Reply(entry.version))  # type: ignore[arg-type]
            continue
        if isinstance(entry, Forgot):
            model.downlink.forget(entry.worker)
            continue
        before, model.samples = model.theta.copy(), entry.samples
        kept = model.apply(_arrivals(entry), entry.oldest_base, entry.share)
        where = f"shard {entry.shard}, version {entry.version}"
        keys = {(each.worker, each.head.step) for each in kept}
        if keys != {(each.worker, each.step) for each in entry.arrivals if each.kept}:
            yield f"{where}: the weighting keeps {sorted(keys)} of its updates"
            return
        if follows(model) != entry.digest:
            yield f"{where}: {_difference(before, model.theta, entry)}"
            return


def _arrivals(entry: Released) -> list[Arrival]:
    return [
        Arrival(
            worker=each.worker,
            update=Update(
                None if each.indices is None else np.frombuffer(each.indices, np.int64),
                np.frombuffer(each.values, np.float32).copy(),
            ),
            base_version=each.base_version,
            lag=each.lag,
            head=PushHead(each.step, each.samples),
        )
        for each in entry.arrivals
    ]


def _difference(before: Any, after: Any, entry: Released) -> str:
    """Return how a shard's result of a round differs from the policies' result."""
    num = len(entry.arrivals)
    ours = (after - before).astype(float)
    theirs = np.frombuffer(entry.theta, np.float32).astype(float) - before
    square = float(ours @ ours)
    factor = float(ours @ theirs) / square if square else 0.0
    apart = float(np.linalg.norm(theirs - factor * ours))
    if abs(factor - 1) > 1e-4 and apart <= 1e-3 * float(np.linalg.norm(theirs)):
        return f"the mean of {num} updates is {factor:.4g} times what it is: another divisor"
    if abs(factor - 1) <= 1e-4 and apart <= 1e-3 * float(np.linalg.norm(theirs)):
        return f"the optimizer's state is not what {num} updates make of it"
    return f"the weights are not what {num} updates make of them"


# -- codecs -------------------------------------------------------------------------------------


class _WorkerCodec:
    """The codec of one worker, over all its processes."""

    def __init__(self, method: Method, spec: ModelSpec, seed: Sequence[int]) -> None:
        self._codec, self._spec, self._seed = method.codec, spec, seed
        self._kind = method.kind
        self._saved: dict[int, tuple[Any, str]] = {}  # step -> state
        self.can_replay = True
        self.begin()

    def begin(self) -> None:
        """Begin a life."""
        self._state = self._codec.init(self._spec, _KERNELS)
        self._rng = np.random.default_rng(list(self._seed))
        self._last: Packet | None = None
        self._num_put_back = 0

    def keep(self, step: int) -> None:
        """Save the state."""
        self._saved[step] = (
            copy.deepcopy(self._state),
            json.dumps(self._rng.bit_generator.state),
        )

    def restore(self, saved: int, applied: int) -> None:
        """Load a saved state, if shards have applied exactly the updates before it was saved."""
        if saved not in self._saved:
            return
        state, rng = self._saved[saved]
        self._rng.bit_generator.state = json.loads(rng)
        if saved == applied:
            self._state = copy.deepcopy(state)

    def drop(self) -> None:
        """Clear the residual."""
        self._state = self._codec.init(self._spec, _KERNELS)

    def put_back(self) -> int:
        """Take the last packet back; return how often that was done with it."""
        self._num_put_back += 1
        if self._last is not None:
            self._state = self._codec.undelivered(self._last, self._state)
        return self._num_put_back

    def encode(self, coded: Coded) -> str:
        """Return the digest of the packet of the same values."""
        values = np.frombuffer(coded.values, np.float32).copy()
        offsets = self._spec.offsets
        context = EncodeContext(
            step=coded.step,
            learning_rate=coded.learning_rate,
            rng=self._rng,
            kernels=_KERNELS,
            epoch=coded.epoch,
            keep=coded.keep,
        )
        tensors = [values[offsets[n] : offsets[n + 1]] for n in range(len(self._spec.tensors))]
        try:
            self._last, self._state = self._codec.encode(tensors, self._state, context)
        except NonFiniteUpdate:
            return ""
        self._last = dataclasses.replace(self._last, kind=self._kind)
        self._num_put_back = 0
        return digest(self._last.blocks)


def replayed_codecs(method: Method, spec: ModelSpec, seed: int, history: History) -> Iterator[str]:
    """Yield each push of a worker that differs from its codec's result for its gradients."""
    codecs: dict[int, _WorkerCodec] = {}
    wrong: set[int] = set()
    for record in history.of(BeganLife, Coded, PutBack, Dropped, Kept, Restored):
        worker = record.worker
        codec = codecs.get(worker)
        if codec is None:
            codec = codecs[worker] = _WorkerCodec(method, spec, [seed, worker])
        if worker in wrong:
            continue
        if isinstance(record, BeganLife):
            codec.begin()
        elif isinstance(record, Kept):
            codec.keep(record.step)
        elif isinstance(record, Restored):
            codec.restore(record.saved, record.applied)
        elif isinstance(record, Dropped):
            codec.drop()
        elif isinstance(record, PutBack):
            if codec.put_back() > 1:
                wrong.add(worker)
                yield f"worker {worker} took one update back twice"
        elif record.values and codec.encode(record) != record.digest:
            wrong.add(worker)
            yield (
                f"what worker {worker} sent as step {record.step} is not what its codec makes of "
                "its gradients: something kept back was lost, or is there twice"
            )
