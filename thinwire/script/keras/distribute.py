"""Prepares a Keras model or optimizer for a run: the part of `thinwire.distribute` for Keras."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from thinwire.launcher.error_reasons import exit_with_reason
from thinwire.ops.optimizers.described import describe
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.script_settings import LaunchedScript, read_settings_file
from thinwire.script.backends.present import backend
from thinwire.script.identity import note_settings
from thinwire.script.keras import central
from thinwire.script.keras.checks import check_exchanges, check_model
from thinwire.script.keras.evaluate import evaluate_fit, skip_steps
from thinwire.script.keras.files import save_once
from thinwire.script.keras.fit import surround_fit
from thinwire.script.keras.loops import look_fresh, models_of
from thinwire.script.keras.measure import measure_fit
from thinwire.script.keras.plan import named
from thinwire.script.keras.session import ModelSession
from thinwire.script.keras.trial import StepTrial
from thinwire.script.settings import ScriptSettings, is_in_run, read_settings
from thinwire.worker.held_files import report_held
from thinwire.worker.script import RECORD
from thinwire.worker.temporary import record_temporary


def distribute_keras(
    trained: Any,
    args: Any = None,
    *,
    model: keras.Model | Sequence[keras.Model] | None = None,
    num_train: int | None = None,
    **settings: Any,
) -> Any:
    """Make a Keras model or optimizer train in a run; see `thinwire.distribute`."""
    record_temporary()
    report_held()
    call = _Call(args, model, num_train, settings)
    if (session := getattr(trained, "thinwire", None)) is not None:
        call.check_repeats(trained, session)
        return trained
    if isinstance(trained, keras.optimizers.Optimizer):
        _distribute_optimizer(trained, models_of(trained, model), call)
    elif model is not None:
        raise ConfigurationError(
            f"distribute() received model= with a {type(trained).__name__}; expected a Keras "
            "optimizer: optimizer = thinwire.distribute(optimizer, model=model)."
        )
    else:
        _distribute_model(trained, call)
    trained.thinwire.calls[id(trained)] = call
    return trained


@dataclasses.dataclass(frozen=True)
class _Call:
    """Arguments of a call of `distribute`, compared with a second call for the same object."""

    args: Any
    model: Any
    num_train: int | None
    settings: Mapping[str, Any]

    @property
    def is_alone(self) -> bool:
        """True if the object trains outside of a run, because no setting names a run."""
        return not is_in_run(self.args, self.settings)

    def read(self) -> ScriptSettings:
        """Return the settings of this worker. Raises ConfigurationError."""
        return read_settings(self.args, self.settings, type_node="Worker")

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
        for field in vars(self):
            now, first = getattr(self, field), getattr(before, field)
            if now != first:
                raise ConfigurationError(
                    f"distribute() received {name} a second time with another {field}: "
                    f"{now!r:.200} now, but first {first!r:.200}; expected one call, or the same "
                    "arguments."
                )


def _distribute_model(model: Any, call: _Call) -> None:
    """Give a model its session with the servers; patch its `fit` to train, evaluate or measure."""
    check_model(model)
    launched = _launched()
    if not call.is_alone:
        check_exchanges(model)
    if launched.measured_to or launched.evaluates or call.is_alone:
        model.thinwire = ModelSession(model)
        if launched.measured_to:
            measure_fit(model, pathlib.Path(launched.measured_to))
        elif launched.evaluates:
            evaluate_fit(model, call.read().run)
            _write_checkpoints_once(lambda: False)
        return
    compiled = getattr(model, "optimizer", None)
    # A custom train_step may never use the compiled optimizer, so only the optimizer of a standard
    # train_step is checked.
    if compiled is not None and StepTrial(model).is_standard:
        _check_optimizer(compiled, call)
    session = _new_session(model, call)
    _attach(session, model)
    surround_fit(model, session)


def _distribute_optimizer(optimizer: Any, models: Sequence[keras.Model], call: _Call) -> None:
    """Give a training loop's optimizer its models' session, so that it exchanges with the PS.

    Raises:
        ConfigurationError: This process measures steps for `thinwire advise`, which supports only
            scripts with `fit`. Or the models cannot be trained in a run.
    """
    launched = _launched()
    if launched.measured_to:
        raise ConfigurationError(
            "thinwire advise measures the steps of model.fit, but this script has a custom "
            "training loop; expected a script with fit. Give `thinwire advise` a model file "
            "instead."
        )
    if launched.evaluates or call.is_alone:
        sessions = [model.thinwire for model in models if getattr(model, "thinwire", None)]
        optimizer.thinwire = sessions[0] if sessions else ModelSession(models[0])
        if launched.evaluates:
            skip_steps(optimizer, call.read().run)
        return
    for model in models:
        check_exchanges(model)
    _check_optimizer(optimizer, call)
    session = _session_of(models, call)
    for model in models:
        if getattr(model, "thinwire", None) is None:
            _attach(session, model)
    session.add_optimizer(optimizer, models)
    optimizer.thinwire = session


def _launched() -> LaunchedScript:
    """Return the settings from this process's launcher; empty settings if there is no launcher."""
    return read_settings_file(os.environ) or LaunchedScript((), ())


def _check_optimizer(optimizer: Any, call: _Call) -> None:
    """Reject an optimizer whose steps the PS must take but whose class the PS cannot build.

    Without this check, the optimizer's first step would be rejected, possibly after the script has
    trained another model for a long time.

    Raises:
        ConfigurationError: The PS must take the optimizer's steps but cannot build the optimizer.
    """
    run = call.read().run
    if run.model_is_offered and not run.method.steps_on_workers:
        describe(optimizer, ())


def _session_of(models: Sequence[keras.Model], call: _Call) -> ModelSession:
    """Return the server session of one of the models, else of this worker, else a new session.

    A run trains one (combined) model at a time, so all optimizers of a script share one session
    with the servers.
    """
    for model in models:
        if isinstance(known := getattr(model, "thinwire", None), ModelSession):
            return known
    chosen = call.read()
    place = chosen.run.addresses, chosen.worker().id_worker
    for session in RECORD.sessions:
        if isinstance(session, ModelSession) and session.place == place:
            return session
    return _new_session(models[0], call)


def _new_session(model: keras.Model, call: _Call) -> ModelSession:
    """Create this worker's session with the servers for a model."""
    chosen = call.read()
    if chosen.local:
        raise ConfigurationError("mode msgd trains without a PS; remove distribute().")
    if not (chosen.is_launched or RECORD.is_distributed):
        exit_with_reason()
    session = ModelSession(model, chosen, call.args, call.settings, call.num_train)
    RECORD.sessions.append(session)
    note_settings(chosen)
    _write_checkpoints_once(lambda: session.writes_files)
    return session


def _write_checkpoints_once(writes: Callable[[], bool]) -> None:
    """Let only one worker write TensorFlow's own checkpoints, if TensorFlow is Keras' backend."""
    if backend().name == "tensorflow":
        from thinwire.script.keras.checkpoints import write_checkpoints_once

        write_checkpoints_once(writes)


def _attach(session: ModelSession, model: Any) -> None:
    """Let a model save files, and read all its weights, through its session with the servers."""
    model.thinwire = session
    save_once(model, functools.partial(central.saving, session))
    look_fresh(model, session.loop.refresh)
