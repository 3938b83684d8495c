"""Weightings of stale updates: full weight, less weight by staleness, or delay compensation.

A `Weighting` scales the workers' updates of a round before the shard server merges the updates. The
scale of an update depends on the number of updates that the shard server has applied since the
version of the weights at which the update was computed. `WEIGHTINGS` has an entry for each value of
the flag --weighting.
"""
