"""Runs drawn mutants: tests that execute the line, then `make test` with several mutants planted.

A killed mutant is not run again. A survivor is run again when a test file has changed.
"""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Sequence

from tests.mutants import lines, operators, records, report, results, runner, selection, sources
from tests.mutants.calls import LOADED, Calls
from tests.mutants.drawn import Drawn
from tests.mutants.lines import Lines
from tests.mutants.operators import OPERATORS
from tests.mutants.results import Result, Results
from tests.mutants.suite import Planted, killers_in_suite

#: Number of processes that make the map; each takes up to 2.5 GB.
_MAP_PROCESSES = 4
#: Seconds to import a file of tests, which the map does not count.
_IMPORT_SECONDS = 1.0
#: Time limit of each call.
_LIMIT_WITHOUT_MAP_SECONDS = 120.0
STAGES = (results.LINES, results.SUITE, results.SURVIVED, results.EQUIVALENT)


def run(
    mutants: Sequence[Drawn],
    past: Results,
    jobs: int,
    *,
    with_suite: bool = True,
    with_map: bool = True,
    root: pathlib.Path = sources.ROOT,
    folder: pathlib.Path = lines.FOLDER,
    loaded: Sequence[str] = LOADED,
) -> list[Result]:
    """Return the result of each mutant; those that `past` has are not run again.

    Args:
        mutants: The drawn mutants.
        past: The results of earlier runs.
        jobs: The number of copies that are used at the same time.
        with_suite: True if `make test` runs on mutants that survive their lines' tests. Otherwise
            these mutants count as survivors in the returned results, and are not stored.
        with_map: True if the map of lines chooses the tests. Otherwise a mutant gets the tests
            of its folder and the tests that import its module.
        root: The tree.
        folder: The folder of the map; it is created if it does not exist.
        loaded: The modules that forks find imported.
    """
    tests = _digest_of_tests(root)
    equivalents = _equivalents(root)
    for mutant in mutants:
        if _past(past, mutant, tests) is None and any(
            path == mutant.path and mutant.is_made_by(text) for path, text in equivalents
        ):
            _note(past, mutant, mutant.key, results.EQUIVALENT, "", 0.0)
    waiting = [mutant for mutant in mutants if _past(past, mutant, tests) is None]
    spared: dict[Planted, tuple[Drawn, float]] = {}
    if waiting:
        with runner.copies(min(jobs, len(waiting)), root, loaded) as copied:
            if with_map and not folder.exists():
                lines.make(copied[0], _MAP_PROCESSES, folder)
            known = Lines(folder, root) if with_map else None
            spared = _tried_by_lines(waiting, past, copied, known, root)
            if with_suite:
                _try_suite(copied[0], spared, past, tests)
    done = [_past(past, mutant, tests) for mutant in mutants]
    left = (
        []
        if with_suite
        else [
            Result(mutant.key, mutant.name, mutant.mistake.operator, results.SURVIVED, "", seconds)
            for mutant, seconds in spared.values()
        ]
    )
    return [result for result in done if result is not None] + left


def _tried_by_lines(
    mutants: Sequence[Drawn],
    past: Results,
    copied: Sequence[Calls],
    known: Lines | None,
    root: pathlib.Path,
) -> dict[Planted, tuple[Drawn, float]]:
    """Return the mutants that no test which executes their line kills, and their seconds."""
    spared = {}
    work = []
    for mutant in _by_file(mutants):  # the map of a file is read once for all its mutants
        if known is None:
            batches = selection.batches_without_map(mutant, root)
        else:
            batches = selection.batches(known, mutant, root)
        work.append((mutant, batches))

    def try_one(calls: Calls, item: tuple[Drawn, list[list[str]]]) -> None:
        mutant, batches = item
        begin = time.monotonic()
        killer = _killer(calls, mutant, batches, known)
        seconds = time.monotonic() - begin
        if killer:
            _note(past, mutant, mutant.key, results.LINES, killer, seconds)
        else:
            spared[Planted(mutant.name, mutant.path, mutant.text)] = mutant, seconds
            sys.stdout.write(f"{seconds:6.1f} s  spared    {mutant.name}\n")
            sys.stdout.flush()

    runner.spread(copied, work, try_one)
    return spared


def _by_file(mutants: Sequence[Drawn]) -> list[Drawn]:
    return sorted(mutants, key=lambda mutant: (str(mutant.path), mutant.mistake.line))


def _killer(calls: Calls, mutant: Drawn, batches: list[list[str]], known: Lines | None) -> str:
    with calls.copy.planted({mutant.path: mutant.text}):
        for batch in batches:
            limit = _LIMIT_WITHOUT_MAP_SECONDS
            if known is not None:
                usual = sum(known.seconds.get(test, runner.PATIENCE_SECONDS) for test in batch)
                usual += _IMPORT_SECONDS * len({test.partition("::")[0] for test in batch})
                limit = runner.PATIENCE_SECONDS + runner.PATIENCE * usual
            outcome = calls.pytest("-x", "-m", lines.IN_PROCESS, *batch, limit_seconds=limit)
            if known is None and outcome.stopped and not outcome.failed:
                continue  # the time of these files without a mutant is unknown
            if not outcome.passed:
                return outcome.killer
    return ""


def _try_suite(
    calls: Calls, spared: dict[Planted, tuple[Drawn, float]], past: Results, tests: str
) -> None:
    def ended(planted: Planted, killer: str) -> None:
        mutant, seconds = spared[planted]
        if killer:
            _note(past, mutant, mutant.key, results.SUITE, killer, seconds)
        else:
            _note(past, mutant, _survivor_key(mutant, tests), results.SURVIVED, "", seconds)

    killers_in_suite(calls, list(spared), ended)


def _note(past: Results, mutant: Drawn, key: str, stage: str, killer: str, seconds: float) -> None:
    past.add(Result(key, mutant.name, mutant.mistake.operator, stage, killer, seconds))
    sys.stdout.write(f"{seconds:6.1f} s  {stage:9} {mutant.name}  {killer}\n")
    sys.stdout.flush()


def _past(past: Results, mutant: Drawn, tests: str) -> Result | None:
    return past.get(mutant.key) or past.get(_survivor_key(mutant, tests))


def _survivor_key(mutant: Drawn, tests: str) -> str:
    return results.digest(mutant.key, tests)


def _digest_of_tests(root: pathlib.Path) -> str:
    return results.digest_of_files((root / "tests").rglob("test_*.py"))


def _equivalents(root: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
    """Return the files and texts of the mutants that are listed as changing no behaviour.

    A tree that lacks the module of one has fewer of them.
    """
    edits = [edit for edit in records.equivalents() if sources.path_of(edit.module, root)]
    return [records.mutated(edit, root) for edit in edits]


def summary(mutants: Sequence[Drawn], ended: Sequence[Result]) -> str:
    """Return the table, the share that died, and what survived."""
    counted = [result for result in ended if result.stage != results.EQUIVALENT]
    dead = sum(result.stage != results.SURVIVED for result in counted)
    share = 100 * dead / len(counted) if counted else 100.0
    texts = [
        report.table(ended, OPERATORS, STAGES),
        f"{dead} of {len(counted)} died: {share:.1f} %; equivalents are not counted",
    ]
    by_name = {mutant.name: mutant for mutant in mutants}
    for result in ended:
        if result.stage in (results.SURVIVED, results.EQUIVALENT):
            texts.append(f"{result.stage}: {_as_edit(by_name[result.name])}")
    return "\n".join(texts)


def _as_edit(mutant: Drawn) -> str:
    where, old, new = operators.statement_of(mutant.source, mutant.mistake)
    return f"{mutant.name}, in {where or 'the module'}\n  - {old}\n  + {new}"
