"""Defines `distribute`, which makes a model or the optimizers of a loop train in a run."""

from __future__ import annotations

import sys
from typing import Any

from thinwire.runtime.extras import explained


def distribute(
    trained: Any,
    /,
    args: Any = None,
    *,
    model: Any = None,
    num_train: int | None = None,
    **settings: Any,
) -> Any:
    """Make a model's `fit`, or an optimizer of a training loop, train together with other workers.

    A distributed Keras model joins the run at the first step of `fit` or `train_on_batch`, and then
    gets the server's weights. The `fit` of a distributed model ends after its epochs or when the
    run ends, and the next `fit` joins the run again. If no setting names a run, a distributed model
    trains alone, exactly as without `distribute`.

    A distributed Keras optimizer exchanges gradients or weights with the PS wherever the script
    calls its `apply` or `apply_gradients`, eagerly or within a `tf.function`. A distributed torch
    optimizer does so in its `step`. In a loop with several optimizers, for example of a GAN, the
    script distributes each optimizer, with the models that it updates, before the first step.
    Thinwire does not divide the data of a script's own training loop among the workers.

    Args:
        trained: Keras model, compiled before or after the call of `distribute`, built or not; or a
            Keras optimizer; or a torch optimizer.
        args: Settings of the worker; `thinwire.script.settings` lists the accepted types.
        model: Built Keras model or models, or torch module or modules, that the optimizer `trained`
            updates; None if `trained` is a model.
        num_train: Number of rows of the whole training set, which the warm-up of the method dgc
            needs; None if unknown.
        **settings: Flags of the worker by name, for example ``id_worker=2``, in addition to `args`.

    Returns:
        The object `trained`. Its attribute `thinwire`, and that of the Keras models in `model`, is
        a `thinwire.script.keras.session.ModelSession`; for a torch optimizer, it is a
        `thinwire.script.torch.session.TorchSession`.

    Raises:
        ConfigurationError: The settings are invalid, or the model cannot be trained in a run.
    """
    # A Keras model on Keras' torch backend is also a torch module.
    keras, torch = sys.modules.get("keras"), sys.modules.get("torch")
    is_keras = keras is not None and isinstance(trained, keras.Model | keras.optimizers.Optimizer)
    if torch is not None and not is_keras:
        from thinwire.script.torch.distribute import distribute_optimizer, is_torchs

        if is_torchs(trained, model):
            return distribute_optimizer(trained, model, args, num_train, settings)
    try:
        from thinwire.script.keras.distribute import distribute_keras
    except ModuleNotFoundError as error:
        raise explained(error) from error
    return distribute_keras(trained, args, model=model, num_train=num_train, **settings)
