"""Chooses which of a fuzzer's inputs to keep: the smallest inputs that reach new lines."""

from __future__ import annotations

import hashlib
import pathlib
import sys
from typing import Any

from tests.fuzz import guided, registry
from tests.fuzz.target import CORPUS, Target, watched

#: Bytes of one target's corpus, and of an input in it.
_MOST_BYTES, _LONGEST = 16 << 10, 1024
_ROOT = str(pathlib.Path(__file__).parents[2])
_PACKAGES = tuple(f"{_ROOT}/{package}/" for package in guided.PACKAGES)

#: File, line before, line.
Arc = tuple[str, int, int]


def keep(name: str, found: pathlib.Path) -> str:
    """Rebuild a target's corpus from its old corpus and the new inputs; return the outcome.

    Args:
        name: Name of the target.
        found: Folder of inputs; it may be missing.
    """
    target, place = registry.load(name), CORPUS / name
    paths = [path for folder in (place, found) if folder.is_dir() for path in folder.iterdir()]
    inputs = sorted({path.read_bytes() for path in paths}, key=lambda each: (len(each), each))
    covered: set[Arc] = set()
    for seed in target.seeds():
        covered |= arcs(target, seed)
    chosen: list[bytes] = []
    for each in inputs:
        if len(each) > _LONGEST or sum(map(len, chosen)) + len(each) > _MOST_BYTES:
            continue
        reached = arcs(target, each)
        if not reached <= covered:
            covered |= reached
            chosen.append(each)
    _replace(place, chosen)
    return f"{len(chosen)} of {len(inputs)} inputs, {sum(map(len, chosen))} bytes"


def _replace(place: pathlib.Path, chosen: list[bytes]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    names = {hashlib.sha256(each).hexdigest()[:12]: each for each in chosen}
    for path in place.iterdir():
        if path.name not in names:
            path.unlink()
    for name, content in names.items():
        (place / name).write_bytes(content)


def arcs(target: Target, data: bytes) -> set[Arc]:
    """Return which lines of the product follow which when an input is run."""
    reached: set[Arc] = set()
    last: dict[int, int] = {}

    def trace(frame: Any, event: str, argument: Any) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(_PACKAGES):
            return None
        if event in ("call", "line"):
            place = frame.f_lineno
            reached.add((path, last.get(id(frame), 0) if event == "line" else 0, place))
            last[id(frame)] = place
        return trace

    with watched():
        sys.settrace(trace)
        try:
            target.one(data)
        finally:
            sys.settrace(None)
    return reached
