"""A script's compile settings as text: equal for equal scripts, different for others."""

import keras
import pytest

from tests.virtual.toy import method
from thinwire.models.flat_model import SharedModel
from thinwire.ops.types import ConfigurationError
from thinwire.script.keras.compiled import describe_compiled
from thinwire.script.keras.distribute import _Call, _check_optimizer
from thinwire.script.keras.offers import make_offer
from thinwire.script.keras.plan import PlannedStep, StepPlan

METHOD = method("bsp", 2, overrides={"server_optimizer": "script"})
OPTIMIZERS, SCHEDULES = keras.optimizers, keras.optimizers.schedules


def squared(true, predicted):
    return (true - predicted) ** 2


def described(optimizer, loss="mse", width=3, batch_size=16, **compiled):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(width, name="d")], name="m")
    model.compile(optimizer, loss, **compiled)
    plan = StepPlan((PlannedStep(optimizer, tuple(model.trainable_variables)),))
    shared = SharedModel.of(model, True, plan.variables)
    offer = make_offer(shared, plan, METHOD, (0,), 160, batch_size)
    return describe_compiled(model, plan, offer, batch_size)


class Ramp(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without `get_config`, with which Keras trains."""

    def __init__(self, slope):
        self.slope = slope

    def __call__(self, step):
        return self.slope * step


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (
            lambda: OPTIMIZERS.Adam(Ramp(0.5), beta_1=0.8),
            "Adam(learning_rate=Ramp(slope=0.5), beta_1=0.8)",
        ),
        (lambda: OPTIMIZERS.SGD(0.02), "SGD(learning_rate=0.02)"),
        (lambda: OPTIMIZERS.SGD(0.02, momentum=0.9), "SGD(learning_rate=0.02, momentum=0.9)"),
        (lambda: OPTIMIZERS.Adam(), "Adam(learning_rate=0.001)"),
        (lambda: OPTIMIZERS.AdamW(0.1, clipnorm=1.0), "AdamW(learning_rate=0.1, clipnorm=1)"),
        (
            lambda: OPTIMIZERS.SGD(SCHEDULES.ExponentialDecay(0.1, 100, 0.5)),
            "SGD(learning_rate=ExponentialDecay(initial_learning_rate=0.1, decay_steps=100, "
            "decay_rate=0.5))",
        ),
        (
            lambda: OPTIMIZERS.LossScaleOptimizer(OPTIMIZERS.SGD(0.02)),
            "LossScaleOptimizer(SGD(learning_rate=0.02))",
        ),
    ],
)
def test_an_optimizer_is_one_readable_line(optimizer, words):
    assert described(optimizer())["optimizer"] == words
    assert described(optimizer()) == described(optimizer())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("loss", {"loss": "mae"}),
        ("loss", {"loss": keras.losses.Huber(2.0)}),
        ("loss", {"loss": squared}),
        ("loss weights", {"loss_weights": [2.0]}),
        ("model", {"width": 4}),
        ("batch size", {"batch_size": 32}),
    ],
)
def test_what_changes_the_result_changes_its_row_alone(name, settings):
    before, now = described(OPTIMIZERS.SGD(0.02)), described(OPTIMIZERS.SGD(0.02), **settings)
    assert {key for key in {**before, **now} if before.get(key) != now.get(key)} == {name}


def test_metrics_and_names_change_nothing():
    other = described(OPTIMIZERS.SGD(0.02, name="mine"), metrics=["mae"])
    assert other == described(OPTIMIZERS.SGD(0.02))


def test_a_rate_that_training_has_changed_is_not_compared():
    optimizer = OPTIMIZERS.SGD(0.02)
    before = described(optimizer)["optimizer"]
    optimizer.iterations.assign(5)
    optimizer.learning_rate = 0.01
    assert before == "SGD(learning_rate=0.02)"
    assert described(optimizer)["optimizer"] == "SGD()"


class Unknown(OPTIMIZERS.SGD):
    """An optimizer of a script itself, which no PS can build."""


def test_an_optimizer_of_a_script_itself_is_refused_only_where_a_ps_steps():
    def check(**settings):
        _check_optimizer(Unknown(), _Call(None, None, None, settings))

    with pytest.raises(ConfigurationError, match="Unknown, which a PS cannot build"):
        check(method="bsp", model_from="worker")
    check(method="dgs", model_from="worker")  # the workers step
    check(method="bsp")  # the flags name the model
