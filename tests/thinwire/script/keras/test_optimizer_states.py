"""Optimizer state set by a script between two fits takes effect, as with Keras alone."""

import keras
import numpy as np
import pytest

from tests.thinwire.script.keras.runs import (
    BATCH,
    LOSS,
    X,
    Y,
    assert_same,
    assert_weights,
    built,
    plain_model,
    scripts,
)
from thinwire import ConfigurationError, distribute

FIT = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def zero_all(model, saved):
    """Reset all of a compiled optimizer's state except the learning rate, as a script may do."""
    rate = float(model.optimizer.learning_rate.numpy())
    for variable in model.optimizer.variables:
        variable.assign(keras.ops.zeros_like(variable))
    model.optimizer.learning_rate = rate


def zero_count(model, saved):
    """Let Adam's bias correction begin again with the moments that there are."""
    model.optimizer.iterations.assign(0)


def halve_slots(model, saved):
    """Set values by those that there are, in TensorFlow's own variables."""
    for variable in model.optimizer.variables[2:]:
        variable.value.assign(variable.value * 0.5)


def load_saved(model, saved):
    """Go back to an earlier state of the optimizer, with the present weights."""
    model.optimizer.load_own_variables(saved)


def load_file(model, saved):
    """Go back to an earlier model by its file."""
    model.load_weights(saved["file"])


def states_of(model):
    """Return a copy of the weights, and one of the optimizer's variables."""
    groups = model.trainable_variables, model.optimizer.variables
    return [[np.array(keras.ops.convert_to_numpy(each)) for each in group] for group in groups]


def fit_without_change(model):
    """Return the weights after a fit, and leave the model as it was before."""
    before = states_of(model)
    model.fit(X, Y, epochs=1, **FIT)
    made = states_of(model)[0]
    variables = [*model.trainable_variables, *model.optimizer.variables]
    for variable, value in zip(variables, [*before[0], *before[1]], strict=True):
        variable.assign(value)
    return made


def story(model, optimizer, changes, folder, is_alone=False):
    """Fit twice, and once more after each of some changes.

    Returns:
        The state after each of these fits, and the weights without its change where Keras is alone.
    """
    model.compile(optimizer(), loss=LOSS)
    model = built(model) if is_alone else model
    model.fit(X, Y, epochs=1, **FIT)
    saved = {}
    model.optimizer.save_own_variables(saved)
    path = str(folder / "saved.weights.h5")
    model.save_weights(path)
    model.fit(X, Y, epochs=1, **FIT)
    made = {}
    for change in changes:
        untouched = fit_without_change(model) if is_alone else None
        change(model, {"file": path} if change is load_file else saved)
        model.fit(X, Y, epochs=1, **FIT)
        made[change.__name__] = states_of(model), untouched
    return made


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adam():
    return keras.optimizers.Adam(0.05)


def scaled():
    return keras.optimizers.LossScaleOptimizer(adam(), initial_scale=64.0, dynamic_growth_steps=5)


def with_cosine():
    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.2, 16), momentum=0.5)


def zero_scaled(model, saved):
    """Restart the inner optimizer, and set the scaling's own counter."""
    for variable in model.optimizer.inner_optimizer.variables[2:]:
        variable.assign(keras.ops.zeros_like(variable))
    model.optimizer.dynamic_scale.assign(32.0)
    model.optimizer.step_counter.assign(3)


@pytest.mark.parametrize(
    ("optimizer", "changes", "method", "nb_workers", "nb_ps"),
    [
        (adam, [zero_count, halve_slots, load_file], "bsp", 2, 2),
        (scaled, [zero_scaled], "bsp", 2, 1),
        (adam, [zero_all], "asgd", 1, 1),
        (momentum, [zero_all, load_saved], "asgd", 1, 1),
        (with_cosine, [zero_count], "esync", 1, 1),
    ],
)
def test_the_next_fit_goes_on_from_what_is_set(
    optimizer, changes, method, nb_workers, nb_ps, tmp_path
):
    expected = story(plain_model(), optimizer, changes, tmp_path, is_alone=True)
    with scripts(tmp_path / "run", method, nb_workers, nb_ps) as run:
        results = run.each(
            lambda given: story(distribute(plain_model(), given), optimizer, changes, tmp_path)
        )
        assert {shard.served.phase for shard in run.shards.values()} == {2 * (2 + len(changes))}
    for change, ((weights, state), untouched) in expected.items():
        assert not np.allclose(weights[0], untouched[0], atol=1e-4), f"{change} shows nothing"
        for made in results:
            (own_weights, own_state), _ = made[change]
            assert_weights(own_weights, weights)
            for mine, theirs in zip(own_state, state, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5, err_msg=change)


def slots_before_the_first_fit(model):
    """Load momentum into an optimizer that has taken no step."""
    model.compile(momentum(), loss=LOSS)
    model.optimizer.build(model.trainable_variables)
    for number, variable in enumerate(model.optimizer.variables[2:]):
        variable.assign(np.full(variable.shape, 0.1 * number, np.float32))
    model.fit(X, Y, epochs=1, **FIT)
    return model


def test_slots_of_an_optimizer_without_steps_are_taken_over(tmp_path):
    expected = slots_before_the_first_fit(plain_model())
    with scripts(tmp_path, "bsp", 2, 2) as run:
        models = run.each(
            lambda given: slots_before_the_first_fit(distribute(plain_model(), given))
        )
    for model in models:
        assert_same(model, expected)


class SetsState(keras.callbacks.Callback):
    """Sets one variable of the optimizer at some moment of training."""

    def __init__(self, moment, which=lambda optimizer: optimizer.variables[2]):
        super().__init__()
        setattr(self, moment, lambda *_, **__: self._set(which(self.model.optimizer)))

    @staticmethod
    def _set(variable):
        variable.assign(keras.ops.zeros_like(variable))


@pytest.mark.parametrize("moment", ["on_epoch_end", "on_train_batch_end"])
def test_within_a_fit_what_would_be_lost_is_refused_where_it_is_set(moment, tmp_path):
    def script(given):
        model = distribute(plain_model(), given)
        model.compile(adam(), loss=LOSS)
        with pytest.raises(ConfigurationError, match="momentum of Adam .* within a fit") as refused:
            model.fit(X, Y, epochs=2, callbacks=[SetsState(moment)], **FIT)
        assert any(each.name == "_set" for each in refused.traceback), "not where it is set"

    with scripts(tmp_path, "asgd", 1) as run:
        run.each(script)


def restarts_at_the_end(place):
    """Set the state when training ends, which is between two fits."""
    model = plain_model()
    model.compile(adam(), loss=LOSS)
    model = place(model)
    for _ in range(2):
        callback = SetsState("on_train_end", lambda optimizer: optimizer.iterations)
        model.fit(X, Y, epochs=1, callbacks=[callback], **FIT)
    return model


def test_state_that_is_set_when_training_ends_counts(tmp_path):
    expected = restarts_at_the_end(built)
    with scripts(tmp_path, "bsp", 2) as run:
        for model in run.each(
            lambda given: restarts_at_the_end(lambda each: distribute(each, given))
        ):
            assert_same(model, expected)


def test_a_loop_of_its_own_is_refused_what_would_be_lost(tmp_path):
    def script(given):
        model, optimizer = plain_model(), adam()
        optimizer = distribute(optimizer, given, model=model)
        optimizer.build(model.trainable_variables)
        optimizer.variables[2].assign(optimizer.variables[2] + 1)  # it counts before a step
        zeros = [np.zeros(each.shape, np.float32) for each in model.trainable_variables]
        optimizer.apply(zeros, model.trainable_variables)
        with pytest.raises(ConfigurationError, match="iteration of Adam .* within a loop"):
            optimizer.iterations.assign(0)
        return model.get_weights()

    first = plain_model().get_weights()
    with scripts(tmp_path, "asgd", 1) as run:
        (weights,) = run.each(script)
    assert not np.allclose(weights[0], first[0], atol=1e-4), "the momentum was not taken over"


def test_where_a_codec_keeps_momentum_zeros_restart_it_and_other_values_are_refused(tmp_path):
    def story(place, restarts):
        model = plain_model()
        model.compile(momentum(), loss=LOSS)
        model = place(model)
        model.fit(X, Y, epochs=2, **FIT)
        for variable in model.optimizer.variables[2:] if restarts else ():
            variable.assign(keras.ops.zeros_like(variable))
        model.fit(X, Y, epochs=1, **FIT)
        return model

    def script(given):
        model = story(lambda model: distribute(model, given), restarts=True)
        weights = model.get_weights()
        model.optimizer.variables[2].assign(keras.ops.ones_like(model.optimizer.variables[2]))
        with pytest.raises(ConfigurationError, match="codecs keep SGD's momentum"):
            model.fit(X, Y, epochs=1, **FIT)
        return weights

    expected = story(built, restarts=True).get_weights()
    other = story(built, restarts=False).get_weights()
    with scripts(tmp_path, "dgs", 1, compression_rate=1) as run:
        (found,) = run.each(script)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    assert not np.allclose(other[0], expected[0], atol=1e-3)


def test_a_loop_behind_a_fit_has_no_place_for_it(tmp_path):
    def script(given):
        model = distribute(plain_model(), given)
        model.compile(adam(), loss=LOSS)
        model.fit(X, Y, epochs=1, **FIT)
        model.optimizer.iterations.assign(0)
        with pytest.raises(ConfigurationError, match="between a fit and a training loop"):
            model.train_on_batch(X[:BATCH], Y[:BATCH])

    with scripts(tmp_path, "asgd", 1) as run:
        run.each(script)
