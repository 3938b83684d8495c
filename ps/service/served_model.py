"""The model that a PS shard serves in one phase, as one immutable object.

A phase is a period in which the run trains one model. Every part of a shard that depends on the
model (streams, status, journal, checkpoints, identity) reads the one object `ShardServer.served`.
Two rules hold:

- A `ServedModel` never changes, except for its parts' own state. A thread that reads the server's
  `ServedModel` once therefore sees layout, limits and decoder of one phase, never of two.
- A phase begins when the writer thread replaces the `ServedModel` (`ShardServer.begin_phase`).
  State that outlasts a phase, such as connections and reports, belongs to the server.
"""

from __future__ import annotations

import dataclasses
import functools

from thinwire.ops.offer import Offer
from thinwire.ops.sharding.split import part_of_layout
from thinwire.ops.types import ModelSpec, ShardLayout
from thinwire.proto.grpc.session import payload_limit
from thinwire.ps.core.core import PsCore
from thinwire.ps.datagrams.port import DatagramPort
from thinwire.ps.persistence.shard_checkpoint import ShardCheckpoint, model_rows
from thinwire.ps.wire.claims import ClaimBounds
from thinwire.ps.wire.push_decoder import PushDecoder


@dataclasses.dataclass(frozen=True, eq=False)  # a phase is compared by identity, not by arrays
class ServedModel:
    """A model that a shard serves, with everything that another model replaces.

    Attributes:
        core: State machine of the shard, which holds the model's weights.
        spec: Names, shapes and dtypes of the whole model's variables.
        layout: Layout of the shard: the slices of variables that it holds.
        bounds: Limits of the numbers that workers may report in messages, for example batch sizes.
        decoder: Decoder of the pushes for the model.
        offer: Description of the model that a worker has sent; None if the flags name the model.
        phase: Number of the phase of the script in which the model is trained; 0 without a script.
        since: Number of the first phase that trained the model's variables.
        datagrams: Port that receives UDP datagrams; None if the training method sends no datagrams.
            The shard's server opens the port.
    """

    core: PsCore
    spec: ModelSpec
    layout: ShardLayout
    bounds: ClaimBounds
    decoder: PushDecoder
    offer: Offer | None = None
    phase: int = 0
    since: int = 0
    datagrams: DatagramPort | None = None

    @classmethod
    def of(
        cls,
        core: PsCore,
        spec: ModelSpec,
        layout: ShardLayout,
        bounds: ClaimBounds | None = None,
        offer: Offer | None = None,
        phase: int = 0,
        since: int = 0,
    ) -> ServedModel:
        """Return a model with a new decoder of its pushes.

        Args:
            core: State machine of the shard, which holds the model's weights.
            spec: Names, shapes and dtypes of the whole model's variables.
            layout: Layout of the shard: the slices of variables that it holds.
            bounds: Limits of the numbers that workers may report in messages; None for the limits
                of the training method.
            offer: Description of the model that a worker has sent; None if the flags name the
                model.
            phase: Number of the phase of the script in which the model is trained.
            since: Number of the first phase that trained the model's variables.
        """
        method = core.model.method
        bounds = bounds or ClaimBounds.of(method)
        # For each optimizer of a script: the slices of the shard's variables that it updates.
        groups = [part_of_layout(layout, numbers)[1] for numbers in offer.groups()] if offer else ()
        decoder = PushDecoder(
            *(layout, core.model.kind, core.model.kernels, core.averages.size, bounds, groups),
            keeps_blocks=method.down_codec.relays,
        )
        return cls(core, spec, layout, bounds, decoder, offer, phase, since)

    @functools.cached_property
    def largest_push(self) -> int:
        """Largest legal payload of a worker's push, in bytes.

        If a push may contain changes of the weights outside the optimizer, it may be twice as
        large.
        """
        limit = payload_limit(self.layout, self.decoder.aux_count)
        return limit + payload_limit(self.layout) if self.bounds.takes_changes else limit

    @property
    def share(self) -> float:
        """Fraction of the model's values that the shard holds (0 to 1), for emulated links."""
        return self.layout.size / self.spec.num_parameters

    def described(self, state: ShardCheckpoint) -> ShardCheckpoint:
        """Return the contents of a checkpoint with the description of this model."""
        offer = None if self.offer is None else self.offer.to_json()
        return dataclasses.replace(
            state, model=model_rows(self.spec), offer=offer, phase=self.phase, since=self.since
        )

    def has_variables_of(self, other: ServedModel) -> bool:
        """Return True if training continues with the variables of the other model: all variables,
        their layout and the script's count of models (`Offer.succession`) are equal.
        """
        own = 0 if self.offer is None else self.offer.succession
        others = 0 if other.offer is None else other.offer.succession
        return (self.spec, self.layout, own) == (other.spec, other.layout, others)
