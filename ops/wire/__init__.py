"""Coding of tensor blocks as bytes, and back: pure functions of arrays, without sockets.

Callers use the module `blocks`: `IndexChooser` encodes, `decode_block` checks and decodes.
`index_codings` codes positions, `value_codings` and `few_bits_coding` code values,
`low_rank_coding` codes products of thin matrices, and `low_rank` multiplies these products out.
Workers and shards share this package: a worker imports no other code of shards, and a shard imports
no other code of workers.
"""
