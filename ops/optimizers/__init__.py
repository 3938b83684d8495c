"""How weights change: on the PS with every release, on workers between two exchanges.

A `ServerUpdate` makes new weights of a released update, through a Keras optimizer or arithmetic
that equals Keras's. A `LocalStep` is a worker's own step (`thinwire.ops.optimizers.local`), and
`thinwire.ops.optimizers.schedule` the learning rate of all. A value of --server_optimizer is a row
of `OPTIMIZERS`.
"""

from thinwire.ops.optimizers.base import FlatOptimizer, LocalStep, ServerUpdate
from thinwire.ops.optimizers.server import OPTIMIZERS, OptimizerUpdate

__all__ = ["OPTIMIZERS", "FlatOptimizer", "LocalStep", "OptimizerUpdate", "ServerUpdate"]
