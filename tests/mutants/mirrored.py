"""Which tests belong to a file of the product: those in the folder that mirrors its own."""

from __future__ import annotations

import pathlib


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
