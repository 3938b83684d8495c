"""Data sets: readers, scaling, sharding among workers, and the endless cursor over a shard.

The names here are what the flags offer; they live apart from the loaders so that ``--help``
imports no numpy.
"""

DATASETS = ("fashion_mnist_sample", "fashion_mnist", "mnist", "synthetic")
SCALINGS = ("standardize", "unit")
PARTITIONS = ("iid", "contiguous", "class", "dirichlet", "file")
PARTS = ("train", "test")
