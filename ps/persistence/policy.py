"""Whether a shard keeps a journal, and what the last one brought back.

How large a method's pushes are, measured before anybody trains.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from absl import logging

from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.kernels.base import load_kernels
from thinwire.ops.methods.method import Method
from thinwire.ops.run.settings import END_REASONS, Run, limit_of
from thinwire.ops.types import EncodeContext, ModelSpec, TensorSpec
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.ps.core.core import PsCore
from thinwire.ps.persistence.journal import HighWaterLog, HighWaterMark
from thinwire.ps.persistence.journal_format import EventCoder
from thinwire.ps.persistence.replay import MakeCore, ReplaySettings
from thinwire.ps.persistence.shard_store import SavedShard
from thinwire.ps.service.server import ShardServer

#: Largest sample of a model that is coded, in entries.
_MOST_ENTRIES = 4_000_000


def push_fraction(method: Method, spec: ModelSpec) -> float:
    """Return the coded bytes of a push of random values over those of the model in float32.

    The codec and the wire's coding do what they would do for a gradient, past any warm-up. Of a
    large model some tensors are taken. Whole weights are what is pushed where workers sum among
    themselves.
    """
    if method.collective != THROUGH_PS:
        return 1.0
    sample = _sample(spec)
    rng = np.random.default_rng(0)
    tensors = [rng.standard_normal(tensor.size, np.float32) for tensor in sample.tensors]
    bodies = load_kernels("numpy")
    context = EncodeContext(1, 0.01, rng, bodies, epoch=1e6)
    packet, _ = method.codec.encode(tensors, method.codec.init(sample, bodies), context)
    chooser = IndexChooser()
    coded = [chooser.encode(block) for block in packet.blocks]
    num_bytes = sum(len(block.index_bytes) + len(block.value_bytes) for block in coded)
    return num_bytes / (4 * sample.num_parameters)


def _sample(spec: ModelSpec) -> ModelSpec:
    """Return some of the tensors: the first ones that are not too much together, at least one."""
    chosen: list[TensorSpec] = []
    num_entries = 0
    for tensor in spec.tensors:
        if not chosen or num_entries + tensor.size <= _MOST_ENTRIES:
            chosen.append(tensor)
            num_entries += tensor.size
    return ModelSpec(tuple(chosen))


#: With --journal=auto: pushes of a larger share of the model are not written down.
LARGEST_FRACTION = 0.1


class JournalPolicy:
    """Decides once, at the start, by the method alone.

    Args:
        run: The run's settings.
        choice: --journal.
        saved: The shard's place on disk.
        coder: Of its events.
        spec: Of the whole model.
    """

    def __init__(
        self, run: Run, choice: str, saved: SavedShard, coder: EventCoder, spec: ModelSpec
    ) -> None:
        self._run, self._saved, self._coder = run, saved, coder
        self.about: dict[str, Any] = {"flag": choice, "on": choice == "on"}
        if choice == "auto":
            fraction = push_fraction(run.method, spec)
            self.about |= {"on": fraction < LARGEST_FRACTION, "push_fraction": fraction}
            logging.info(
                "--journal=auto: %s; a push is %.3g of the model, and the limit %g",
                *("on" if self.about["on"] else "off", fraction, LARGEST_FRACTION),
            )

    def replay(self, make: MakeCore) -> None:
        """Bring the newest snapshot up to what the journal says."""
        come = self._saved.replay(make, self._coder)
        before = self._saved.recovered
        self.recovered: dict[str, Any] = {
            "replayed": before["replayed"] + (come.num_records if come else 0),
            "cuts": [*before["cuts"], *([come.damage] if come and come.damage else [])],
        }

    def begin(self, server: ShardServer) -> None:
        """Let the server write a journal, if one is to be kept, from its next snapshot on."""
        journaled, config = server.journaled, server.core.config
        self._count_lost(server.core)
        mark = HighWaterMark(config.generation, server.core.version)
        journaled.reached = HighWaterLog(self._saved.folder, mark)
        journaled.about, journaled.recovered = self.about, self.recovered
        if not self.about["on"]:
            return
        server.decoder.keeps_coded = True
        limits = {reason: limit_of(self._run, reason) for reason in END_REASONS}
        settings = ReplaySettings(config, server.lease_seconds, limits).to_plain()
        model_bytes = server.core.model.theta.nbytes
        journaled.write_to(self._saved.new_journal(self._coder, model_bytes), settings)

    def _count_lost(self, core: PsCore) -> None:
        """Count, and say, what the life before had applied and is gone."""
        reached = self._saved.reached_version
        if reached is None:
            return
        core.accounts.note_lost_updates(reached)
        if (lost := reached - core.version) > 0:
            logging.warning(
                "this shard goes on from version %d; it had come to %d: %d updates are lost",
                *(core.version, reached, lost),
            )
        else:
            logging.info("this shard goes on from version %d: no update is lost", core.version)
