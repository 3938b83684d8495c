"""Differential privacy of each worker's data, in the central model: the PS sees clipped updates.

`contribution` bounds the norm of a worker's update in a round. `central` adds Gaussian noise to the
mean of a round on the PS. `accountant` computes the privacy guarantee of the released models.
"""
