"""Benchmarks of Thinwire's streams and datagrams against the limits of the network."""
