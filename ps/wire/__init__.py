"""Decodes a PS shard's received messages into checked events, and encodes its replies.

`PushDecoder` (module push_decoder) checks and decodes the pushes of workers. `ClaimBounds` (module
claims) checks the numbers that workers report in messages. The modules `epochs` and `reports`
handle messages between shards, and the module `replies` codes the shard's replies to workers.
Import the modules of `ps.wire` by name, because they need numpy and protobuf, which --help does not
load.
"""
