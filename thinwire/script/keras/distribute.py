"""Defines `distribute`, which makes a Keras model or the optimizers of a loop train in a run."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

from thinwire.launcher.error_reasons import exit_with_reason
from thinwire.ops.optimizers.described import describe
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.script_settings import read_settings_file
from thinwire.script.identity import note_settings
from thinwire.script.keras.checkpoints import write_checkpoints_once
from thinwire.script.keras.checks import check_exchanges, check_model
from thinwire.script.keras.evaluate import evaluate_fit, report_arrival, skip_steps
from thinwire.script.keras.files import save_once
from thinwire.script.keras.fit import surround_fit
from thinwire.script.keras.loops import look_fresh, models_of
from thinwire.script.keras.measure import measure_fit
from thinwire.script.keras.plan import named
from thinwire.script.keras.session import ModelSession
from thinwire.script.keras.trial import StepTrial
from thinwire.script.settings import ScriptSettings, read_settings, source_of
from thinwire.worker.held_files import report_held
from thinwire.worker.script import RECORD
from thinwire.worker.temporary import record_temporary

if TYPE_CHECKING:
    from thinwire.runtime.run.script_settings import LaunchedScript


def distribute(
    trained: Any,
    /,
    args: Any = None,
    *,
    model: keras.Model | Sequence[keras.Model] | None = None,
    num_train: int | None = None,
    **settings: Any,
) -> Any:
    """Make a model's `fit`, or an optimizer of a training loop, train together with other workers.

    A distributed model joins the run at the first step of `fit` or `train_on_batch`, and then gets
    the server's weights. The `fit` of a distributed model ends after its epochs or when the run
    ends, and the next `fit` joins the run again. If no setting names a run, a distributed model
    trains alone, exactly as without `distribute`.

    A distributed optimizer exchanges gradients or weights with the PS wherever the script calls its
    `apply` or `apply_gradients`, eagerly or within a `tf.function`. In a loop with several
    optimizers, for example of a GAN, the script distributes each optimizer, with the models that it
    updates, before the first step. Thinwire does not divide the data of a script's own training
    loop among the workers.

    Args:
        trained: Keras model, compiled before or after the call of `distribute`, built or not; or a
            Keras optimizer.
        args: Settings of the worker; `thinwire.script.settings` lists the accepted types.
        model: Built model or models that the optimizer `trained` updates; None if `trained` is a
            model.
        num_train: Number of rows of the whole training set, which the warm-up of the method dgc
            needs; None if unknown.
        **settings: Flags of the worker by name, for example ``id_worker=2``, in addition to `args`.

    Returns:
        The object `trained`. The attribute `thinwire` of `trained` and of the models in `model` is
        a `thinwire.script.keras.session.ModelSession`.

    Raises:
        ConfigurationError: The settings are invalid, or the model cannot be trained in a run.
    """
    record_temporary()
    report_held()
    call = _Call(args, model, num_train, settings)
    if (session := getattr(trained, "thinwire", None)) is not None:
        call.check_repeats(trained, session)
        return trained
    if isinstance(trained, keras.optimizers.Optimizer):
        _distribute_optimizer(trained, models_of(trained, model), args, num_train, settings)
    elif model is not None:
        raise ConfigurationError(
            f"distribute() received model= with a {type(trained).__name__}; expected a Keras "
            "optimizer: optimizer = thinwire.distribute(optimizer, model=model)."
        )
    else:
        _distribute_model(trained, args, num_train, settings)
    trained.thinwire.calls[id(trained)] = call
    return trained


@dataclasses.dataclass(frozen=True)
class _Call:
    """Arguments of a call of `distribute`, compared with a second call for the same object."""

    args: Any
    model: Any
    num_train: int | None
    settings: Mapping[str, Any]

    def check_repeats(self, trained: Any, session: ModelSession) -> None:
        """Reject a second call of `distribute` for the same object with other arguments.

        Raises:
            ConfigurationError: The object was distributed with other arguments. Or the object is a
                model, and an optimizer that updates this model is distributed.
        """
        before = session.calls.get(id(trained))
        name = named(trained) if hasattr(trained, "apply_gradients") else f"{trained.name!r}"
        if before is None:
            raise ConfigurationError(
                f"distribute() received {name}, but an optimizer that trains this model is "
                "distributed already; expected either the model or the optimizer. Distribute the "
                "model for fit and train_on_batch, or the optimizer for a custom loop."
            )
        changed = [
            field.name
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(before, field.name)
        ]
        if changed:
            raise ConfigurationError(
                f"distribute() received {name} a second time with another {changed[0]}: "
                f"{getattr(self, changed[0])!r:.200} now, but first "
                f"{getattr(before, changed[0])!r:.200}; expected one call, or the same arguments."
            )


def _distribute_model(
    model: Any, args: Any, num_train: int | None, settings: Mapping[str, Any]
) -> None:
    """Give a model its session with the servers; patch its `fit` to train, evaluate or measure."""
    check_model(model)
    launched = read_settings_file(os.environ)
    is_alone = source_of(args, settings) is None
    if not is_alone:
        check_exchanges(model)
    if launched is not None and launched.measured_to:
        model.thinwire = ModelSession(model)
        measure_fit(model, pathlib.Path(launched.measured_to))
    elif launched is not None and launched.evaluates:
        model.thinwire = ModelSession(model)
        evaluate_fit(model, read_settings(args, settings, type_node="Worker").run)
        write_checkpoints_once(list, lambda: False)
    elif is_alone:
        model.thinwire = ModelSession(model)
    else:
        compiled = getattr(model, "optimizer", None)
        # A custom train_step may never use the compiled optimizer, so only the optimizer of a
        # standard train_step is checked.
        if compiled is not None and StepTrial(model).is_standard:
            _check_optimizer(compiled, args, settings)
        surround_fit(model, _new_session(model, args, num_train, settings))


def _distribute_optimizer(
    optimizer: Any,
    models: Sequence[keras.Model],
    args: Any,
    num_train: int | None,
    settings: Mapping[str, Any],
) -> None:
    """Give a training loop's optimizer its models' session, so that it exchanges with the PS."""
    launched = read_settings_file(os.environ)
    if _never_trains(launched) or source_of(args, settings) is None:
        sessions = [model.thinwire for model in models if getattr(model, "thinwire", None)]
        optimizer.thinwire = sessions[0] if sessions else ModelSession(models[0])
        if launched is not None and launched.evaluates:
            run = read_settings(args, settings, type_node="Worker").run
            report_arrival(run)
            skip_steps(optimizer, run)
        return
    for model in models:
        check_exchanges(model)
    _check_optimizer(optimizer, args, settings)
    session = _session_of(models, args, num_train, settings)
    for model in models:
        if getattr(model, "thinwire", None) is None:
            model.thinwire = session
            save_once(model, session.saving)
            look_fresh(model, session.loop)
    session.add_optimizer(optimizer, models)
    optimizer.thinwire = session


def _check_optimizer(optimizer: Any, args: Any, settings: Mapping[str, Any]) -> None:
    """Reject an optimizer whose steps the PS must take but whose class the PS cannot build.

    Without this check, the optimizer's first step would be rejected, possibly after the script has
    trained another model for a long time.

    Raises:
        ConfigurationError: The PS must take the optimizer's steps but cannot build the optimizer.
    """
    run = read_settings(args, settings, type_node="Worker").run
    if run.model_is_offered and not run.method.steps_on_workers:
        describe(optimizer, ())


def _never_trains(launched: LaunchedScript | None) -> bool:
    """Return True if this process is an evaluator, which must not run the script's training loop.

    Args:
        launched: Settings from the launcher that started this process; None if no launcher started
            it.

    Raises:
        ConfigurationError: This process measures steps for `thinwire advise`, which supports only
            scripts with `fit`.
    """
    if launched is not None and launched.measured_to:
        raise ConfigurationError(
            "thinwire advise measures the steps of model.fit, but this script has a custom "
            "training loop; expected a script with fit. Give `thinwire advise` a model file "
            "instead."
        )
    return launched is not None and launched.evaluates


def _session_of(
    models: Sequence[keras.Model], args: Any, num_train: int | None, settings: Mapping[str, Any]
) -> ModelSession:
    """Return the server session of one of the models, else of this worker, else a new session.

    A run trains one (combined) model at a time, so all optimizers of a script share one session
    with the servers.
    """
    for model in models:
        if isinstance(known := getattr(model, "thinwire", None), ModelSession):
            return known
    chosen = read_settings(args, settings, type_node="Worker")
    place = chosen.run.addresses, chosen.worker().id_worker
    for session in RECORD.sessions:
        if isinstance(session, ModelSession) and session.place == place:
            return session
    return _new_session(models[0], args, num_train, settings)


def _new_session(
    model: keras.Model, args: Any, num_train: int | None, settings: Mapping[str, Any]
) -> ModelSession:
    """Create this worker's session with the servers for a model, and attach it to the model."""
    chosen: ScriptSettings = read_settings(args, settings, type_node="Worker")
    if chosen.local:
        raise ConfigurationError("mode msgd trains without a PS; remove distribute().")
    if not (chosen.is_launched or RECORD.is_distributed):
        exit_with_reason()
    session = model.thinwire = ModelSession(model, chosen, args, settings, num_train)
    save_once(model, session.saving)
    look_fresh(model, session.loop)
    RECORD.add(session)
    note_settings(chosen)
    write_checkpoints_once(_checkpointing, lambda: session.writes_files)
    return session


def _checkpointing() -> list[ModelSession]:
    return [session for session in RECORD.sessions if isinstance(session, ModelSession)]
