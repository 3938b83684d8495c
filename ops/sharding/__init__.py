"""Which variables are shared, and which shard holds which entries of them.

`w_global` is the registry of shared variables, `placement` the policies that divide a model over
the shards, `split` cuts a packet accordingly. Every node computes the same division by itself.
Import the modules themselves: `w_global` looks for TensorFlow, the others do not.
"""
