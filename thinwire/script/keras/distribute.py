"""`distribute`: a Keras model, or the optimizers of a loop, that train together with others."""

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
from thinwire.script.keras.fit import surround_fit
from thinwire.script.keras.loops import look_fresh, models_of
from thinwire.script.keras.measure import measure_fit
from thinwire.script.keras.plan import named
from thinwire.script.keras.saving import save_once
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
    """Let a model's `fit`, or an optimizer of a training loop, train together with other workers.

    A model joins the run at the first step of `fit`, or of `train_on_batch`, and then has the
    server's weights. `fit` ends when the run ends, or by itself; the next `fit` joins again. Where
    nothing names a run, it trains alone, exactly as before.

    An optimizer exchanges wherever the script calls its `apply` or `apply_gradients`, eagerly or
    within a `tf.function`. A loop with several, as of a GAN, distributes each, with the models that
    it steps, before the first step. The loop's data is the script's own affair.

    Args:
        trained: A Keras model, compiled before or after this call, built or not; or an optimizer.
        args: See thinwire.script.settings.
        model: With an optimizer: the model, or the models, that it steps; built.
        num_train: Size of the whole training set, which dgc's warm-up needs.
        **settings: Further flags by name, such as ``id_worker=2``.

    Returns:
        The same object. Its `thinwire` attribute, and that of the models, is its
        `thinwire.script.keras.session.ModelSession`.

    Raises:
        ConfigurationError: Settings or a model that cannot work.
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
            f"distribute() was given model= beside a {type(trained).__name__}; expected a Keras "
            "optimizer: optimizer = thinwire.distribute(optimizer, model=model)."
        )
    else:
        _distribute_model(trained, args, num_train, settings)
    trained.thinwire.calls[id(trained)] = call
    return trained


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of a call of `distribute`, by which a second one is compared with the first."""

    args: Any
    model: Any
    num_train: int | None
    settings: Mapping[str, Any]

    def check_repeats(self, trained: Any, session: ModelSession) -> None:
        """Refuse to distribute the same object in another way.

        Raises:
            ConfigurationError: It was distributed with other arguments, or its optimizer was.
        """
        before = session.calls.get(id(trained))
        name = named(trained) if hasattr(trained, "apply_gradients") else f"{trained.name!r}"
        if before is None:
            raise ConfigurationError(
                f"distribute() was given {name}, which an optimizer of a loop steps that is "
                "distributed already; expected one of both. Distribute the model for fit and "
                "train_on_batch, or the optimizer for a loop of your own."
            )
        other = [
            field.name
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(before, field.name)
        ]
        if other:
            raise ConfigurationError(
                f"distribute() was given {name} a second time with another {other[0]}: "
                f"{getattr(self, other[0])!r:.200}, and before {getattr(before, other[0])!r:.200}; "
                "expected the same arguments, which change nothing, or one call."
            )


def _distribute_model(
    model: Any, args: Any, num_train: int | None, settings: Mapping[str, Any]
) -> None:
    """Put a session around a model's `fit`."""
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
        if compiled is not None and StepTrial(model).is_standard:  # else it may be a dummy
            _check_optimizer(compiled, args, settings)
        surround_fit(model, _new_session(model, args, num_train, settings))


def _distribute_optimizer(
    optimizer: Any,
    models: Sequence[keras.Model],
    args: Any,
    num_train: int | None,
    settings: Mapping[str, Any],
) -> None:
    """Let an optimizer of a loop exchange, by the session that its models have or get."""
    launched = read_settings_file(os.environ)
    if _never_trains(launched) or source_of(args, settings) is None:
        sessions = [each.thinwire for each in models if getattr(each, "thinwire", None)]
        optimizer.thinwire = sessions[0] if sessions else ModelSession(models[0])
        if launched is not None and launched.evaluates:
            run = read_settings(args, settings, type_node="Worker").run
            report_arrival(run)
            skip_steps(optimizer, run)
        return
    for each in models:
        check_exchanges(each)
    _check_optimizer(optimizer, args, settings)
    session = _session_of(models, args, num_train, settings)
    for each in models:
        if getattr(each, "thinwire", None) is None:
            each.thinwire = session
            save_once(each, session.central)
            look_fresh(each, session.loop)
    session.add_optimizer(optimizer, models)
    optimizer.thinwire = session


def _check_optimizer(optimizer: Any, args: Any, settings: Mapping[str, Any]) -> None:
    """Refuse an optimizer that the PS is to step with and cannot build.

    The first step would refuse it as well, perhaps after another model was trained.

    Raises:
        ConfigurationError: It cannot.
    """
    run = read_settings(args, settings, type_node="Worker").run
    if run.model_is_offered and not run.method.steps_on_workers:
        describe(optimizer, ())


def _never_trains(launched: LaunchedScript | None) -> bool:
    """Return whether this process evaluates for others; refuse one that measures steps.

    Raises:
        ConfigurationError: It measures for `thinwire advise`, which knows `fit` alone.
    """
    if launched is not None and launched.measured_to:
        raise ConfigurationError(
            "thinwire advise measures the steps of model.fit, and this script has a training loop "
            "of its own; expected a script with fit. Give `thinwire advise` a model file instead."
        )
    return launched is not None and launched.evaluates


def _session_of(
    models: Sequence[keras.Model], args: Any, num_train: int | None, settings: Mapping[str, Any]
) -> ModelSession:
    """Return the session of some models: one that has these, or that this worker has already.

    A run has one model; so all optimizers of a script share one session.
    """
    for each in models:
        if isinstance(known := getattr(each, "thinwire", None), ModelSession):
            return known
    chosen = read_settings(args, settings, type_node="Worker")
    place = chosen.run.addresses, chosen.worker().id_worker
    for other in RECORD.sessions:
        if isinstance(other, ModelSession) and other.place == place:
            return other
    return _new_session(models[0], args, num_train, settings)


def _new_session(
    model: keras.Model, args: Any, num_train: int | None, settings: Mapping[str, Any]
) -> ModelSession:
    """Give a model a session, and return it."""
    chosen: ScriptSettings = read_settings(args, settings, type_node="Worker")
    if chosen.local:
        raise ConfigurationError("mode msgd trains without a server; leave distribute() out.")
    if not (chosen.is_launched or RECORD.is_distributed):
        exit_with_reason()
    session = model.thinwire = ModelSession(model, chosen, args, settings, num_train)
    save_once(model, session.central)
    look_fresh(model, session.loop)
    RECORD.add(session)
    note_settings(chosen)
    write_checkpoints_once(_checkpointing, lambda: session.central.writes_files)
    return session


def _checkpointing() -> list[ModelSession]:
    return [each for each in RECORD.sessions if isinstance(each, ModelSession)]
