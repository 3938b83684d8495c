"""Training methods: combinations of policies (codec, optimizer and others) that train a model.

A training method (class `Method`) holds one policy for each policy interface. The dict `METHODS`
lists the combinations of policies that published papers describe. `compose` builds a training
method from the values of the flags. `thinwire.ops.methods.validation` rejects policies that cannot
work together, before the run starts.
"""
