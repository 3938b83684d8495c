"""Data sets: readers, preprocessing, the split among workers, and the cursor over a shard.

`registry` loads a set by name (`sources` finds its files, `readers` decode them), `partition`
splits it among workers, `pipeline` scales, augments and feeds it, and `loading` does all that for a
run (`load_dataset`, `load_shard`). The names here are the values of the flags; modules that import
numpy or TensorFlow are imported where they are used, so that ``--help`` is fast.
"""

from thinwire.data.choices import (
    AUGMENTATIONS,
    DATASETS,
    PARTITIONS,
    PARTS,
    SCALINGS,
)

__all__ = ["AUGMENTATIONS", "DATASETS", "PARTITIONS", "PARTS", "SCALINGS"]
