"""Aggregates merge the workers' updates of a training round; guards reject faulty updates.

An `Aggregate` merges all updates of a training round into one update: their mean, or for each
weight a value on which a single outlier has little effect. The module `outliers` limits the
magnitude and the norm of a worker's update, and defines when a shard server quarantines a worker.
The dict `AGGREGATES` has an entry for each value of the flag --aggregate.
"""
