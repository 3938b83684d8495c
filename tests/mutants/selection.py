"""Which tests are tried on a drawn mutant, and in which order: those that execute its line."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterable, Mapping

from tests.mutants import mirrored, operators
from tests.mutants.drawn import Drawn
from tests.mutants.lines import OWN_TESTS, Lines

#: The usual seconds of the tests of each call: most mutants die in the first, which is short.
BUDGETS_SECONDS = (6.0, 60.0)
#: Importing a test file takes up to 2 s, which no budget counts.
_MOST_FILES = (6, 30)


def batches_without_map(mutant: Drawn, root: pathlib.Path) -> list[list[str]]:
    """Return test files for each call of pytest.

    The first have the module's name, the second import it, the third mirror its folder.
    """
    importing = mirrored.importing(mutant.path, root)
    files = [*importing, *mirrored.tests_of(mutant.path, root)]
    batches: list[list[str]] = [[], [], []]
    for file in dict.fromkeys(files):
        is_alike = mutant.path.stem in pathlib.Path(file).stem
        if not file.startswith(OWN_TESTS):
            batches[0 if is_alike else 1 if file in importing else 2].append(file)
    return [batch for batch in batches if batch]


def batches(lines: Lines, mutant: Drawn, root: pathlib.Path) -> list[list[str]]:
    """Return the ids of tests for each call of pytest, without repetitions."""
    executing = _executing(lines, mutant)
    mirrored_tests = set(mirrored.tests_of(mutant.path, root))
    order = _in_order({test: lines.seconds[test] for test in executing}, mirrored_tests)
    chosen, taken = [], set[str]()
    for budget, most_files in zip(BUDGETS_SECONDS, _MOST_FILES, strict=True):
        batch, files = [], set[str]()
        for test in order:
            file, seconds = test.partition("::")[0], lines.seconds[test]
            has_place = file in files or len(files) < most_files
            if test not in taken and seconds <= budget and has_place:
                batch.append(test)
                taken.add(test)
                files.add(file)
                budget -= seconds
        chosen.append(batch)
    changed = [file for file in lines.changed_tests if (root / file).is_file()]
    unmapped = [] if executing else sorted(mirrored_tests - set(changed))
    return [batch for batch in (*chosen, [*changed, *unmapped]) if batch]


def _executing(lines: Lines, mutant: Drawn) -> set[str]:
    """Return the tests that execute the mutant's statement, else its function, else its file."""
    for numbers in operators.surroundings(mutant.source, mutant.mistake):
        tests = lines.tests_at(mutant.path, numbers)
        if tests:
            return tests
    return set()


def _in_order(seconds: Mapping[str, float], mirrored_tests: Iterable[str]) -> list[str]:
    """Return tests of the mutant's folder first, one of each function, the fastest of each.

    The cases of a parametrised test are much alike: the second one of each comes after the first
    one of all.
    """
    mirrored_tests, turns = set(mirrored_tests), collections.Counter[str]()
    ranked = []
    for test in sorted(seconds, key=lambda name: (seconds[name], name)):
        function = test.partition("[")[0]
        is_mirrored = test.partition("::")[0] in mirrored_tests
        ranked.append((turns[function], not is_mirrored, seconds[test], test))
        turns[function] += 1
    return [test for *_, test in sorted(ranked)]
