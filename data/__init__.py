"""Data sets: readers, preprocessing, the split among workers, and the cursor over a shard.

The module `registry` loads a data set by name: `sources` finds its files and `readers` decodes
them. The module `partition` splits a data set among the workers of a run. The package `pipeline`
scales, augments and feeds the examples. The module `loading` finds, loads, splits and feeds the
data of a run (`load_dataset`, `load_shard`). The package `data` exports the legal values of the
data flags. The package `data` imports no module that needs numpy or TensorFlow, so that ``--help``
is fast.
"""

from thinwire.data.choices import (
    AUGMENTATIONS,
    DATASETS,
    PARTITIONS,
    PARTS,
    SCALINGS,
)

__all__ = ["AUGMENTATIONS", "DATASETS", "PARTITIONS", "PARTS", "SCALINGS"]
