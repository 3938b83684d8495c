"""Decides whether a PS shard writes a journal of its events, and replays the previous journal.

``--journal=auto`` decides by the size of the training method's pushes, which is measured before
training starts. With ``--journal=auto``, sparse pushes, which are small compared with the model,
are journaled, and dense pushes are not.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from absl import logging

from thinwire.ops.codecs.base import EncodeContext
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.kernels import load_kernels
from thinwire.ops.methods.method import Method
from thinwire.ops.types import ModelSpec, State, TensorSpec
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.ps.core.core import PsCore
from thinwire.ps.persistence.journal import (
    HighWaterLog,
    HighWaterMark,
    JournaledCore,
    JournalPosition,
)
from thinwire.ps.persistence.journal_format import EventCoder
from thinwire.ps.persistence.replay import MakeCore, ReplaySettings
from thinwire.ps.persistence.shard_store import SavedShard
from thinwire.ps.wire.push_decoder import PushDecoder
from thinwire.runtime.run.settings import Run

#: Smallest size of a push, as a fraction of the model's size, at which --journal=auto writes no
#: journal.
LARGEST_FRACTION = 0.1
#: Largest number of model entries that are coded to measure the size of a push.
_MOST_ENTRIES = 4_000_000


class JournalPolicy:
    """Decides at the run's start, from --journal and the training method, if a shard writes a
    journal.

    Attributes:
        about: Entries about the journal for the run's summary, without the counts of events and
            bytes.
        recovered: Number of events restored from journals over all restarts, and descriptions of
            the damage that ended a replay.

    Args:
        run: Settings of the training run.
        choice: Value of the flag --journal: "auto", "on" or "off".
        saved: Saved files of the shard: checkpoints and journals.
        coder: Coder of the shard's events as journal records.
        spec: Names, shapes and dtypes of the whole model's variables.
    """

    def __init__(
        self, run: Run, choice: str, saved: SavedShard, coder: EventCoder, spec: ModelSpec
    ) -> None:
        self._run, self._saved, self._coder = run, saved, coder
        self.about: dict[str, Any] = {"flag": choice, "on": choice == "on"}
        self.recovered: State = saved.last.recovered
        if choice == "auto":
            fraction = push_fraction(run.method, spec)
            self.about |= {"on": fraction < LARGEST_FRACTION, "push_fraction": fraction}
            logging.info(
                "--journal=auto: %s; a push has %.3g times the model's size, and the limit is %g",
                *("on" if self.about["on"] else "off", fraction, LARGEST_FRACTION),
            )

    def replay(self, make: MakeCore | None) -> None:
        """Replay the journal's events on the state of the newest snapshot.

        Args:
            make: Function that makes a shard's state machine from its settings; None: continue from
                the snapshot without a replay.
        """
        replayed = None if make is None else self._saved.replay(make, self._coder)
        if replayed is None:
            return
        before = self.recovered
        self.recovered = {
            "replayed": before["replayed"] + replayed.num_records,
            "cuts": [*before["cuts"], *([replayed.damage] if replayed.damage else [])],
        }

    def begin(self, journaled: JournaledCore, decoder: PushDecoder, lease_seconds: float) -> None:
        """Count updates lost before the restart; then `start`, with a journal that continues the
        replayed one.

        Args:
            journaled: State machine of the shard, with the journal of its events.
            decoder: Decoder of the shard's pushes.
            lease_seconds: Time in seconds without a message of a worker, after which the worker is
                expelled.
        """
        self._count_lost(journaled.core)
        journaled.recovered = self.recovered
        self.start(journaled, decoder, lease_seconds, self._saved.replayed_to)

    def start(
        self,
        journaled: JournaledCore,
        decoder: PushDecoder,
        lease_seconds: float,
        after: JournalPosition | None = None,
    ) -> None:
        """Start a journal of the model at the next snapshot, if --journal allows it.

        Args:
            journaled: State machine of the shard, without a journal.
            decoder: Decoder of the model's pushes.
            lease_seconds: Time in seconds without a message of a worker, after which the worker is
                expelled.
            after: End of the journal that the new journal continues; None if it continues none.
        """
        core, config = journaled.core, journaled.core.config
        mark = HighWaterMark(config.generation, core.version)
        journaled.high_water = HighWaterLog(self._saved.folder, mark)
        journaled.about = self.about
        if not self.about["on"]:
            decoder.spares_updates = True
            return
        decoder.keeps_coded = True
        settings = ReplaySettings(config, lease_seconds).to_plain()
        model_bytes = core.model.theta.nbytes
        journaled.write_to(self._saved.new_journal(self._coder, model_bytes, after), settings)

    def _count_lost(self, core: PsCore) -> None:
        """Count and log the updates that the shard applied before its last restart and lost."""
        reached = self._saved.reached_version
        if reached is None:
            return
        core.counters.note_lost_updates(reached)
        if (lost := reached - core.version) > 0:
            logging.warning(
                "this PS shard continues from version %d, but had reached %d: %d updates are lost",
                *(core.version, reached, lost),
            )
        else:
            logging.info("this PS shard continues from version %d: no update is lost", core.version)


def push_fraction(method: Method, spec: ModelSpec) -> float:
    """Return the coded size of a push as a fraction of the model's float32 size.

    To measure the size of a push, `push_fraction` encodes random values with the training method's
    codec (after the codec's warm-up) and the wire format. To measure the size of a push of a large
    model, `push_fraction` encodes only some of the model's tensors. If workers sum gradients among
    themselves (--collective), they push whole weights, so a push is as large as the model.
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
    """Return the model's first tensors that together have at most `_MOST_ENTRIES` entries.

    The sample of the model's tensors, whose coded size is measured, contains at least one tensor. A
    sampled tensor with more than `_MOST_ENTRIES` entries is cut to its first rows.
    """
    sampled: list[TensorSpec] = []
    num_entries = 0
    for tensor in spec.tensors:
        if tensor.size > _MOST_ENTRIES:
            row = tensor.shape[1:]
            rows = max(1, _MOST_ENTRIES // math.prod(row))
            tensor = TensorSpec(tensor.path, (min(rows, tensor.shape[0]), *row), tensor.dtype)
        if not sampled or num_entries + tensor.size <= _MOST_ENTRIES:
            sampled.append(tensor)
            num_entries += tensor.size
    return ModelSpec(tuple(sampled))
