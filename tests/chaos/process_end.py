"""Settings of a run of real processes, and the state that its shards leave on disk."""

from __future__ import annotations

import time

import numpy as np

from tests.chaos.checker import Declared
from tests.chaos.history import Ended, digest
from tests.chaos.process_cast import Cast
from tests.chaos.process_replay import Witness
from tests.chaos.recorder import FOLLOWS
from tests.checkpoint_files import entries, load
from thinwire.ops.types import ModelSpec, State, TensorSpec
from thinwire.ps.wire.claims import ClaimBounds


def declared_by(cast: Cast) -> Declared:
    """Return the checker's settings of a started run, from its flags and its model."""
    run = Witness(cast.run_dir, 0).run
    tensors = (TensorSpec(p, tuple(s), d) for p, s, d in _newest(cast, 0)["model"])
    spec = ModelSpec(tuple(tensors))
    layouts = tuple(run.method.place(spec, run.nb_ps))
    claims = ClaimBounds.of(run.method)
    return Declared(run.method, spec, layouts, run.seed, run.iter_max or 0, claims)


def ended(cast: Cast) -> list[Ended]:
    """Return what each shard has ended with."""
    found = []
    for shard in range(cast.nb_ps):
        core = _newest(cast, shard)["core"]
        model = core["model"]
        found.append(
            Ended(
                at=time.monotonic(),
                shard=shard,
                generation=core["generation"],
                version=model["version"],
                samples=model["samples"],
                lost_updates=core["counters"]["lost_updates"],
                digest=digest([model[name] for name in FOLLOWS]),
                finite=bool(np.isfinite(model["theta"]).all()),
                reason="max_seconds",
            )
        )
    return found


def _newest(cast: Cast, shard: int) -> State:
    state: State = load(entries(Witness(cast.run_dir, shard).folder)[-1])[1]
    return state
