"""Optimizers that apply merged updates on the parameter server, or do a worker's local steps.

A `ServerUpdate` applies a merged update to a shard server's weights, through a Keras optimizer or
through arithmetic that equals the arithmetic of Keras. A `LocalStep` does a worker's local
optimizer step between two pushes (`thinwire.ops.optimizers.local`).
`thinwire.ops.optimizers.schedule` computes the learning rate of the run. Each value of the flag
--server_optimizer is a key of `OPTIMIZERS`.
"""
