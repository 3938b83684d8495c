"""The peers' table: every contender over every link, and ours against theirs."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Iterator, Sequence

from bench.origin import markdown
from bench.peers import curves
from bench.peers.contenders import CONTENDERS, Contender
from bench.peers.plan import NO_LIMIT, Known, Record
from bench.peers.subjects import PeerTable
from bench.table import Row

_COMPUTED = "c"
_NOTES = """\
Rates and bytes are medians of a run without its first seconds, over all rounds (least to most); \
bytes are those of a worker's link for each of its mini-batches, headers included. Seconds count \
from the first step that was done; megabytes are those of all workers, both ways. The model is \
kept at an interval by each contender and evaluated after the run. Without a limit the learning \
rate was chosen that is first at the highest target. A figure with "c" is computed: the steps \
that the contender needed without a limit, at the rate and bytes measured over the link.
"""


def _names(known: Known, link: str) -> list[Contender]:
    return [each for name, each in CONTENDERS.items() if known.runs(name, link)]


def _count(value: float | None, scale: float = 1.0) -> str:
    return (
        "-"
        if value is None
        else f"{value / scale:,.3g}"
        if value < 100 * scale
        else (f"{value / scale:,.0f}")
    )


def cells(
    subject: PeerTable, records: list[Record], links: Iterable[str], targets: Sequence[float]
) -> list[list[str]]:
    """Return the table, its head first."""
    known = Known(records, targets)
    head = ["link", "contender", "lr", "runs", "samples/s", "spread", "B up/step", "B down/step"]
    for target in targets:
        head += [f"s to {subject.text(target)}", f"MB to {subject.text(target)}"]
    found = [head]
    for link in links:
        for contender in _names(known, link):
            found.append(_line(known, contender.name, link, targets))
    return found


def _line(known: Known, name: str, link: str, targets: Sequence[float]) -> list[str]:
    rate = known.best_rate(name)
    runs = known.runs(name, link, rate)
    if not runs:
        return [link, name, "-", "0", *["-"] * (4 + 2 * len(targets))]
    speeds = [run["samples_per_second"] for run in runs]
    warm = known.rates(runs)
    emulated = " (emulated)" if any(run.get("emulated") for run in runs) else ""
    line = [
        link + emulated,
        name,
        f"{runs[0]['learning_rate']:g}",
        str(len(runs)),
        _count(statistics.median(speeds)),
        f"{_count(min(speeds))} to {_count(max(speeds))}",
        _count(warm.bytes_up),
        _count(warm.bytes_down),
    ]
    for target in targets:
        cost = known.cost(name, link, target)
        if cost is None:
            line += ["not reached", "-"]
            continue
        point, is_computed = cost
        mark = f" {_COMPUTED}" if is_computed else ""
        line += [_count(point.seconds) + mark, _count(_both(point), 1e6) + mark]
    return line


def _both(point: curves.Point) -> float | None:
    if point.bytes_up is None or point.bytes_down is None:
        return None
    return point.bytes_up + point.bytes_down


def failures(records: Iterable[Record]) -> list[str]:
    """Return a line for each run that failed, or that needed a second attempt."""
    found = []
    for record in records:
        where = f"{record['contender']}, link {record['link']}, lr {record['learning_rate']:g}"
        if record.get("left_out"):
            continue
        if record.get("diverged"):
            found.append(f"{where}: diverged")
        elif not record["ok"]:
            found.append(f"{where}: failed: {record['error']}")
        elif record.get("attempts", 1) > 1:
            found.append(f"{where}: worked at attempt {record['attempts']}: {record['error']}")
    return found


def document(
    subject: PeerTable,
    records: list[Record],
    links: Sequence[str],
    targets: Sequence[float],
    workers: int = 2,
) -> str:
    """Return the tables as Markdown."""
    parts = [
        f"{subject.about.format(workers=workers)} {_NOTES}",
        markdown(cells(subject, records, links, targets)),
        "Ours against theirs:\n",
        rows_document(list(rows(subject, records, links, targets))),
    ]
    parts.append(_circumstances(records))
    if troubles := failures(records):
        parts.append(
            "Troubles:\n\n" + "".join(f"- {' '.join(line.split())[:300]}\n" for line in troubles)
        )
    return "\n".join(parts)


def _circumstances(records: Sequence[Record]) -> str:
    """Return what the runs were of, and how busy the machine was before each."""
    loads = [record["load_before"] for record in records if "load_before" in record]
    commits = sorted({record.get("commit", "unknown") for record in records if record["ok"]})
    load = f"Load before a run: {max(loads, default=0.0):.1f} at most."
    return f"{load} Of commit {', '.join(commits)}.\n"


def rows_document(found: Sequence[Row]) -> str:
    """Return rows as a Markdown table."""
    return markdown([Row.HEAD, *(row.cells() for row in found)])


def sheet(
    subject: PeerTable, records: list[Record], links: Sequence[str], targets: Sequence[float]
) -> str:
    """Return the table as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(cells(subject, records, links, targets))
    return text.getvalue()


# -- ours against theirs ------------------------------------------------------------------------


def rows(
    subject: PeerTable, records: list[Record], links: Iterable[str], targets: Sequence[float]
) -> Iterator[Row]:
    """Yield ours against the peers', as far as there are runs of both."""
    known = Known(records, targets)
    for link in links:
        present = _names(known, link)
        ours = [each for each in present if each.sort == "ours"]
        peers = [each for each in present if each.sort != "ours"]
        if ours and peers:
            yield from _rate_rows(known, link, ours, peers)
            for target in targets:  # the goal is of the highest, by which rates are chosen
                goal = subject.goals.get(link, 1.0) if target == max(targets) else None
                yield from _cost_rows(
                    known, link, (target, subject.text(target)), goal, ours, peers
                )


def _rate_rows(
    known: Known, link: str, ours: list[Contender], peers: list[Contender]
) -> Iterator[Row]:
    def speeds(contender: Contender) -> list[float]:
        runs = known.runs(contender.name, link, known.best_rate(contender.name))
        return [run["samples_per_second"] for run in runs]

    def fastest(group: Iterable[Contender]) -> Contender | None:
        timed = [each for each in group if speeds(each)]
        return max(timed, key=lambda each: statistics.median(speeds(each)), default=None)

    def row(mine: Contender | None, theirs: Contender | None, goal: float | None) -> Iterator[Row]:
        if mine is None or theirs is None:
            return
        own, other = speeds(mine), speeds(theirs)
        name = f"{mine.name} / {theirs.name}, samples/s, {_over(link)}"
        middle, limit = statistics.median(own), statistics.median(other)
        yield Row(
            name,
            middle,
            "samples/s",
            limit,
            middle / limit,
            goal,
            "higher",
            spread=f"{min(own):,.0f} to {max(own):,.0f}; {min(other):,.0f} to {max(other):,.0f}",
        )

    if link == NO_LIMIT:
        dense = fastest(each for each in ours if each.dense)
        for peer in peers:
            if peer.sort != "federated":  # a client there exchanges once in many steps
                yield from row(dense, peer, 1.0)
        return
    sparse = fastest(each for each in ours if not each.dense and "local steps" not in each.name)
    servers = fastest(each for each in peers if each.sort == "parameter server")
    goals = {"torch DDP": 5.0, "torch DDP, PowerSGD": 1.0}
    yield from row(sparse, servers, 8.0)
    for peer in peers:
        if peer.name in goals:
            yield from row(sparse, peer, goals[peer.name])


def _cost_rows(
    known: Known,
    link: str,
    named_target: tuple[float, str],
    goal: float | None,
    ours: list[Contender],
    peers: list[Contender],
) -> Iterator[Row]:
    """Yield the best of ours against the best of the peers, in seconds and in bytes."""
    target, text = named_target

    def best(group: list[Contender], bytes_too: bool) -> tuple[float, str, bool] | None:
        found = []
        for each in group:
            cost = known.cost(each.name, link, target)
            if cost is not None:
                value = _both(cost[0]) if bytes_too else cost[0].seconds
                if value is not None:
                    found.append((value, each.name, cost[1]))
        return min(found, default=None)

    for bytes_too, unit in ((False, "s"), (True, "MB")):
        mine, theirs = best(ours, bytes_too), best(peers, bytes_too)
        if mine is None or theirs is None:
            continue
        scale = 1e6 if bytes_too else 1.0
        note = "; ".join(f"{name}{' (computed)' if c else ''}" for _, name, c in (mine, theirs))
        what = "bytes" if bytes_too else "seconds"
        name = f"{what} to {text}, best of ours / best peer, {_over(link)}"
        yield Row(
            name, mine[0] / scale, unit, theirs[0] / scale, mine[0] / theirs[0], goal, "lower", note
        )


def _over(link: str) -> str:
    return "no limit" if link == NO_LIMIT else f"{link} Mbit/s"
