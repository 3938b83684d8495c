"""Mutants drawn from the whole product by a seed: the same for the same seed and code.

All operators give the same number of mutants. A mutant's rank is a digest of the seed and the line,
so a change elsewhere in the tree changes no other mutant.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import heapq
import pathlib
import subprocess
import warnings
from collections.abc import Iterator

from tests.mutants import operators, results, sources
from tests.mutants.operators import OPERATORS, Mistake

#: The folders of the product; thinwire/ holds links to the others.
FOLDERS = ("data", "ops", "proto", "ps", "supervisor", "thinwire", "worker")


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A mutant and its place."""

    name: str  # unique: the path, the line and the original code
    path: pathlib.Path  # relative to the tree
    mistake: Mistake
    source: str

    @property
    def text(self) -> str:
        """The mutated source."""
        return self.mistake.made_in(self.source)

    @property
    def key(self) -> str:
        """Digest of everything except the tests that decides if a test fails on the mutant."""
        return results.digest(str(self.path), self.source, self.text)

    def is_made_by(self, text: str) -> bool:
        """Whether another mutated source is the same program."""
        return ast.dump(ast.parse(text)) == ast.dump(ast.parse(self.text))


def files(root: pathlib.Path = sources.ROOT) -> list[pathlib.Path]:
    """Return the product's Python files, relative to `root`, without generated ones."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *FOLDERS],
        cwd=root,
        capture_output=True,
        check=True,
    ).stdout.decode()
    paths = (pathlib.Path(name) for name in sorted(names.split("\0")) if name.endswith(".py"))
    return [path for path in paths if "_pb2" not in path.name and (root / path).is_file()]


def draw(number: int, seed: int, root: pathlib.Path = sources.ROOT) -> list[Drawn]:
    """Return this many mutants, one operator after another; fewer draws give a prefix."""
    ranked: dict[str, list[tuple[str, int, Drawn]]] = {operator: [] for operator in OPERATORS}
    for path in files(root):
        source = (root / path).read_text()
        lines, count = source.split("\n"), collections.Counter[tuple[str, str]]()
        for order, mistake in enumerate(operators.mistakes(source)):
            code = lines[mistake.line - 1].strip(), mistake.new
            rank = results.digest(str(seed), str(path), *code, str(count[code]))
            count[code] += 1
            name = f"{path}:{mistake.line} {mistake.operator} {order}"
            drawn = Drawn(name, path, mistake, source)
            ranked[mistake.operator].append((rank, order, drawn))
    orders = {operator: _by_rank(mutants) for operator, mutants in ranked.items()}
    chosen: list[Drawn] = []
    while orders and len(chosen) < number:
        for operator in list(orders):
            following = next(orders[operator], None)
            if following is None:
                del orders[operator]
            else:
                chosen.append(following)
    return chosen[:number]


def _by_rank(mutants: list[tuple[str, int, Drawn]]) -> Iterator[Drawn]:
    heapq.heapify(mutants)
    while mutants:
        _, _, drawn = heapq.heappop(mutants)
        if _is_a_change(drawn):
            yield drawn


def _is_a_change(drawn: Drawn) -> bool:
    """Whether a mutant is a module that compiles, and another one than before."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(drawn.text, str(drawn.path), "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return not drawn.is_made_by(drawn.source)
