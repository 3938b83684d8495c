"""The shared variables of a model, and their division among the shard servers.

The module `w_global` is the registry of variables that workers share through the parameter server.
The module `placement` has the policies that divide a model among the shard servers, and `split`
cuts a packet (coded update) for the shard servers. Every node (worker or shard server) computes the
same division of the model without communication. The package `thinwire.ops.sharding` imports none
of its modules, because `w_global` looks for a loaded TensorFlow, which the modules `placement` and
`split` do not need.
"""
