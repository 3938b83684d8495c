"""Prepares an optimizer of torch for a run: the part of `thinwire.distribute` for torch."""

from __future__ import annotations

import os
from typing import Any

import torch

from thinwire.launcher.error_reasons import exit_with_reason
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.script_settings import LaunchedScript, read_settings_file
from thinwire.script.evaluator_script import after_waiting, script_of
from thinwire.script.identity import note_settings
from thinwire.script.settings import ScriptSettings, is_in_run, read_settings
from thinwire.script.torch.modules import modules_of
from thinwire.script.torch.session import TorchSession
from thinwire.worker.held_files import report_held
from thinwire.worker.script import RECORD
from thinwire.worker.temporary import record_temporary


def distribute_optimizer(
    optimizer: Any, model: Any, args: Any, num_train: int | None, settings: dict[str, Any]
) -> Any:
    """Make an optimizer of torch train together with other workers; return it.

    Args:
        optimizer: Optimizer of torch.
        model: Module or modules that the optimizer updates.
        args: Settings of the worker; `thinwire.script.settings` lists the accepted types.
        num_train: Number of rows of the whole training set; None if unknown.
        settings: Flags of the worker by name.

    Raises:
        ConfigurationError: The settings are invalid, or the optimizer or a module cannot be trained
            in a run.
    """
    record_temporary()
    report_held()
    call = (model, args, num_train, settings)
    if (known := getattr(optimizer, "thinwire", None)) is not None:
        if known.calls.get(id(optimizer)) != call:
            raise ConfigurationError(
                f"distribute() received {type(optimizer).__name__} a second time with other "
                "arguments; expected one call, or the same arguments."
            )
        return optimizer
    modules = modules_of(model, type(optimizer).__name__)
    launched = read_settings_file(os.environ) or LaunchedScript((), ())
    if launched.measured_to:
        raise ConfigurationError(
            "thinwire advise measures the steps of model.fit, but this script has a custom "
            "training loop; expected a script with fit. Give `thinwire advise` a model file "
            "instead."
        )
    if launched.evaluates:
        chosen = read_settings(args, settings, type_node="Worker")
        optimizer.thinwire = TorchSession()
        optimizer.step = after_waiting(lambda *given, **named: None, script_of(chosen.run))
        # a learning-rate scheduler leaves a step with this attribute as it is
        optimizer.step._wrapped_by_lr_sched = True
    elif not is_in_run(args, settings):
        optimizer.thinwire = TorchSession()
    else:
        chosen = read_settings(args, settings, type_node="Worker")
        _session_of(chosen, num_train).add(optimizer, modules)
    optimizer.thinwire.calls[id(optimizer)] = call
    return optimizer


def _session_of(chosen: ScriptSettings, num_train: int | None) -> TorchSession:
    """Return this worker's session, which all optimizers of a script share."""
    if chosen.local:
        raise ConfigurationError("mode msgd trains without a PS; remove distribute().")
    place = chosen.run.addresses, chosen.worker().id_worker
    for session in RECORD.sessions:
        if isinstance(session, TorchSession) and session.place == place:
            return session
    if not all(isinstance(session, TorchSession) for session in RECORD.sessions):
        raise ConfigurationError(
            "the script distributes a Keras model and a torch optimizer; expected either. Train "
            "them in two runs."
        )
    if not chosen.is_launched:
        exit_with_reason()
    session = TorchSession(chosen, num_train)
    RECORD.sessions.append(session)
    note_settings(chosen)
    return session


def is_torchs(trained: Any, model: Any) -> bool:
    """Return True if `distribute` received an optimizer of torch, the kind that this module knows.

    Raises:
        ConfigurationError: It received another object of torch.
    """
    if isinstance(trained, torch.optim.Optimizer):
        return True
    modules = model if isinstance(model, list | tuple) else [model]
    if isinstance(trained, torch.nn.Module) or any(isinstance(m, torch.nn.Module) for m in modules):
        raise ConfigurationError(
            f"distribute() received a {type(trained).__name__}; expected one torch.optim.Optimizer "
            "and the module that it trains: "
            "optimizer = thinwire.distribute(optimizer, model=module)."
        )
    return False
