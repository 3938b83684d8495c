"""Reads data sets, splits them among workers, and preprocesses and orders the examples of a worker.

The module `registry` loads a data set by name: `sources` finds its files and `readers` decodes
them. The module `partition` splits a data set among the workers of a run. The package `pipeline`
scales and augments images and returns them in mini-batches. The module `loading` finds, loads,
splits and feeds the data of a run (`load_dataset`, `load_shard`). The package `data` exports the
legal values of the command-line flags for data sets. The package `data` imports no module that
needs numpy or TensorFlow, so that ``--help`` is fast.
"""

from thinwire.data.choices import (
    AUGMENTATIONS,
    DATASETS,
    PARTITIONS,
    PARTS,
    SCALINGS,
)

__all__ = ["AUGMENTATIONS", "DATASETS", "PARTITIONS", "PARTS", "SCALINGS"]
