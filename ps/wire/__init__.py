"""Wire messages of a PS shard: decodes bytes into checked events; codes replies as frames.

`PushDecoder` (module push_decoder) checks and decodes the pushes of workers. `ClaimBounds` (module
claims) checks the numbers that workers report in messages. The modules `epochs` and `reports`
handle messages between shards, and the module `replies` codes the shard's replies to workers.
Import the modules of `ps.wire` by name, because they need numpy and protobuf, which --help does not
load.
"""
