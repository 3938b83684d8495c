"""One shard of the parameter server as a sans-IO state machine, driven by events.

`PsCore` (core) owns the parts, turns their answers into actions and is the only module that knows
them all: `MemberTable`, `RoundScheduler`, `RunLifecycle`, `Membership`, `UpdateGuard`,
`Quarantine`, `RegroupPlanner`, `RegroupFollower`, `PacingService`, `ShardModel`, `Counters` and
`WorkerAverages`. `events` are its inputs and outputs. Modules are imported by name: the core needs
numpy, and --help does not.
"""
