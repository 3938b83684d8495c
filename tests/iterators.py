"""Iterators of tf.data that end immediately.

TensorFlow tunes each pipeline in a thread. Between two looks this thread sleeps, in the end for a
minute. The destructor of an iterator wakes the thread and waits until it has ended. On a busy
machine the thread may miss that and sleep on, and the destructor waits for up to a minute. A test
that collects the garbage of an earlier test would wait there.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def leave_untuned() -> None:
    """Let no iterator of this process be tuned; otherwise pipelines are what they were."""
    import tensorflow as tf  # most tests that are run alone need none
    from tensorflow.python.data.ops.iterator_ops import OwnedIterator

    options = tf.data.Options()
    options.autotune.enabled = False
    alone = OwnedIterator._create_iterator

    @functools.wraps(alone)
    def create(iterator: Any, dataset: Any) -> None:
        alone(iterator, dataset.with_options(options))

    OwnedIterator._create_iterator = create
