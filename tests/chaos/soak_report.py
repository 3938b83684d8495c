"""A soak's report in Markdown, and the problems that the soak found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.chaos.soak import Outcome

#: Accuracy may be lower by this much than without faults; before LEARNED_MINUTES the model still
#: learns so fast that two runs without faults may differ by more.
MOST_ACCURACY_LOST, MOST_ACCURACY_LOST_EARLY = 0.01, 0.05
LEARNED_MINUTES = 10.0
#: No update for longer than this, and something was stuck.
MOST_PAUSE_SECONDS = 90.0


def write(outcome: Outcome) -> tuple[str, list[str]]:
    """Return (the report, its problems)."""
    wrong = list(_wrong(outcome))
    lines = [
        f"# Soak of {outcome.minutes:g} minutes, seed {outcome.seed}",
        "",
        f"`{' '.join(outcome.flags)}`",
        "",
        *(f"- **wrong**: {each}" for each in wrong),
        *([] if wrong else ["Nothing is wrong."]),
        "",
        *_figures(outcome),
        "",
        "| fault | times |",
        "|---|---|",
        *(f"| {what} | {count} |" for what, count in sorted(outcome.counts.items())),
        f"| all | {sum(outcome.counts.values())} |",
        "",
        "| process | lived s | MiB | MiB/h | files | threads | |",
        "|---|---|---|---|---|---|---|",
        *_lives(outcome),
        "",
        "Medians of the first quarter of a life after its warm-up, and of its last. Lives too "
        "short to be judged are in brackets.",
        "",
    ]
    return "\n".join(lines), wrong


def _figures(outcome: Outcome) -> Iterator[str]:
    summary = outcome.summary
    if summary:
        membership = summary["membership"]
        yield f"- updates: {summary['updates']}, lost: {membership['lost_updates']}"
        yield f"- membership: {membership}"
        yield f"- refused pushes: {summary['rejected_pushes']}"
        yield f"- refused peers: {summary.get('refused_peers', {})}"
        yield f"- exit codes: {outcome.codes}"
    peace = "none" if outcome.quiet_accuracy is None else f"{outcome.quiet_accuracy:.4f}"
    yield f"- accuracy: {outcome.accuracy:.4f}, in peace: {peace}"
    yield f"- longest time without an update: {outcome.longest_pause_seconds:.0f} s"
    yield (
        f"- shards killed and judged: {outcome.kills}; snapshots of living shards that equal a "
        f"replay: {outcome.compared}"
    )


def _lives(outcome: Outcome) -> Iterator[str]:
    for each in sorted(outcome.growths, key=lambda growth: (growth.name, -growth.seconds)):
        name = each.name if each.judged else f"({each.name})"
        pairs = (f"{a:.0f} -> {b:.0f}" for a, b in (each.mib, each.files, each.threads))
        mib, files, threads = pairs
        flat = "" if each.is_flat or not each.judged else "**grows**"
        yield (
            f"| {name} | {each.seconds:.0f} | {mib} | {each.mib_per_hour:+.0f} | {files} "
            f"| {threads} | {flat} |"
        )


def _wrong(outcome: Outcome) -> Iterator[str]:
    yield from outcome.failures
    if not outcome.summary:
        yield "the run did not end"
    elif outcome.summary["membership"]["lost_updates"]:
        yield f"{outcome.summary['membership']['lost_updates']} updates are lost"
    for each in outcome.growths:
        if each.judged and not each.is_flat:
            yield f"{each.name} grows: {each.mib} MiB, {each.files} files, {each.threads} threads"
    if not any(each.judged for each in outcome.growths):
        yield "no process lived long enough to tell whether it grows"
    if outcome.longest_pause_seconds > MOST_PAUSE_SECONDS:
        yield f"no update for {outcome.longest_pause_seconds:.0f} s"
    quiet = outcome.quiet_accuracy
    early = outcome.minutes < LEARNED_MINUTES
    most_lost = MOST_ACCURACY_LOST_EARLY if early else MOST_ACCURACY_LOST
    if quiet is not None and not outcome.accuracy >= quiet - most_lost:
        yield f"accuracy {outcome.accuracy:.4f}, in peace {quiet:.4f}"
