"""What a worker makes of a change before it is sent: codec, split over shards, router."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ops.methods import Method
from ops.routing import split
from ops.routing.routed import Lost, RouteContext, Routed
from ops.types import Block, EncodeContext, ModelSpec, Packet, ShardLayout, State

if TYPE_CHECKING:
    from ops.types import Float32


class Packing:
    """Codec and router of one worker, with what they keep back.

    Attributes:
        sent: Of the last exchange, per shard: what the codec made.

    Args:
        spec: The shared model.
        layouts: Of every shard.
        method: The composition.
        kernels: ops.kernels.Kernels.
        seed: The run's seed and the worker's number: entropy of its random generator.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layouts: tuple[ShardLayout, ...],
        method: Method,
        kernels: Any,
        seed: Sequence[int],
    ) -> None:
        self._method, self._kernels, self._layouts = method, kernels, layouts
        self._spec = spec
        self._offsets = spec.offsets
        self._seed, self._number = seed[0], seed[-1]
        self._rng = np.random.default_rng(seed)
        self._codec_state = method.codec.init(spec, kernels)
        self._router_state = method.router.init(layouts)
        self._last_packet: Packet | None = None
        self.sent: list[tuple[Block, ...]] = []

    def encode(self, values: Float32, step: int, learning_rate: float, epoch: float) -> Packet:
        """Code a change of the whole model.

        Args:
            values: [num_parameters] float32 gradient or change of weights; an array, or an
                `ops.kernels.device.DeviceArray`.
            step: Of the exchange.
            learning_rate: In use now.
            epoch: Examples the whole run has consumed / examples of the training set.

        Raises:
            ops.codecs.NonFiniteUpdate: They hold NaN or infinity; nothing has changed.
        """
        tensors = [
            values[start:stop]
            for start, stop in zip(self._offsets, self._offsets[1:], strict=False)
        ]
        context = EncodeContext(
            step=step,
            learning_rate=learning_rate,
            rng=self._rng,
            kernels=self._kernels,
            epoch=epoch,
        )
        packet, self._codec_state = self._method.codec.encode(tensors, self._codec_state, context)
        self._last_packet = dataclasses.replace(packet, kind=self._method.kind)
        return self._last_packet

    def route(self, packet: Packet, step: int, loss: float) -> list[Routed]:
        """Cut a packet over the shards, and part what goes to each by class of service."""
        self.sent = split(packet, self._layouts)
        router = self._method.router
        context = RouteContext(step, loss, self._seed, self._number, self._kernels)
        self._router_state = router.begin(self._router_state, context)
        routed = []
        for shard, blocks in enumerate(self.sent):
            part, self._router_state = router.cut(shard, blocks, self._router_state, context)
            routed.append(part)
        return routed

    def settle(self, shard: int, lost: Sequence[Lost]) -> None:
        """Hear what of the last push to a shard is known to be lost."""
        self._router_state = self._method.router.undelivered(shard, lost, self._router_state)

    def undelivered(self) -> None:
        """Hear that the last packet was refused; who has a residual takes it back."""
        if self._last_packet is None:
            return
        codec, router = self._method.codec, self._method.router
        self._codec_state = codec.undelivered(self._last_packet, self._codec_state)
        for shard in range(len(self._layouts)):
            self._router_state = router.undelivered(shard, None, self._router_state)

    def forget(self, shards: Iterable[int]) -> None:
        """Hear that shards refused the last packet as too large; nothing is kept back of it."""
        self._codec_state = self._method.codec.init(self._spec, self._kernels)
        for shard in shards:
            self.settle(shard, ())

    def save(self) -> State:
        """Return what outlives this process."""
        return {
            "codec": self._kernels.as_saved(self._codec_state),
            "router": self._router_state,
            "rng": json.dumps(self._rng.bit_generator.state),
        }

    def restore(self, state: State, fits: bool) -> None:
        """Take back what `save` gave; what was kept back only if it `fits` the shards' model."""
        self._rng.bit_generator.state = json.loads(state["rng"])
        if fits:
            self._codec_state = self._kernels.as_kept(state["codec"], self._codec_state)
            self._router_state = state["router"]
