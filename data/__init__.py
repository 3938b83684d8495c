"""Data sets: readers, preprocessing, the split among workers, and the cursor over a shard.

`registry` loads a data set by name: `sources` finds the files and `readers` decode the files.
`partition` splits a data set among workers. `pipeline` scales, augments and feeds the examples.
`loading` runs all these steps for a run (`load_dataset`, `load_shard`). This package exports the
legal values of the data flags. It imports no module that needs numpy or TensorFlow, so that
``--help`` is fast.
"""

from thinwire.data.choices import (
    AUGMENTATIONS,
    DATASETS,
    PARTITIONS,
    PARTS,
    SCALINGS,
)

__all__ = ["AUGMENTATIONS", "DATASETS", "PARTITIONS", "PARTS", "SCALINGS"]
