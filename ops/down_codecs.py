"""The down half of the Codec seam: what a worker must be sent so that it has the shard's model.

`dense` and `delta` are exact: after applying the reply the worker's floats equal the shard's bit
for bit. `sparse` leaves the smaller part of what a worker lacks for later, and keeps a copy of what
each worker has to know what that is; `auto` is `delta` until `sparse` pays.
AdaComp's published code sends the whole model every time; docs/METHOD.md, AdaComp, has the rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ops.replies import Asked, Handed, Operation, ShardView
from ops.types import VALUE_DTYPES, ConfigurationError, State, Update

if TYPE_CHECKING:
    from ops.types import Float32, Int64

__all__ = [
    "REGISTRY",
    "DownAuto",
    "DownCodec",
    "DownDelta",
    "DownDense",
    "DownSparse",
    "Operation",
    "refuse_idle",
]


class _Shared:
    """A down codec that knows no worker: what it answers depends on the version asked from."""

    per_worker: ClassVar[bool] = False

    def forget(self, worker: int, state: State) -> State:
        """Return the state as it is: there is nothing of a worker's own in it."""
        del worker
        return state

    def copy_of(self, worker: int, base_version: int, state: State) -> Float32 | None:
        """Return nothing: no copies are kept."""
        del worker, base_version, state
        return None


@dataclasses.dataclass(frozen=True)
class DownDense(_Shared):
    """Send the whole shard every time."""

    def init(self, size: int) -> State:
        """Return the empty state."""
        del size
        return {}

    def note(self, indices: Int64 | None, version: int, state: State) -> State:
        """Hear that applying `version` changed these entries (None: all)."""
        del indices, version
        return state

    def gather(self, asked: Asked, shard: ShardView, state: State) -> Handed:
        """Return a copy of the model."""
        del asked, state
        return _whole(shard)


@dataclasses.dataclass(frozen=True)
class DownDelta(_Shared):
    """Send the new values of the entries that changed since the worker's version (SET).

    One int32 per entry remembers when it last changed and serves every worker. Where more than
    `dense_fraction` of the entries changed, the whole shard is smaller and is sent instead.
    """

    dense_fraction: float = 0.6

    def __post_init__(self) -> None:
        """Refuse what is no fraction."""
        _check_fraction("dense_fraction", self.dense_fraction)

    def init(self, size: int) -> State:
        """Return `last_changed` = 0 for every entry, and the newest dense change."""
        import numpy as np

        return {"last_changed": np.zeros(size, np.int32), "dense_version": 0}

    def note(self, indices: Int64 | None, version: int, state: State) -> State:
        """Hear that applying `version` changed these entries (None: all)."""
        if indices is None:
            state["dense_version"] = version
        else:
            state["last_changed"][indices] = version
        return state

    def gather(self, asked: Asked, shard: ShardView, state: State) -> Handed:
        """Return what turns the model of `asked.base_version` into the current one."""
        import numpy as np

        base = asked.base_version
        if base is None or base < state["dense_version"]:
            return _whole(shard)
        if base == shard.version:
            nothing = Update(np.empty(0, np.int64), np.empty(0, np.float32))
            return Handed(Operation.NONE, nothing, shard.version, "delta")
        changed = np.flatnonzero(state["last_changed"] > base)
        if len(changed) > self.dense_fraction * len(shard.theta):
            return _whole(shard)
        return Handed(Operation.SET, Update(changed, shard.theta[changed]), shard.version, "delta")


@dataclasses.dataclass(frozen=True)
class DownSparse:
    """Send, of each slice, the entries in which the worker is farthest from the shard.

    The shard keeps a dense copy of what each worker has, which moves on by what was really sent;
    what was left out stays in the difference and comes later. A worker of which no copy is kept,
    or that holds something else than its copy, is sent the whole model.

    Attributes:
        compression_rate: Of the way up; stands for `down_ratio` where that is None.
        down_ratio: The fraction of each slice's entries that is sent, above 0; 1 and more is all.
        down_value_dtype: How values travel, one of ops.types.VALUE_DTYPES.
        resync_every: Every so many replies to a worker one is the whole model; 0: none is.

    Source: the server of DGS with secondary compression, Yan et al. (ICPP 2020); docs/METHOD.md,
    The way down.
    Differences: float32 values overwrite instead of being added, so that no rounding adds up.
    """

    compression_rate: float = 0.01
    down_ratio: float | None = None
    down_value_dtype: str = "float32"
    resync_every: int = 0
    per_worker: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse ratios that send nothing, unknown value dtypes, and negative intervals."""
        for name in ("compression_rate", "down_ratio"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # refuses NaN too
                raise ConfigurationError(
                    f"--{name}={value}: it is the fraction of entries kept; expected above 0 "
                    "(for example 0.01), and 1 or more for all entries."
                )
        if self.down_value_dtype not in VALUE_DTYPES:
            raise ConfigurationError(
                f"--down_value_dtype={self.down_value_dtype!r}: expected one of "
                f"{', '.join(VALUE_DTYPES)}."
            )
        if self.resync_every < 0:
            raise ConfigurationError(
                f"--resync_every={self.resync_every}: expected a number of replies from 1 on, or "
                "0 for no resynchronisation."
            )

    @property
    def ratio(self) -> float:
        """The fraction of entries that is sent."""
        return self.compression_rate if self.down_ratio is None else self.down_ratio

    def init(self, size: int) -> State:
        """Return the state before anybody has asked; see `ops.held_copies`."""
        import numpy as np

        del size
        scratch = {"difference": np.empty(0, np.float32), "last": {}}
        return {"held": {}, "scratch": scratch}

    def note(self, indices: Int64 | None, version: int, state: State) -> State:
        """Hear that applying `version` changed these entries (None: all): the copies tell."""
        del indices, version
        return state

    def forget(self, worker: int, state: State) -> State:
        """Drop the copy of a worker that has left, or whose model is not what it should be."""
        state["held"].pop(str(worker), None)
        state["scratch"]["last"].pop(str(worker), None)
        return state

    def copy_of(self, worker: int, base_version: int, state: State) -> Float32 | None:
        """Return what a worker has that was handed `base_version` last: [n] float32."""
        held = state["held"].get(str(worker))
        return held["weights"] if held is not None and held["version"] == base_version else None

    def gather(self, asked: Asked, shard: ShardView, state: State) -> Handed:
        """Return what brings a worker nearer to the shard; a retry gets its answer once more."""
        from ops import held_copies

        worker, base = asked.worker, asked.base_version
        held = state["held"].get(str(worker))
        if held is None:
            return held_copies.send_all(worker, shard, state)
        if base is None or not asked.step:
            return held_copies.send_copy(worker, state)
        if (given := held_copies.repeat(asked, state)) is not None:
            return given
        if base != held["version"]:
            return held_copies.send_all(worker, shard, state)
        if self.resync_every and held["replies"] + 1 >= self.resync_every:
            return held_copies.send_all(worker, shard, state, is_resync=True)
        return held_copies.send_largest(asked, shard, self.ratio, self.down_value_dtype, state)


@dataclasses.dataclass(frozen=True)
class DownAuto(DownSparse):
    """`delta` to each worker until a reply to it is large, from then on `sparse`.

    Large is what changes more than `switch_fraction` of the shard's entries and takes more bytes
    than the sparse reply would. That reply is still exact; only after it a copy is kept.

    Attributes:
        switch_fraction: Of the entries.

    Source: DGS's secondary compression "on demand"; docs/METHOD.md, The way down.
    """

    switch_fraction: float = 0.1

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        super().__post_init__()
        _check_fraction("switch_fraction", self.switch_fraction)

    def init(self, size: int) -> State:
        """Return the states of both, and who has held nothing but exact models since when."""
        return super().init(size) | {"delta": DownDelta().init(size), "exact_since": {}}

    def note(self, indices: Int64 | None, version: int, state: State) -> State:
        """Hear that applying `version` changed these entries (None: all)."""
        state["delta"] = DownDelta().note(indices, version, state["delta"])
        return state

    def forget(self, worker: int, state: State) -> State:
        """Drop what is known of a worker."""
        state["exact_since"].pop(str(worker), None)
        return super().forget(worker, state)

    def gather(self, asked: Asked, shard: ShardView, state: State) -> Handed:
        """Return what changed since the worker's version, or what brings it nearer."""
        if str(asked.worker) in state["held"]:
            return super().gather(asked, shard, state)
        since = state["exact_since"].get(str(asked.worker))
        # A model that was once handed out in part is of no version: only the whole one helps.
        if since is None or asked.base_version is None or asked.base_version < since:
            state["exact_since"][str(asked.worker)] = shard.version
            return _whole(shard)
        handed = DownDelta().gather(asked, shard, state["delta"])
        if self._is_large(handed, shard):
            from ops import held_copies

            del state["exact_since"][str(asked.worker)]
            held_copies.keep(asked.worker, shard, state)
        return handed

    def _is_large(self, handed: Handed, shard: ShardView) -> bool:
        """Whether a reply of `delta` outgrows what `sparse` would send."""
        from ops import held_copies

        count, size = len(handed.update.values), len(shard.theta)  # type: ignore[union-attr]
        if count <= self.switch_fraction * size:
            return False
        alternative = held_copies.sparse_bytes(shard, self.ratio, self.down_value_dtype)
        return held_copies.reply_bytes(count, size) > alternative


def _whole(shard: ShardView) -> Handed:
    return Handed(Operation.FULL, Update(None, shard.theta.copy()), shard.version, "full")


def _check_fraction(name: str, value: float) -> None:
    if not 0 <= value <= 1:  # refuses NaN too
        raise ConfigurationError(f"{name}={value}: expected a fraction from 0 to 1.")


DownCodec = DownDense | DownDelta | DownSparse

#: --down_codec value -> policy.
REGISTRY: dict[str, type[DownDense] | type[DownDelta] | type[DownSparse]] = {
    "dense": DownDense,
    "delta": DownDelta,
    "sparse": DownSparse,
    "auto": DownAuto,
}


def refuse_idle(name: str, given: Mapping[str, Any]) -> None:
    """Refuse settings of sparse replies for a down codec that makes none.

    Raises:
        ConfigurationError: Naming the setting.
    """
    if issubclass(REGISTRY[name], DownSparse):
        return
    usual = {field.name: field.default for field in dataclasses.fields(DownSparse)}
    for setting in ("down_ratio", "down_value_dtype", "resync_every"):
        if given[setting] != usual[setting]:
            raise ConfigurationError(
                f"--{setting}={given[setting]} is for --down_codec=sparse and auto, and this is "
                f"--down_codec={name}; change one."
            )
