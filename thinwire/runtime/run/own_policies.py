"""Loads policies and training methods of a user from the Python file that --policy names.

The file has a dict ``POLICIES`` (policy interface -> name -> class), a dict ``METHODS`` (name ->
row), or both. The file must be loaded before flags are registered, because its policies may bring
flags. Every node loads its operator's file; a node never receives a policy over the network.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import sys
from collections.abc import Collection

from thinwire.ops.methods.method import METHODS
from thinwire.ops.methods.own import register
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.files import read_bounded
from thinwire.runtime.run.user_file import import_file

_MODULE = "thinwire_own_policies"
#: Policies of this process: none or one file, because the registries belong to the process.
_LOADED: list[OwnPolicies] = []


@dataclasses.dataclass(frozen=True)
class OwnPolicies:
    """A loaded file of policies.

    Attributes:
        path: Absolute path of the file.
        digest: SHA-256 digest of the file and of the modules in its folder that it imports; the
            digests of all nodes of a run must be equal.
        files: Absolute paths of the file and of the modules in its folder that it imports.
        names: Names that the file has added, such as "sync=quorum" and "method=mine".
    """

    path: pathlib.Path
    digest: str
    files: tuple[pathlib.Path, ...]
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        """Name of the file and the start of its digest, for messages and the report."""
        return f"{self.path.name} {self.digest[:12]}"

    @property
    def beside(self) -> dict[str, pathlib.Path]:
        """Path relative to the folder of the file -> path, of the imported modules beside it."""
        folder = self.path.parent
        return {file.relative_to(folder).as_posix(): file for file in self.files[1:]}

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the training methods that the file has added."""
        pairs = (name.partition("=") for name in self.names)
        return tuple(value for kind, _, value in pairs if kind == "method")


def loaded() -> OwnPolicies | None:
    """Return the file of policies that this process has loaded; None if it has loaded no file."""
    return _LOADED[0] if _LOADED else None


def load(path: str, taken: Collection[str] = ()) -> OwnPolicies:
    """Load a file of policies and add its policies and methods to the registries.

    A process can load one file. Loading the same file again returns the loaded policies.

    Args:
        path: Path of the file.
        taken: Names of the flags of all nodes, which no policy may use for a flag of its own.

    Raises:
        ConfigurationError: The file is missing, fails on import, defines nothing, or defines a name
            that exists; or this process has already loaded another file.
    """
    file = pathlib.Path(path).resolve()
    if _LOADED:
        if _LOADED[0].path != file:
            raise ConfigurationError(
                f"--policy={path}: this process has already loaded {_LOADED[0].path}; expected one "
                "file of policies per process."
            )
        return _LOADED[0]
    before = set(sys.modules)
    module = import_file("policy", path, _MODULE, "POLICIES or METHODS")
    policies, methods = getattr(module, "POLICIES", {}), getattr(module, "METHODS", {})
    if methods is METHODS:
        methods = {}  # the file imports the built-in METHODS to derive rows, but defines none
    if not policies and not methods:
        raise ConfigurationError(
            f"--policy={path} defines no policy; expected POLICIES = "
            "{interface: {name: class}} or METHODS = {name: row}."
        )
    try:
        names = register(policies, methods, taken)
    except ConfigurationError as error:
        raise ConfigurationError(f"--policy={path}: {error}") from error
    except (AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"--policy={path}: {error}; expected POLICIES = {{interface: {{name: class}}}} and "
            "METHODS = {name: row}."
        ) from error
    files = (file, *_beside(file, before))
    _LOADED.append(OwnPolicies(file, _digest(files), files, names))
    return _LOADED[0]


def _beside(file: pathlib.Path, before: set[str]) -> list[pathlib.Path]:
    """Return the source files in the file's folder that were imported since `before`, sorted."""
    found = set()
    for name in set(sys.modules) - before - {_MODULE}:
        origin = getattr(sys.modules[name], "__file__", None)
        if origin is not None and pathlib.Path(origin).resolve().is_relative_to(file.parent):
            found.add(pathlib.Path(origin).resolve())
    return sorted(found)


def _digest(files: tuple[pathlib.Path, ...]) -> str:
    folder, digest = files[0].parent, hashlib.sha256(read_bounded(files[0]))
    for file in files[1:]:  # the other files have the names by which the first one imports them
        content = hashlib.sha256(read_bounded(file)).hexdigest()
        digest.update(f"\n{file.relative_to(folder).as_posix()} {content}".encode())
    return digest.hexdigest()
