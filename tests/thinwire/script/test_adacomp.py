"""AdaComp's two blocking functions, in two threads of one process."""

import threading

import numpy as np
import pytest

from tests.nodes import free_port
from tests.thinwire.toy import X, Y, build, trained
from thinwire import PS, Worker
from thinwire.ops.types import ConfigurationError


def test_ps_and_worker_train_until_the_end():
    served, own, port, ends = build(), build(), free_port(), []
    before = trained(own)

    def serve(model):
        reason = PS(nb_workers=1, iter_max=30, port=port, model=model)
        ends.append(reason)

    def train(model, images, labels):
        reason = Worker((images, labels), nb_workers=1, port=port, model=model)
        ends.append(reason)

    server = threading.Thread(target=serve, args=(served,))
    server.start()
    train(own, X, Y)
    server.join(60)
    assert ends == ["iter_max", "iter_max"]
    for mine, theirs, old in zip(trained(own), trained(served), before, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert (mine != old).any()


@pytest.mark.parametrize(
    ("dataset", "settings", "words"),
    [
        (X, {}, "two arrays"),
        ((X, X), {}, "whole number as the label of each image"),
        ((X, Y[:9]), {}, "whole number as the label of each image"),
        ((X, Y), {"batch_size": 1000}, "batch_size"),
        ((X, Y), {"mode": "msgd"}, "msgd"),
    ],
)
def test_what_a_worker_refuses(dataset, settings, words):
    with pytest.raises(ConfigurationError, match=words):
        Worker(dataset, settings, build())


def test_what_a_ps_refuses():
    with pytest.raises(ConfigurationError, match="nb_ps=2"):
        PS(model=build(), nb_ps=2)
