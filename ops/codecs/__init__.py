"""Gradient codecs select and encode the gradient entries that a worker sends in a training step.

A `Codec` encodes the gradient tensors of a training step into a packet (the data to send). Wrappers
around a gradient codec store the entries that were not sent, correct momentum, clip gradients, or
send small tensors whole. Each value of the flag --codec is a key of `CODECS`; `build_codec` adds
the wrappers (clipping, warm-up and others) that every gradient codec can have.
"""
