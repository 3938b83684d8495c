"""The shared variables of a model, and their division over the shards.

`w_global` is the registry of shared variables. `placement` has the policies that divide a model
over the shards, and `split` cuts a packet for the shards. Every node computes the same division
without communication. Import the submodules directly: `w_global` looks for a loaded TensorFlow, and
the other modules do not need it.
"""
