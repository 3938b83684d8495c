"""Differential privacy of each worker's data, in the central model: a trusted PS adds noise.

The module `contribution` bounds the L2 norm of a worker's update in a training round. The module
`central` adds Gaussian noise to the mean of the workers' updates on the parameter server. The
module `accountant` computes the privacy guarantee (epsilon, delta) of the released models.
"""
