"""The core of one parameter server shard: a sans-IO state machine, driven by events.

`PsCore` (module `core`) owns the parts of the core and is the only class that knows all of them:
`MemberTable`, `RoundScheduler`, `RunLifecycle`, `Membership`, `UpdateGuard`, `Quarantine`,
`RegroupPlanner`, `RegroupFollower`, `PacingService`, `ShardModel`, `Counters` and `WorkerAverages`.
`PsCore` turns the values that the parts return into actions. The module `events` defines the
core's inputs (events) and outputs (actions). The package `ps.core` imports none of its modules: the
core needs numpy, and --help must not load numpy.
"""
