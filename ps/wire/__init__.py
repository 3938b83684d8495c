"""A shard's messages of the wire: from bytes to checked events, and from actions to frames.

`PushDecoder` (push_decoder) checks and decodes pushes, `ClaimBounds` (claims) the numbers that
workers claim, `epochs` and `reports` the messages between shards; `replies` codes replies. Modules
are imported by name: they need numpy and protobuf, and --help does not.
"""
