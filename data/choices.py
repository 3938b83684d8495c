"""Data sets: readers, scaling, sharding among workers, and the endless cursor over a shard.

The names here are what the flags offer; they live apart from the loaders so that ``--help``
imports no numpy.
"""

DATASETS = (
    "fashion_mnist_sample",
    "fashion_mnist",
    "mnist",
    "cifar10",
    "imagenet",
    "imagenet_synthetic",
    "synthetic",
)
SCALINGS = ("standardize", "unit", "cifar10", "imagenet")
AUGMENTATIONS = ("none", "crop_flip", "resized_crop_flip")
INPUT_PIPELINES = ("tfdata", "dali")
PARTITIONS = ("iid", "contiguous", "class", "dirichlet", "file")
PARTS = ("train", "test")
