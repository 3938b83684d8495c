"""Shards and workers of a run in threads of one process: real servers and streams, loopback."""
