"""Every worker's place in a run, and the rows that `share` gives to each worker."""

import numpy as np
import tensorflow as tf
from keras.src.trainers.data_adapters import get_data_adapter

from thinwire.data.partition import PartitionRule
from thinwire.script.data.data import WorkerPlace, share


def places(num_workers, one_group=True, partition="iid", **more):
    rule = PartitionRule(partition, num_workers, seed=7, dirichlet_alpha=0.5)
    return [WorkerPlace(w, num_workers, one_group, rule, **more) for w in range(1, num_workers + 1)]


def shared_by_all(arguments, *args, **more):
    return [share(arguments, place) for place in places(*args, **more)]


def as_built(dataset):
    """Return a pipeline without TensorFlow's rewriting: rewriting takes longer than reading."""
    chosen = tf.data.Options()
    chosen.experimental_optimization.apply_default_optimizations = False
    chosen.autotune.enabled = False
    return dataset.with_options(chosen)


def batches(arguments):
    """Return Keras's batches for `fit`'s arguments in an epoch, as the first column of x."""
    if isinstance(arguments["x"], tf.data.Dataset):
        arguments = arguments | {"x": as_built(arguments["x"])}
    names = ("x", "y", "sample_weight", "batch_size", "shuffle", "class_weight")
    adapter = get_data_adapter(
        **{name: arguments[name] for name in names if name in arguments},
        steps_per_epoch=arguments.get("steps_per_epoch"),
    )
    adapter.on_epoch_end()  # as `fit` ends the epoch before the first
    adapter.on_epoch_begin()
    leaves = [tf.nest.flatten(batch)[0] for batch in adapter.get_numpy_iterator()]
    return [np.asarray(leaf).reshape(len(leaf), -1)[:, 0].tolist() for leaf in leaves]
