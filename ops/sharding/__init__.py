"""The shared variables of a model, and their division among the shard servers.

The module `w_global` is the registry of variables that workers share through the parameter server.
The module `placement` has the policies that divide a model among the shard servers, and `split`
cuts a packet (coded update) for the shard servers. Every node computes the same division of the
model without communication. Import the submodules of `thinwire.ops.sharding` directly: `w_global`
looks for a loaded TensorFlow, and the other modules do not need it.
"""
