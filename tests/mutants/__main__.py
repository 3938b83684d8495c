"""``python -m tests.mutants``: run the recorded mutants, or mutants drawn by a seed.

    python -m tests.mutants --jobs 2
    python -m tests.mutants --only ssp-returning-worker-holds-everybody
    python -m tests.mutants --drawn 300 --seed 1

Results are stored in runs/mutants, and a stored mutant does not run again; --fresh clears them.
The exit code is 1 if a mutant survives or a record is wrong.
"""

from __future__ import annotations

import argparse
import signal
import sys

from tests.mutants import drawn, drawn_run, records, report, results, runner
from tests.mutants.records import InvalidRecords
from tests.mutants.runner import UselessKillers


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    add = parser.add_argument
    add("--jobs", type=int, default=2, help="copies of the tree that are used at the same time")
    add("--fresh", action="store_true", help="forget the results of former runs")
    add("--drafts", action="store_true", help="allow records without killers, to look for some")
    add("--only", action="append", metavar="NAME_OR_AREA", help="run these; may be repeated")
    add("--drawn", type=int, metavar="NUMBER", help="run so many drawn mutants, no recorded ones")
    add("--seed", type=int, default=1, help="draws others")
    add("--no-suite", action="store_true", help="drawn: try only the tests that execute the line")
    add("--no-map", action="store_true", help="drawn: choose tests by folder and import alone")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # copies are removed at both signals
    try:
        return _run_records(options) if options.drawn is None else _run_drawn(options)
    except (InvalidRecords, UselessKillers) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command continues the run\n")
        return 130


def _run_records(options: argparse.Namespace) -> int:
    known = records.read(drafts=options.drafts)
    chosen = [
        record
        for record in known
        if not options.only or {record.name, record.area} & set(options.only)
    ]
    if not chosen:
        raise InvalidRecords(f"no record is named {', '.join(options.only)}")
    past = results.Results(results.FOLDER / "results.jsonl", options.fresh)
    ended = runner.run(chosen, past, options.jobs)
    failures = report.failures(chosen, ended)
    sys.stdout.write(f"{report.of_records(chosen, ended)}\n")
    sys.stdout.write("".join(f"{failure}\n" for failure in failures))
    return 1 if failures else 0


def _run_drawn(options: argparse.Namespace) -> int:
    mutants = drawn.draw(options.drawn, options.seed)
    past = results.Results(results.FOLDER / "drawn.jsonl", options.fresh)
    ended = drawn_run.run(
        mutants,
        past,
        options.jobs,
        with_suite=not options.no_suite,
        with_map=not options.no_map,
    )
    sys.stdout.write(f"{drawn_run.summary(mutants, ended)}\n")
    return int(any(result.stage == results.SURVIVED for result in ended))


if __name__ == "__main__":
    sys.exit(main())
