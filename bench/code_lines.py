"""Count lines of code, comments and docstrings: ``python -m bench.code_lines [FOLDER ...]``.

A line of code holds a token that is neither a comment nor part of a docstring. Blank lines and
generated files do not count. All files are formatted by ruff with 100 columns, so that counts are
comparable.
"""

from __future__ import annotations

import argparse
import ast
import io
import pathlib
import sys
import tokenize

ROOT = pathlib.Path(__file__).resolve().parents[1]
#: Folders of the product. `thinwire` contains symbolic links to the other folders; links are not
#: followed, so that no file is counted twice.
PRODUCT = ("thinwire", "ops", "ps", "worker", "supervisor", "proto", "data", "main.py")
_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


def count(text: str) -> tuple[int, int, int]:
    """Return a file's numbers of (code lines, comment lines, docstring lines)."""
    docstrings = _docstring_lines(ast.parse(text))
    code, comments = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        lines = range(token.start[0], token.end[0] + 1)
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _NO_CODE:
            code.update(lines)
    return len(code - docstrings), len(comments), len(docstrings)


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Return the line numbers of all strings that are statements, such as docstrings."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def files_of(path: pathlib.Path) -> list[pathlib.Path]:
    """Return the Python files of a folder, except links and generated files."""
    if path.is_file():
        return [path]
    return sorted(
        file
        for file in path.rglob("*.py")
        if "_pb2" not in file.name and not any(parent.is_symlink() for parent in file.parents)
    )


def main() -> int:
    """Print one line for each folder, and a line with the total."""
    parser = argparse.ArgumentParser(prog="python -m bench.code_lines", description=__doc__)
    parser.add_argument("folders", nargs="*", default=PRODUCT, help="folders or files to count")
    total = (0, 0, 0, 0)
    print(f"{'folder':24}{'files':>8}{'code':>8}{'comments':>10}{'docstrings':>12}")
    for name in parser.parse_args().folders:
        files = files_of(ROOT / name)
        counts = [count(file.read_text()) for file in files]
        row = (len(files), *(sum(column) for column in zip(*counts, strict=True)))
        total = tuple(a + b for a, b in zip(total, row, strict=True))
        print(f"{name:24}{row[0]:8}{row[1]:8}{row[2]:10}{row[3]:12}")
    print(f"{'total':24}{total[0]:8}{total[1]:8}{total[2]:10}{total[3]:12}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
