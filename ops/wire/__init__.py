"""Blocks of tensors as bytes, and back: pure functions of arrays, without sockets or messages.

`blocks` is the entrance: `IndexChooser` encodes, `decode_block` checks and decodes. Positions are
coded by `index_codings`, values by `value_codings` and `few_bits_coding`, products of thin matrices
by `low_rank_coding`; `low_rank` writes such a product out. A worker and a shard import nothing else
of each other.
"""
