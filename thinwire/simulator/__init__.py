"""The Simulator role: performs a whole training run in one process, with real gradients.

A simulated run uses the code of a real run for the states of workers and PS shards, the codecs and
the worker's protocol. The Simulator simulates the times of devices (`devices`), links and gRPC
streams (`links`), datagrams, deaths of workers, and the capacity of a PS shard, on a virtual clock
(`clock`).

The class `Simulation` (module simulation) builds all nodes and advances virtual time. The classes
`SimulatedWorker` (module worker), `SimulatedExchange` (exchange) and `SimulatedClient` (client)
form a simulated worker. The class `SimulatedShard` (module shard) is a simulated PS shard, and
`StoredShard` (storage) stores the shard's files. The module `records` writes the records that a
Supervisor writes in a real run. The package `simulator` re-exports no names, because `--help` reads
`simulator.flags` and must not import TensorFlow.
"""
