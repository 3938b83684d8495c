"""Coding of tensor blocks as bytes, and back: pure functions of arrays, without sockets.

Callers use the module `blocks`: `IndexChooser` encodes blocks, and `decode_block` checks and
decodes them. The module `index_codings` codes positions, `value_codings` and `few_bits_coding` code
values, `low_rank_coding` codes products of thin matrices, and `low_rank` multiplies these products
out. Workers and shard servers share the package `thinwire.ops.wire`: a worker imports no other code
of shard servers, and a shard server imports no other code of workers.
"""
