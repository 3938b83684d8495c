"""The core of one parameter server shard: a sans-IO state machine, driven by events.

`PsCore` (module `core`) is the only class of a shard's state machine that knows all its components:
`MemberTable`, `RoundScheduler`, `RunLifecycle`, `Membership`, `UpdateGuard`, `Quarantine`,
`RegroupPlanner`, `RegroupFollower`, `PacingService`, `ShardModel`, `Counters` and `WorkerAverages`.
`PsCore` turns the return values of the components of a shard's state machine into actions. The
module `events` defines the inputs (events) and outputs (actions) of a shard's state machine. The
package `ps.core` does not import its own modules, because they load numpy, which --help must not
load.
"""
