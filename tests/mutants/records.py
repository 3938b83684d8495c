"""Records of mutants: ``records/<area>.toml``, read, checked and applied to the code.

A record names code, not lines: a module, a qualified name in it, the code to find there and the
code to put in its place. Comments and layout do not count, so only a change of the code itself can
make a record invalid. Such a record is an error, so that a refactoring moves the record with the
code instead of losing it.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import pathlib
import re
import tomllib
import warnings

from tests.mutants import sources, tokens

FOLDER = pathlib.Path(__file__).with_name("records")
EQUIVALENTS = pathlib.Path(__file__).with_name("equivalent.toml")
AREAS = (
    *("ps_core", "ps_service", "ps_persistence", "sync", "codecs_wire", "downlink"),
    *("optimizers", "worker", "script", "launcher", "supervisor", "proto"),
)
#: Fewer would leave most of an area's promises without a mutant.
FEWEST_PER_AREA = 6
_MOST_KILLERS = 3


class NotApplicable(ValueError):
    """An edit does not fit the present code."""


class InvalidRecords(ValueError):
    """Records cannot be used; the message has a line for each reason."""


@dataclasses.dataclass(frozen=True)
class Edit:
    """Code to find in a module, and the code that replaces it."""

    module: str
    where: str  # qualified name of a class or function; "" is the module level
    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class Record(Edit):
    """A mutant from a record, and the tests that must fail on it."""

    name: str
    area: str
    harm: str  # the harm to a user
    killers: tuple[str, ...]  # ids of tests, the fastest first


def apply(source: str, edit: Edit) -> str:
    """Return a module's source with the edit made.

    Raises:
        NotApplicable: The code to replace is not there exactly once, or the result is no module.
    """
    lines = sources.lines_named(source, edit.where)
    if not lines:
        raise NotApplicable(f"{edit.module} has no {edit.where}: correct `where`")
    try:
        within = [token for token in tokens.read(source) if token.line in lines]
        places = tokens.places(within, edit.old)
    except SyntaxError as error:
        raise NotApplicable(f"`old` or `new` cannot be split into tokens: {error}") from error
    place = f"{edit.module}: {edit.where or 'module level'}"
    if not places:
        raise NotApplicable(f"`old` is not in {place}: {edit.old!r}; write the code of today")
    if len(places) > 1:
        raise NotApplicable(
            f"`old` is {len(places)} times in {place}: {edit.old!r}; write more of the code, or a"
            " narrower `where`"
        )
    mutated = tokens.replaced(source, *places[0], edit.new)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a mutant may wrongly compare with `is`
            compile(mutated, edit.module, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise NotApplicable(f"the mutated {edit.module} does not compile: {error}") from error
    # Tokens do not show whether a line has been moved into a block or out of it.
    if ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source)):
        raise NotApplicable("`new` equals `old`: write the mistake into `new`")
    return mutated


def read(
    folder: pathlib.Path = FOLDER,
    areas: tuple[str, ...] = AREAS,
    *,
    drafts: bool = False,
) -> list[Record]:
    """Return all records, by area.

    Args:
        folder: It holds a file for each area.
        areas: Their names.
        drafts: Records may lack killers, which are still to be found, and areas may lack records.

    Raises:
        InvalidRecords: A file is malformed, a record has wrong keys or values, a name occurs twice,
            or an area has too few records.
    """
    records: list[Record] = []
    problems: list[str] = []
    for path in sorted(folder.glob("*.toml")):
        if path.stem not in areas:
            problems.append(f"{path.name} is no area: expected one of {', '.join(areas)}")
        try:
            document = tomllib.loads(path.read_text())
        except tomllib.TOMLDecodeError as error:
            problems.append(f"{path.name} is not TOML: {error}")
            continue
        if unknown := document.keys() - {"mutant"}:
            problems.append(f"{path.name} has {sorted(unknown)}: it may have [[mutant]] alone")
        for number, entry in enumerate(document.get("mutant", ()), 1):
            name = f"{path.name}, {entry.get('name', f'mutant {number}')}"
            wrong = _wrong(entry, 0 if drafts else 1)
            problems += [f"{name}: {reason}" for reason in wrong]
            if not wrong:
                killers = tuple(entry.pop("killers"))
                records.append(Record(area=path.stem, killers=killers, **entry))
    names = collections.Counter(record.name for record in records)
    problems += [
        f"{name} is the name of {names[name]} records" for name in names if names[name] > 1
    ]
    counts = collections.Counter(record.area for record in records)
    problems += [
        f"{area} has {counts[area]} records: at least {FEWEST_PER_AREA} are needed"
        for area in areas
        if counts[area] < FEWEST_PER_AREA and not drafts
    ]
    if problems:
        raise InvalidRecords("\n".join(problems))
    return records


def _wrong(entry: dict, fewest_killers: int) -> list[str]:
    texts = ("name", "module", "where", "old", "new", "harm")
    reasons = [f"unknown key {key!r}" for key in entry if key not in (*texts, "killers")]
    for key in texts:
        value = entry.get(key)
        if not isinstance(value, str) or not (value.strip() or key == "where"):
            reasons.append(f"{key} is {value!r}: it must be a text")
    killers = entry.get("killers")
    if not (
        isinstance(killers, list)
        and fewest_killers <= len(killers) <= _MOST_KILLERS
        and all(isinstance(killer, str) and "::" in killer for killer in killers)
    ):
        reasons.append(f"killers is {killers!r}: it must be 1 to {_MOST_KILLERS} ids of tests")
    name = entry.get("name")
    if isinstance(name, str) and not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        reasons.append("the name must be words of small letters and digits joined by hyphens")
    return reasons


def check(records: list[Record], root: pathlib.Path = sources.ROOT) -> None:
    """Raise InvalidRecords if a record does not apply to the tree, or names a missing file."""
    problems = []
    for record in records:
        try:
            mutated(record, root)
        except NotApplicable as error:
            problems.append(f"{record.area}.toml, {record.name}: {error}")
        for killer in record.killers:
            file = killer.partition("::")[0]
            if not (root / file).is_file():
                problems.append(
                    f"{record.area}.toml, {record.name}: there is no {file}, the file of its killer"
                )
    if problems:
        raise InvalidRecords("\n".join(problems))


def mutated(edit: Edit, root: pathlib.Path = sources.ROOT) -> tuple[pathlib.Path, str]:
    """Return the file that an edit changes, relative to `root`, and its mutated text.

    Raises:
        NotApplicable: The edit does not fit.
    """
    path = sources.path_of(edit.module, root)
    if path is None:
        raise NotApplicable(f"there is no module {edit.module}")
    return path.relative_to(root.resolve()), apply(path.read_text(), edit)


@dataclasses.dataclass(frozen=True)
class Equivalent(Edit):
    """A mutant that no test can kill, because it changes no visible behavior."""

    reason: str


def equivalents(path: pathlib.Path = EQUIVALENTS) -> list[Equivalent]:
    """Return the known mutants that change no behaviour.

    Raises:
        InvalidRecords: An entry has wrong keys or values.
    """
    entries = tomllib.loads(path.read_text()).get("mutant", [])
    keys = {field.name for field in dataclasses.fields(Equivalent)}
    wrong = [
        f"{path.name}, mutant {number}: it must have the keys {sorted(keys)}, each a text"
        for number, entry in enumerate(entries, 1)
        if entry.keys() != keys or not all(isinstance(value, str) for value in entry.values())
    ]
    if wrong:
        raise InvalidRecords("\n".join(wrong))
    return [Equivalent(**entry) for entry in entries]
