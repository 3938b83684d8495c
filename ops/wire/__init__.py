"""Encoding of tensor blocks as bytes, and decoding: functions of arrays, without sockets.

In the module `thinwire.ops.wire.blocks`, `IndexChooser` encodes tensor blocks, and `decode_block`
checks and decodes received blocks. The module `index_codings` codes positions of values,
`value_codings` and `few_bits_coding` code values, and `low_rank` multiplies products of thin
matrices out. Workers and shard servers share the package `thinwire.ops.wire`: a worker imports no
other code of shard servers, and a shard server imports no other code of workers.
"""
