"""The tests of a file: the tests in its mirrored folder, and the tests that import the file.

Most tests import a file indirectly; only the map of lines shows these tests (see lines.py).
"""

from __future__ import annotations

import ast
import functools
import pathlib

from tests.mutants import sources


def tests_of(path: pathlib.Path, root: pathlib.Path) -> tuple[str, ...]:
    """Return the test files of the nearest folder that mirrors the file's own or one above it.

    Args:
        path: The product's file, relative to `root`.
        root: The tree.
    """
    for folder in path.parents:
        files = sorted((root / "tests" / folder).glob("test_*.py"))
        if files:
            return tuple(str(file.relative_to(root)) for file in files)
    return ()


def importing(path: pathlib.Path, root: pathlib.Path) -> tuple[str, ...]:
    """Return the test files that import a module, or import its names from a package above it."""
    parts = path.with_suffix("").parts
    names = parts if parts[0] == "thinwire" else ("thinwire", *parts)
    tree = ast.parse((root / path).read_text())
    defined = {node.name for node in tree.body if isinstance(node, sources.Definition)}
    packages = [".".join(names[:end]) for end in range(1, len(names))]
    sought = {".".join(names)} | {f"{package}.{name}" for package in packages for name in defined}
    return tuple(name for name, imported in _imports_of_tests(root) if sought & imported)


@functools.cache
def _imports_of_tests(root: pathlib.Path) -> list[tuple[str, set[str]]]:
    """Return the path of each test file, and all that it imports."""
    imports = []
    for file in sorted((root / "tests").rglob("test_*.py")):
        imported = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
        imports.append((str(file.relative_to(root)), imported))
    return imports
