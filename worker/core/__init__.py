"""The worker's engine: the computation between a gradient and the next weights.

The engine has no IO, threads or clock, so that the worker, the Simulator and the tests run the same
code. `WorkerCore` (core) encodes changes and applies replies. `LocalRound` (local_round) holds the
local steps of a round. `PushRequest` and `ShardReply` (messages) are the messages of an exchange.
The package re-exports no names, because its modules import numpy.
"""
