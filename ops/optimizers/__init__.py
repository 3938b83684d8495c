"""Steps that change weights: on the PS at every release, on a worker between two exchanges.

A `ServerUpdate` applies a released update to a shard's weights, through a Keras optimizer or
through arithmetic that equals Keras's. A `LocalStep` is a worker's step
(`thinwire.ops.optimizers.local`). `thinwire.ops.optimizers.schedule` computes the learning rate of
the run. Each value of --server_optimizer is a row of `OPTIMIZERS`.
"""

from thinwire.ops.optimizers.base import LocalStep, ServerUpdate
from thinwire.ops.optimizers.server import OPTIMIZERS, OptimizerUpdate

__all__ = ["OPTIMIZERS", "LocalStep", "OptimizerUpdate", "ServerUpdate"]
