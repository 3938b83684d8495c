"""Benchmarks of the ops against the limits of a processor, its memory, or a GPU."""
