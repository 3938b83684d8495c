"""Differential privacy of each worker's data, in the central model: the PS sees clipped updates.

The module `contribution` bounds the norm of a worker's update in a round. The module `central` adds
Gaussian noise to the mean of a round on the parameter server. The module `accountant` computes the
privacy guarantee of the released models.
"""
