"""The whole model as a Supervisor sees it: fetched from every shard."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ops.kernels.quantise import dequantise
from ops.types import ConfigurationError, ModelSpec, ShardLayout
from proto import convert
from proto import thinwire_pb2 as pb
from supervisor.shard_stream import ShardStream

if TYPE_CHECKING:
    from ops.types import Float32

#: How long to ask again while shards in lockstep answer in the middle of a round.
_SAME_VERSION_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class View:
    """The whole model at one vector of versions."""

    weights: Float32  # [num_parameters]
    statistics: Float32 | None  # [m] moving statistics, where they are averaged
    versions: list[int]


class Viewer:
    """Fetches the model from the shards.

    Args:
        spec: Of the whole model.
        layouts: Of every shard.
        num_statistics: Numbers in the moving statistics.
        in_step: The shards apply updates in rounds, so that one version of all can be had.
    """

    def __init__(
        self, spec: ModelSpec, layouts: Sequence[ShardLayout], num_statistics: int, in_step: bool
    ) -> None:
        self._spec, self._layouts = spec, layouts
        self._num_statistics, self._in_step = num_statistics, in_step

    def fetch(self, shards: Sequence[ShardStream]) -> View | None:
        """Return the model, or None if a shard does not answer.

        Of shards that step together it is at one version of all, if they let us.

        Raises:
            ConfigurationError: A shard answers with something else than its model.
        """
        deadline = time.monotonic() + _SAME_VERSION_SECONDS
        while True:
            view = self._fetch_once(shards)
            mixed = view is not None and len(set(view.versions)) > 1
            if not (mixed and self._in_step and time.monotonic() < deadline):
                return view

    def _fetch_once(self, shards: Sequence[ShardStream]) -> View | None:
        weights = np.empty(self._spec.num_parameters, np.float32)
        versions, statistics = [], None
        for shard in shards:
            while not shard.replies.empty():  # of a pull that was given up
                if shard.replies.get() is None:
                    return None
            shard.session.say(pb.ToServer(pull=pb.Pull(observe=True)))
        for shard, layout in zip(shards, self._layouts, strict=True):
            # No deadline but the stream's own, which the shard's silence ends: a large model takes
            # minutes over a slow link.
            answer = shard.replies.get(timeout=None)
            if answer is None:
                return None
            try:
                aux = self._place(layout, *answer, weights)
            except convert.Malformed as error:
                raise ConfigurationError(
                    f"{shard.session.address} sent a model that cannot be read ({error}); install "
                    "the same Thinwire on all nodes."
                ) from error
            statistics = aux if aux is not None else statistics
            versions.append(answer[0].version)
        return View(weights, statistics, versions)

    def _place(
        self, layout: ShardLayout, reply: pb.Reply, payload: memoryview, weights: Float32
    ) -> Float32 | None:
        """Write a shard's part into the weights; return the statistics that came with it.

        Raises:
            Malformed: It is not the whole part.
        """
        payload, aux = convert.carve_aux(payload, reply.aux_count, (0, self._num_statistics))
        sizes = [piece.size for piece in layout.slices]
        blocks = convert.blocks_from_message(reply.blocks, payload, sizes)
        if len(blocks) < len(sizes) or any(block.indices is not None for block in blocks):
            raise convert.Malformed(f"{len(blocks)} blocks; expected {len(sizes)} whole ones")
        for block, piece in zip(blocks, layout.slices, strict=True):
            start = self._spec.offsets[piece.tensor] + piece.start
            weights[start : start + piece.size] = dequantise(block.values)
        return aux
