"""One shard of the parameter server as a sans-IO state machine, driven by events.

`PsCore` (core) owns the parts and is the only module that knows all of them: `MemberTable`,
`RoundScheduler`, `RunLifecycle`, `Membership`, `UpdateGuard`, `Quarantine`, `RegroupPlanner`,
`RegroupFollower`, `PacingService`, `ShardModel`, `Counters` and `WorkerAverages`. It turns the
values that the parts return into actions. The module `events` defines its inputs and outputs.
This package imports none of its modules: the core needs numpy, and --help must not load numpy.
"""
