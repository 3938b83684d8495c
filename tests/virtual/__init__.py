"""Shards and workers of a run in one thread, on a virtual clock: real cores, no sockets."""
