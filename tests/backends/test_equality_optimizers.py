"""Two workers of half a batch train as Keras alone does with the whole batch, on each backend."""

import keras
import pytest

from tests.backends.fits import TOLERANCE, alone, compiled, difference, scripts

SCHEDULES = keras.optimizers.schedules
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(SCHEDULES.CosineDecay(0.02, 15)),
    "AdamW": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1, global_clipnorm=0.5),
    "Adamax": lambda: keras.optimizers.Adamax(0.02),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.05),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "Lamb": lambda: keras.optimizers.Lamb(0.02, clipnorm=1.0),
    "Lion": lambda: keras.optimizers.Lion(0.003),
    "Muon": lambda: keras.optimizers.Muon(0.02),
    "Nadam": lambda: keras.optimizers.Nadam(0.02),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "averaged": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.5),
    "accumulated": lambda: keras.optimizers.Adam(0.02, gradient_accumulation_steps=2),
}
if hasattr(keras.optimizers, "ScheduleFreeAdamW"):
    OPTIMIZERS["ScheduleFreeAdamW"] = lambda: keras.optimizers.ScheduleFreeAdamW(0.02)
#: Optimizers in every run of `make backends`; the others run with `make product`.
IN_EACH_RUN = ("momentum", "Adam", "AdamW", "Lamb", "accumulated")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_EACH_RUN else pytest.mark.product)
        for name in OPTIMIZERS
    ],
)
def test_two_workers_of_bsp_are_keras_alone(name, tmp_path):
    make = compiled(OPTIMIZERS[name])
    expected, history = alone(make, epochs=5)
    with scripts(tmp_path, "bsp", 2) as run:
        for model, shared in run.fit(make, epochs=5):
            assert difference(model, expected) <= TOLERANCE
            assert shared["loss"] == pytest.approx(history["loss"], abs=1e-4)
            assert model.thinwire.num_exchanges == 20
