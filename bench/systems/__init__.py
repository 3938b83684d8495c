"""Benchmarks of whole PS processes, workers and runs: their costs, memory and speed."""
