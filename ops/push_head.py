"""The plain numbers of a push, from the worker's script to the PS shard's optimizer.

A worker builds one `PushHead` for an exchange and one `PushOrigin` for each shard. The worker's
request, the shard's event, the shard's arrival and the shard's stored state contain both objects
whole, so that no code between the worker and the optimizer copies single numbers. Two rules hold
for a new number:

- A number without an array belongs to `PushHead` if it is the same for all shards, and else to
  `PushOrigin`. `thinwire.proto.push_head` converts both from and to the protocol message.
- Every field has a default, which is also the default of the field in the protocol message. A
  journal or checkpoint that was written before the field existed then still can be read.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PushHead:
    """Numbers of a push that are the same for all shards.

    A script fills in the numbers of one mini-batch, and the worker's engine adds the numbers of the
    round that ends with this mini-batch (`WorkerCore.begin`).

    Attributes:
        step: Number of the exchange, which the worker counts from 1.
        samples: Number of examples from whose gradients the push was computed.
        local_steps: Number of local steps in the push; 0 if the push has no update.
        loss: Mean loss over the mini-batches of the push; None if unknown, as in a script's own
            training loop.
        learning_rate: Learning rate that the script has set; None to use the rate of the run's
            schedule.
        loss_scale: Factor by which the loss was multiplied when the gradient was computed; 0
            without loss scaling. The gradient in the push is unscaled.
        overflow: True if the gradient overflowed at the scale `loss_scale`. The push then has no
            blocks.
        optimizer: Number of the script's optimizer, from 0, with which the PS applies this
            gradient.
        repeats_batch: True if an earlier push has counted the examples of this push.
        batch_parts: Size of the push in parts of the script's batch. Each batch of the script has
            nb_workers parts.
        settings: Numbers of all parameter groups of a torch optimizer, as the script has them for
            this step, in the order of `thinwire.ops.optimizers.torch_groups`; empty for Keras.
        without_gradient: Positions of the optimizer's parameters that got no gradient in this step,
            ascending. If no push of a round has a gradient for a parameter, the step leaves the
            parameter as it is, as torch's optimizers do.
        schedule_rate: Learning rate of the run's schedule at the worker. The worker sends it only
            if `learning_rate` is None. A shard checks the rate and does not use or store it.
    """

    step: int = 0
    samples: int = 0
    local_steps: int = 0
    loss: float | None = None
    learning_rate: float | None = None
    loss_scale: float = 0.0
    overflow: bool = False
    optimizer: int = 0
    repeats_batch: bool = False
    batch_parts: int = 0
    settings: tuple[float, ...] = ()
    without_gradient: tuple[int, ...] = ()
    schedule_rate: float = dataclasses.field(default=0.0, compare=False)


#: Numbers of a push of which nothing is known or set.
NO_HEAD = PushHead()


@dataclasses.dataclass(frozen=True)
class PushOrigin:
    """The model of one shard that a worker held when it pushed.

    Attributes:
        base_version: Version of the shard's model that the worker holds.
        generation: Number of restarts of the shard when it sent this model to the worker.
        lag: Number of versions between the model at which the update was computed and
            `base_version`.
        base_checksum: CRC-32 checksum of the worker's copy of the shard's weights. None in most
            pushes, because a worker sends checksums only at intervals.
    """

    base_version: int = 0
    generation: int = 0
    lag: int = 0
    base_checksum: int | None = None

    @property
    def computed_at(self) -> int:
        """Version of the shard's model at which the worker computed its update."""
        return self.base_version - self.lag
