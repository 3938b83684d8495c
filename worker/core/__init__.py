"""The worker's engine: what one worker computes between a gradient and the next weights.

No IO, threads or clock, so that the real worker, the Simulator and the tests drive the same code.
`WorkerCore` (core) encodes changes and applies replies, `LocalRound` (local_round) holds the local
steps of a round, `PushRequest` and `ShardReply` (messages) are what travels.
Nothing is re-exported: the engine needs numpy.
"""
