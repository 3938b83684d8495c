"""Runs the whole suite on mutants that all other tests missed, several mutants at a time."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence

from tests.mutants.calls import Calls, Outcome

#: `make test` takes 10 minutes on a quiet machine; here two jobs can share it with other work.
_SUITE_LIMIT_SECONDS = 3600.0
_TEST_LIMIT_SECONDS = 300.0
#: Each of the mutants is tried alone against each test that fails on all of them together.
_MOST_TOGETHER = 16
#: More failures than this show nothing new: one of the mutants has broken much.
_MOST_FAILURES = 40


@dataclasses.dataclass(frozen=True)
class Planted:
    """A planted mutant: the file and its mutated text."""

    name: str
    path: pathlib.Path  # relative to the tree
    text: str


def killers_in_suite(
    calls: Calls,
    mutants: Sequence[Planted],
    ended: Callable[[Planted, str], None],
) -> None:
    """Find for each mutant a test of `make test` that fails on it.

    All mutants of different files are planted together: while the suite passes, none of them is
    killed. Where tests fail, each mutant alone is tried against the tests that failed. If that
    explains no failure, the mutants are halved, for one can hide another.

    Args:
        calls: The copy.
        mutants: What to plant.
        ended: Called with each mutant and its killer, "" for none.
    """
    waiting = list(mutants)
    while waiting:
        by_file = {mutant.path: mutant for mutant in reversed(waiting)}
        group = list(by_file.values())[:_MOST_TOGETHER]
        waiting = [mutant for mutant in waiting if mutant not in group]
        _try_group(calls, group, ended)


def _try_group(calls: Calls, group: list[Planted], ended: Callable[[Planted, str], None]) -> None:
    names = ", ".join(mutant.name for mutant in group)
    sys.stdout.write(f"make test with {len(group)} mutants: {names}\n")
    sys.stdout.flush()
    if len(group) == 1:
        ended(group[0], _killer_of_one(calls, group[0]))
        return
    outcome = _suite(calls, group, ends_at_failure=False)
    suspects = [test for test in outcome.failed[:_MOST_FAILURES] if not _fails(calls, [], test)]
    left = []
    for mutant in group:
        killer = next((test for test in suspects if _fails(calls, [mutant], test)), "")
        if killer:
            ended(mutant, killer)
        else:
            left.append(mutant)
    if len(left) < len(group):
        killers_in_suite(calls, left, ended)
    elif outcome.failed and not any(_fails(calls, group, test) for test in suspects):
        _all_survive(group, ended)  # these tests fail at times, with and without the mutants
    elif outcome.passed:
        _all_survive(group, ended)
    else:
        for half in (group[: len(group) // 2], group[len(group) // 2 :]):
            _try_group(calls, half, ended)


def _all_survive(group: list[Planted], ended: Callable[[Planted, str], None]) -> None:
    for mutant in group:
        ended(mutant, "")


def _killer_of_one(calls: Calls, mutant: Planted) -> str:
    """Return the first test of the suite that fails on a mutant and passes without it."""
    for ends_at_failure in (True, False):
        outcome = _suite(calls, [mutant], ends_at_failure)
        suspects = [test for test in outcome.failed if not _fails(calls, [], test)]
        if suspects:
            return suspects[0]
        if not outcome.failed:
            return "" if outcome.passed else outcome.killer
    return ""  # each test that failed fails without the mutant too


def _suite(calls: Calls, group: list[Planted], ends_at_failure: bool) -> Outcome:
    with calls.copy.planted({mutant.path: mutant.text for mutant in group}):
        return calls.suite(_SUITE_LIMIT_SECONDS, ends_at_failure)


def _fails(calls: Calls, group: list[Planted], test: str) -> bool:
    """Whether a test fails with these mutants in the tree."""
    with calls.copy.planted({mutant.path: mutant.text for mutant in group}):
        return not calls.pytest(test, limit_seconds=_TEST_LIMIT_SECONDS).passed
