"""Finds the source lines of a module and of its classes and functions."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def path_of(module: str, root: pathlib.Path = ROOT) -> pathlib.Path | None:
    """Return the file of a module below `root`, links followed; None if the module has no file."""
    place = root.joinpath(*module.split("."))
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        if path.is_file():
            return path.resolve()
    return None


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Definition]]:
    """Yield the qualified name and the node of each class and function, outer ones first.

    A function within a function is named `outer.inner`.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            name = f"{prefix}{node.name}"
            yield name, node
            yield from definitions(node, f"{name}.")
        else:
            yield from definitions(node, prefix)


def lines_of(node: Definition) -> range:
    """Return the numbers of a definition's lines, decorators included."""
    first = min((decorator.lineno for decorator in node.decorator_list), default=node.lineno)
    return range(min(first, node.lineno), (node.end_lineno or node.lineno) + 1)


def lines_named(source: str, where: str) -> set[int]:
    """Return the numbers of the lines that belong to a qualified name.

    One name can have several definitions: a property and its setter. The empty name is the
    module level: all lines outside of classes and functions.
    """
    tree = ast.parse(source)
    if where:
        spans = (lines_of(node) for name, node in definitions(tree) if name == where)
        return {line for span in spans for line in span}
    inner = {line for _, node in definitions(tree) for line in lines_of(node)}
    return set(range(1, source.count("\n") + 2)) - inner
