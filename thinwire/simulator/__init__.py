"""The Simulator role: runs a whole training run in one process, with real gradients.

A simulated run uses the state machines of workers and shards, the codecs and the worker's protocol
of a real run. Simulated are the time of devices (`devices`), links and streams (`links`),
datagrams, deaths, and the capacity of a shard, on a virtual clock (`clock`).

`Simulation` (simulation) builds all nodes and advances virtual time. `SimulatedWorker` (worker),
`SimulatedExchange` (exchange) and `SimulatedClient` (client) form a worker, from its trainer to its
streams. `SimulatedShard` (shard) is a shard, and `StoredShard` (storage) stores its files.
`records` writes the records that a Supervisor writes in a real run. The package re-exports nothing:
`--help` reads `simulator.flags`, which must not import TensorFlow.
"""
