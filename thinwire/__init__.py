"""The one name user scripts import from: ``from thinwire import W_global, distribute``.

Everything but W_global is imported when it is first asked for: model files import this room too,
on nodes that need nothing else of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ops.collection import W_global
from ops.types import ConfigurationError

if TYPE_CHECKING:
    from thinwire.adacomp import PS, Worker
    from thinwire.gradient_sgd import GradientSGD
    from thinwire.joined import RunOver, StepInfo
    from thinwire.keras_fit import distribute
    from thinwire.server import ServerHandle, Snapshot, init_server

__all__ = [
    "PS",
    "ConfigurationError",
    "GradientSGD",
    "RunOver",
    "ServerHandle",
    "Snapshot",
    "StepInfo",
    "W_global",
    "Worker",
    "distribute",
    "init_server",
]

_ROOMS = {
    "PS": "adacomp",
    "Worker": "adacomp",
    "GradientSGD": "gradient_sgd",
    "RunOver": "joined",
    "StepInfo": "joined",
    "distribute": "keras_fit",
    "ServerHandle": "server",
    "Snapshot": "server",
    "init_server": "server",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    return getattr(importlib.import_module(f"thinwire.{_ROOMS[name]}"), name)
