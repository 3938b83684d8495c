"""Imports a Python file of the user's that a flag names, such as --model or --policy."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from types import ModuleType

from thinwire.ops.types import ConfigurationError


def import_file(flag: str, path: str, module_name: str, expected: str) -> ModuleType:
    """Import a file as a module; the file can import modules from its folder.

    Args:
        flag: Name of the flag that names the file, for messages.
        path: Path of the file, as the user gave it.
        module_name: Name of the module in `sys.modules`.
        expected: What the file must define, for messages.

    Raises:
        ConfigurationError: The file is missing, is no Python file, or fails on import.
    """
    file = pathlib.Path(path).resolve()
    spec = importlib.util.spec_from_file_location(module_name, file)
    if not file.is_file() or file.suffix != ".py" or spec is None or spec.loader is None:
        raise ConfigurationError(
            f"--{flag}={path}: {file} is no Python file; expected a .py file that defines "
            f"{expected}."
        )
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ConfigurationError(
            f"--{flag}={path} failed on import: {type(error).__name__}: {error}. Expected a file "
            f"that only defines {expected}. Run the file alone to find the line."
        ) from error
    return module
