"""The Simulator role: a whole run in one process, on a virtual clock, with real gradients.

The engines of worker and PS, their coding and the worker's protocol are those of a real run; what
is simulated lies between them: the time of devices (`devices`), links and streams (`links`),
datagrams, deaths, and the capacity of a shard. `Simulation` (simulation) builds all nodes and lets
virtual time pass (`clock`); `SimulatedWorker` (worker), `SimulatedExchange` (exchange) and
`SimulatedClient` (client) are a worker from its trainer to its streams; `SimulatedShard` (shard)
is a shard, `StoredShard` (storage) its files; `records` writes what a Supervisor would.
Nothing is re-exported: `--help` reads `simulator.flags`, which must not import TensorFlow.
"""
