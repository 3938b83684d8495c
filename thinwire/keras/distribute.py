"""`distribute(model)`: a Keras model whose `fit` trains together with others."""

from __future__ import annotations

import os
import pathlib
from typing import TYPE_CHECKING, Any

from thinwire.identity import note_settings
from thinwire.keras.checks import check_model
from thinwire.keras.evaluate import evaluate_fit
from thinwire.keras.fit import surround_fit
from thinwire.keras.forwarding import forward_attributes
from thinwire.keras.measure import measure_fit
from thinwire.keras.saving import save_once
from thinwire.keras.session import ModelSession
from thinwire.ops.run.script_settings import read_settings_file
from thinwire.ops.types import ConfigurationError
from thinwire.settings import read_settings, source_of
from thinwire.worker.script import RECORD
from thinwire.worker.temporary import record_temporary

if TYPE_CHECKING:
    import keras


def distribute(
    model: keras.Model, args: Any = None, *, num_train: int | None = None, **settings: Any
) -> keras.Model:
    """Let a model's `fit` train together with other workers'.

    The model joins the run at the first step of `fit` and then has the server's weights. `fit`
    ends when the run ends, or by itself; the next `fit` joins again. Where nothing names a run,
    the model trains alone, exactly as before.

    Args:
        model: Compiled before or after this call; built or not.
        args: See thinwire.settings.
        num_train: Size of the whole training set, which dgc's warm-up needs.
        **settings: Further flags by name, such as ``id_worker=2``.

    Returns:
        The same model. Its `thinwire` attribute is its `thinwire.keras.session.ModelSession`.

    Raises:
        ConfigurationError: Settings or a model that cannot work.
    """
    record_temporary()
    check_model(model)
    if getattr(model, "thinwire", None) is not None:
        raise ConfigurationError("distribute() was called twice on a model; expected once.")
    launched = read_settings_file(os.environ)
    if launched is not None and launched.measured_to:
        model.thinwire = ModelSession(model)
        measure_fit(model, pathlib.Path(launched.measured_to))
    elif launched is not None and launched.evaluates:
        model.thinwire = ModelSession(model)
        evaluate_fit(model, read_settings(args, settings, type_node="Worker").run)
    elif source_of(args, settings) is None:
        model.thinwire = ModelSession(model)
    else:
        chosen = read_settings(args, settings, type_node="Worker")
        if chosen.local:
            raise ConfigurationError("mode msgd trains without a server; leave distribute() out.")
        model.thinwire = ModelSession(model, chosen, args, settings, num_train)
        surround_fit(model, model.thinwire)
        save_once(model, model.thinwire)
        RECORD.add(model.thinwire)
        note_settings(chosen)
    forward_attributes()
    return model
