"""Differential privacy of each worker's data, in the central model: the PS sees clipped updates.

`contribution` bounds what a worker sends of a round, `central` adds Gaussian noise to the mean of a
round on the PS, and `accountant` computes what the released models promise.
"""
