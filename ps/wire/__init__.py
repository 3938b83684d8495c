"""Wire messages of a PS shard: decodes bytes to checked events, and codes actions as frames.

`PushDecoder` (push_decoder) checks and decodes pushes. `ClaimBounds` (claims) checks the numbers
that workers claim. `epochs` and `reports` handle the messages between shards, and `replies` codes
the shard's replies to workers. Import the modules by name: they need numpy and protobuf, and
--help does not.
"""
