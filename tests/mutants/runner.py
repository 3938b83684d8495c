"""Plants each recorded mutant in a copy of the tree and looks for a test that fails on it.

The named killers run first, then the tests of the module's folder, then `make test` for mutants
that survived. A record is wrong if a test other than its killers kills the mutant.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import pathlib
import queue
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

from tests.mutants import mirrored, records, results, sources
from tests.mutants.calls import LOADED, Calls, Outcome
from tests.mutants.copies import Copy
from tests.mutants.records import Record
from tests.mutants.results import Result, Results
from tests.mutants.suite import Planted, killers_in_suite

#: Not from the suite: what `make test` leaves to other targets.
SELECTED = ("-m", "not product and not engines")
_BASELINE_LIMIT_SECONDS = 1800.0
_FOLDER_LIMIT_SECONDS = 900.0
#: A mutant can make a test wait for ever. The limit is this many times the test's usual time plus a
#: constant for imports and for other load of the machine.
PATIENCE = 10.0
PATIENCE_SECONDS = 45.0


class UselessKillers(RuntimeError):
    """Killers fail, or do not exist, in the tree without a mutant."""


@contextlib.contextmanager
def copies(
    number: int, root: pathlib.Path = sources.ROOT, loaded: Sequence[str] = LOADED
) -> Iterator[list[Calls]]:
    """Make copies with a fork server each; remove all at the end."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, contextlib.ExitStack() as stack:
        made = []
        for copy in range(number):
            made.append(Copy(pathlib.Path(folder) / f"copy-{copy}" / root.name, root))
            made[-1].check_package()
        servers = [Calls(copy, loaded) for copy in made]  # all load at the same time
        yield [stack.enter_context(calls) for calls in servers]


def spread(copied: Sequence[Calls], items: Sequence, work) -> None:
    """Do `work(calls, item)` for all items, each copy one at a time.

    An exception, an interrupt too, ends the calls that are under way.
    """
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for item in items:
        waiting.put(item)

    def serve(calls: Calls) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                work(calls, waiting.get_nowait())

    with concurrent.futures.ThreadPoolExecutor(len(copied)) as threads:
        jobs = [threads.submit(serve, calls) for calls in copied]
        try:
            for job in concurrent.futures.as_completed(jobs):
                job.result()
        except BaseException:
            for calls in copied:
                calls.close()
            raise


@dataclasses.dataclass(frozen=True)
class Case:
    """A record, applied to the tree."""

    record: Record
    key: str
    path: pathlib.Path
    text: str

    @classmethod
    def of(cls, record: Record, root: pathlib.Path) -> Case:
        """Apply a record.

        Raises:
            NotApplicable: It does not fit the tree.
        """
        path, text = records.mutated(record, root)
        files = {root / killer.partition("::")[0] for killer in record.killers}
        edited = (record.module, record.where, record.old, record.new, *record.killers)
        original = (root / path).read_bytes()
        key = results.digest(*edited, original, results.digest_of_files(files))
        return cls(record, key, path, text)

    @property
    def planted(self) -> Planted:
        return Planted(self.record.name, self.path, self.text)


def run(
    chosen: Sequence[Record],
    past: Results,
    jobs: int,
    root: pathlib.Path = sources.ROOT,
    loaded: Sequence[str] = LOADED,
) -> list[Result]:
    """Return the result of each record; those that `past` has are not run again.

    Raises:
        InvalidRecords: A record does not apply.
        UselessKillers: A killer fails without a mutant.
    """
    records.check(list(chosen), root)
    cases = [Case.of(record, root) for record in chosen]
    open_cases = [case for case in cases if past.get(case.key) is None]
    if open_cases:
        with copies(min(jobs, len(open_cases)), root, loaded) as copied:
            _run(open_cases, past, copied)
    return [result for case in cases if (result := past.get(case.key)) is not None]


def _run(cases: list[Case], past: Results, copied: list[Calls]) -> None:
    usual = usual_seconds(copied[0], [killer for c in cases for killer in c.record.killers])
    spared: list[tuple[Case, float]] = []

    def try_one(calls: Calls, case: Case) -> None:
        begin = time.monotonic()
        stage, killer = _first_stages(calls, case, usual)
        seconds = time.monotonic() - begin
        if killer:
            note(past, case, stage, killer, seconds)
        else:
            spared.append((case, seconds))

    spread(copied, cases, try_one)
    by_planted = {case.planted: (case, seconds) for case, seconds in spared}

    def ended(planted: Planted, killer: str) -> None:
        case, seconds = by_planted[planted]
        note(past, case, results.SUITE if killer else results.SURVIVED, killer, seconds)

    killers_in_suite(copied[0], list(by_planted), ended)


def note(past: Results, case: Case, stage: str, killer: str, seconds: float) -> None:
    """Store a result, and show it."""
    past.add(Result(case.key, case.record.name, case.record.area, stage, killer, seconds))
    sys.stdout.write(f"{seconds:6.1f} s  {stage:9} {case.record.name}  {killer}\n")
    sys.stdout.flush()


def usual_seconds(calls: Calls, killers: Sequence[str]) -> dict[str, float]:
    """Return what each killer takes without a mutant; all must pass.

    Raises:
        UselessKillers: One does not exist, fails or is skipped.
    """
    asked = list(dict.fromkeys(killers))
    if not asked:
        return {}  # pytest without a name would run all tests
    outcome = calls.pytest(*asked, limit_seconds=_BASELINE_LIMIT_SECONDS)
    usual, useless = {}, []
    for killer in asked:
        endings = [ending for ending in outcome.endings if _belongs(ending.test, killer)]
        if not endings or any(ending.outcome != "passed" for ending in endings):
            how = endings[0].outcome if endings else _why_not_run(outcome, killer)
            useless.append(f"{killer}: {how}")
        usual[killer] = sum(ending.seconds for ending in endings)
    if useless:
        raise UselessKillers(
            "killers that do not pass in the tree without a mutant:\n" + "\n".join(useless)
        )
    return usual


def _belongs(test: str, killer: str) -> bool:
    """Whether a test is the killer, or one of its parameters or methods."""
    return test == killer or test.startswith((f"{killer}[", f"{killer}::"))


def _why_not_run(outcome: Outcome, killer: str) -> str:
    if outcome.stopped:
        return f"not run: {outcome.stopped}"
    file = killer.partition("::")[0]
    if any(e.test == file and e.outcome == "uncollected" for e in outcome.endings):
        return "its file cannot be imported"
    if any("not found" in line and killer in line for line in outcome.output.splitlines()):
        return "does not exist"
    return f"not run, for another was not found (pytest ended with code {outcome.code})"


def _first_stages(calls: Calls, case: Case, usual: dict[str, float]) -> tuple[str, str]:
    """Return the stage in which a mutant was killed and its killer; no killer if it survived."""
    seconds = sum(usual[killer] for killer in case.record.killers)
    limit = PATIENCE_SECONDS + PATIENCE * seconds
    with calls.copy.planted({case.path: case.text}):
        if case.record.killers:
            outcome = calls.pytest("-x", *case.record.killers, limit_seconds=limit)
            if outcome.failed or outcome.stopped:
                return results.KILLERS, outcome.killer
            if not outcome.passed:
                # The mutant dies, but for another reason than the harm that the record names.
                return results.FOLDER_TESTS, outcome.killer
        tests = mirrored.tests_of(case.path, calls.copy.folder)
        if not tests:
            return results.FOLDER_TESTS, ""
        outcome = calls.pytest("-x", *SELECTED, *tests, limit_seconds=_FOLDER_LIMIT_SECONDS)
        return results.FOLDER_TESTS, "" if outcome.passed else outcome.killer
