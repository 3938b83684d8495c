"""The worker's engine: the computation between a gradient and the next weights.

The worker's engine has no IO, threads or clock, so that the worker, the Simulator and the tests run
the same code. The class `WorkerCore` (module core) encodes changes of weights and applies replies.
The module `local_model` has the weights between two exchanges, and the class `LocalRound` (module
local_round) counts the local steps of a round. The classes `PushRequest` and `ShardReply` (module
messages) are the messages of an exchange. The package `worker.core` re-exports no names, so that
importing it does not import numpy.
"""
