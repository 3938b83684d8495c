"""Downlink codecs select the weights or updates that a shard server sends in replies to workers.

Replies of shard servers cost as much bandwidth as workers' pushes, and a worker that already has
most of the model does not need the whole model. The downlink codec ``dense`` sends all weights of
the shard server in every reply. The downlink codec ``delta`` sends the new values of the weights
that changed, exactly. The downlink codec ``relay`` forwards the workers' coded updates if they take
fewer bytes than new weights; the receiving worker's weights then equal the shard server's weights
exactly. The downlink codec ``sparse`` sends the weights that differ most from the worker's weights;
the shard server stores a replica (a copy) of each worker's weights to know the differences. The
downlink codec ``auto`` switches a worker from ``relay`` to ``sparse`` if the worker's replies are
large. The registry of downlink codecs is `thinwire.ops.downlink.registry`; their interface is
`base.DownCodec`.
"""
