"""Train Keras models over thin, slow, uneven networks with a parameter server.

Scripts import the public names from this package: ``from thinwire import W_global, distribute``.
Every public name except W_global and ConfigurationError is imported at its first use, because
users' model files import this package on nodes that need only these two names. Thinwire's command
line is implemented in the package `thinwire.cli`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from thinwire.ops.sharding.w_global import W_global
from thinwire.ops.types import ConfigurationError

if TYPE_CHECKING:
    from thinwire.launcher.function import FunctionRun, RunFailed, run
    from thinwire.script.adacomp import PS, Worker
    from thinwire.script.distribute import distribute
    from thinwire.script.gradient_sgd import GradientSGD
    from thinwire.script.identity import evaluate, is_chief, num_workers, worker_id
    from thinwire.script.keras import callbacks
    from thinwire.script.server import ServerHandle, Snapshot, init_server
    from thinwire.script.steps import RunOver, StepInfo

__version__ = "0.2.0"

__all__ = [
    "PS",
    "ConfigurationError",
    "FunctionRun",
    "GradientSGD",
    "RunFailed",
    "RunOver",
    "ServerHandle",
    "Snapshot",
    "StepInfo",
    "W_global",
    "Worker",
    "__version__",
    "callbacks",
    "distribute",
    "evaluate",
    "init_server",
    "is_chief",
    "num_workers",
    "run",
    "worker_id",
]

#: Module -> its public names, which are imported at their first use.
_PUBLIC = {
    "launcher.function": ("FunctionRun", "RunFailed", "run"),
    "script.adacomp": ("PS", "Worker"),
    "script.gradient_sgd": ("GradientSGD",),
    "script.identity": ("evaluate", "is_chief", "num_workers", "worker_id"),
    "script.keras.callbacks": ("callbacks",),
    "script.distribute": ("distribute",),
    "script.server": ("ServerHandle", "Snapshot", "init_server"),
    "script.steps": ("RunOver", "StepInfo"),
}
_MODULES = {name: f"thinwire.{module}" for module, names in _PUBLIC.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    try:
        module = importlib.import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        from thinwire.runtime.extras import explained

        raise explained(error) from error
    return module if name == "callbacks" else getattr(module, name)
