"""Turns off TensorFlow's rewriting of pipelines in these tests."""

import pytest
import tensorflow as tf


@pytest.fixture(scope="package", autouse=True)
def _without_grappler():
    """Let TensorFlow optimize no graph: it would take half of the time of these tests.

    Every iterator has the functions of its pipeline optimized again, for a few rows each. Tests of
    `fit` read the same pipelines with the optimizer.
    """
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
