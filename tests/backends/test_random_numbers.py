"""Workers draw different random numbers in `fit` and equal ones after it, on each backend."""

import random

import keras
import numpy as np
import pytest

from tests.backends.test_pass_numbers import Batches, epochs_of, places, shared_by_all
from thinwire.script.data.randomness import own_randomness

BACKEND = keras.backend.backend()


def drawn(shape=(3,)):
    return keras.ops.convert_to_numpy(keras.random.normal(shape)).tolist()


def draws_of(draw, place=None, before=True):
    """Return the numbers drawn within a `fit` and after it, in a process that has just started."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    if before:
        draw()
    if place is None:
        return draw(), draw()
    with own_randomness(place):
        within = draw()
        if place.worker == 2:
            draw()  # workers may draw different counts of numbers
    return within, draw()


@pytest.mark.parametrize("before", [True, False])
def test_workers_draw_other_numbers_of_keras_in_fit_and_the_same_after_it(before):
    alone, _ = draws_of(drawn, before=before)
    read = [draws_of(drawn, place, before) for place in places(3)]
    assert read[0][0] == alone
    assert len({str(within) for within, _ in read}) == 3
    assert len({str(after) for _, after in read}) == 1
    assert read[0][1] not in [within for within, _ in read]


def test_a_fit_that_draws_nothing_leaves_keras_generator_as_it_was():
    alone, _ = draws_of(drawn)
    for place in places(2):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        drawn()
        with own_randomness(place):
            pass
        assert drawn() == alone


def test_workers_draw_other_numbers_of_torch_in_fit_and_the_same_after_it():
    torch = pytest.importorskip("torch")

    def draw():
        return torch.rand(3).tolist()

    torch.manual_seed(5)
    draw()
    alone = draw()
    read = []
    for place in places(3):
        torch.manual_seed(5)
        draw()
        with own_randomness(place):
            within = draw()
            if place.worker == 2:
                draw()
        read.append((within, draw()))
    assert read[0][0] == alone
    assert len({str(within) for within, _ in read}) == 3
    assert len({str(after) for _, after in read}) == 1
    assert read[0][1] not in [within for within, _ in read]


def test_a_fit_that_draws_nothing_leaves_torch_alike_on_all_workers():
    """With torch as its backend Keras draws there itself, on some workers only."""
    torch = pytest.importorskip("torch")
    after = []
    for place in places(2):
        torch.manual_seed(5)
        with own_randomness(place):
            pass
        after.append(torch.rand(3).tolist())
    torch.manual_seed(5)
    assert after[0] == after[1]
    assert (after[0] == torch.rand(3).tolist()) is (BACKEND != "torch")


def test_random_numbers_agree_again_where_fit_fails():
    after = []
    for place in places(2):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        drawn()
        with pytest.raises(KeyError), own_randomness(place):
            drawn()
            raise KeyError
        after.append(drawn())
    assert after[0] == after[1]


def torch_order(rows):
    import torch

    return rows[torch.randperm(len(rows)).numpy()]


def numpy_order(rows):
    return np.random.permutation(rows)


def python_order(rows):
    return np.array(random.sample(list(rows), len(rows)))


@pytest.mark.parametrize("order_by", [torch_order, numpy_order, python_order])
def test_an_order_drawn_at_the_end_of_an_epoch_is_the_same_everywhere(order_by):
    """Within `fit` the workers' generators differ."""
    if order_by is torch_order:
        pytest.importorskip("torch")
    read = []
    for place in places(2):
        shared = shared_by_all(lambda: {"x": Batches(40, 8, order_by), "shuffle": False}, 2)
        with own_randomness(place):
            read.append(epochs_of(shared[place.worker - 1].arguments, 3))
    for epoch in range(3):
        rows = [row for mine in read for batch in mine[epoch] for row in batch]
        assert sorted(rows) == list(range(40))
    assert len({str(epoch) for epoch in read[0]}) == 3
