"""The Simulator role: performs a whole training run in one process, with real gradients.

A simulated run uses the state machines of workers and PS shards, the codecs and the worker's
protocol of a real run. The Simulator simulates the time of devices (`devices`), links and streams
(`links`), datagrams, deaths, and the capacity of a PS shard, on a virtual clock (`clock`).

The class `Simulation` (module simulation) builds all nodes and advances virtual time. The classes
`SimulatedWorker` (module worker), `SimulatedExchange` (exchange) and `SimulatedClient` (client)
form a simulated worker. The class `SimulatedShard` (module shard) is a simulated PS shard, and
`StoredShard` (storage) stores the shard's files. The module `records` writes the records that a
Supervisor writes in a real run. The package `simulator` re-exports no names, because `--help` reads
`simulator.flags` and must not import TensorFlow.
"""
