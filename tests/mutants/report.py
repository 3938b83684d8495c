"""The table of mutant results, and the problems in the results."""

from __future__ import annotations

from collections.abc import Sequence

from tests.mutants import results
from tests.mutants.records import AREAS, Record
from tests.mutants.results import Result


def table(ended: Sequence[Result], areas: Sequence[str], stages: Sequence[str]) -> str:
    """Return a line for each area: mutants, how many died at each stage, survivors, seconds."""
    head = f"{'area':16}{'mutants':>9}" + "".join(f"{stage:>11}" for stage in stages)
    lines = [f"{head}{'seconds':>9}"]
    for area in (*areas, "all"):
        of_area = [result for result in ended if area in (result.area, "all")]
        counts = [sum(result.stage == stage for result in of_area) for stage in stages]
        columns = "".join(f"{count:11}" for count in counts)
        seconds = sum(result.seconds for result in of_area)
        lines.append(f"{area:16}{len(of_area):9}{columns}{seconds:9.0f}")
    return "\n".join(lines)


def failures(chosen: Sequence[Record], ended: Sequence[Result]) -> list[str]:
    """Return a sentence for each record that its killers did not kill."""
    by_name = {result.name: result for result in ended}
    sentences = []
    for record in chosen:
        result = by_name.get(record.name)
        if result is None:
            sentences.append(f"{record.name}: it has not been run")
        elif result.stage == results.SURVIVED:
            sentences.append(f"{record.name} SURVIVED. {record.harm}")
        elif result.stage != results.KILLERS:
            sentences.append(
                f"{record.name}: its killers spare it, but {result.killer} fails: correct `killers`"
            )
    return sentences


def of_records(chosen: Sequence[Record], ended: Sequence[Result]) -> str:
    """Return the table of the recorded mutants."""
    areas = [area for area in AREAS if any(record.area == area for record in chosen)]
    stages = (results.KILLERS, results.FOLDER_TESTS, results.SUITE, results.SURVIVED)
    timeouts = sum(result.killer == "timeout" for result in ended)
    return f"{table(ended, areas, stages)}\nkilled by the time limit: {timeouts}"
