"""The peers' tables: every contender over every link, and Thinwire's best against the peers'."""

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
Rates and bytes are medians over all rounds (least to most), without the first seconds of a run. \
Bytes are counted on one worker's link per mini-batch of the worker, headers included. Seconds \
count from the first step's end; megabytes are the total of all workers, both ways. Each contender \
writes snapshots of the model at an interval; they are evaluated after the run. The learning rate \
is the one that reaches the highest target first without a limit. A figure with "c" is computed: \
the steps that the contender needed without a limit, at the rate and bytes measured over the link.
"""


def _names(known: Known, link: str) -> list[Contender]:
    return [contender for name, contender in CONTENDERS.items() if known.runs(name, link)]


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
    """Return the table's cells; the first row is the head."""
    known = Known(records, targets)
    head = ["link", "contender", "lr", "runs", "samples/s", "spread", "B up/step", "B down/step"]
    for target in targets:
        head += [f"s to {subject.text(target)}", f"MB to {subject.text(target)}"]
    table = [head]
    for link in links:
        for contender in _names(known, link):
            table.append(_line(known, contender.name, link, targets))
    return table


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


def _both(point: curves.CurvePoint) -> float | None:
    if point.bytes_up is None or point.bytes_down is None:
        return None
    return point.bytes_up + point.bytes_down


def failures(records: Iterable[Record]) -> list[str]:
    """Return a line for each run that failed, diverged, or needed a second attempt."""
    lines = []
    for record in records:
        where = f"{record['contender']}, link {record['link']}, lr {record['learning_rate']:g}"
        if record.get("left_out"):
            continue
        if record.get("diverged"):
            lines.append(f"{where}: diverged")
        elif not record["ok"]:
            lines.append(f"{where}: failed: {record['error']}")
        elif record.get("attempts", 1) > 1:
            lines.append(f"{where}: worked at attempt {record['attempts']}: {record['error']}")
    return lines


def document(
    subject: PeerTable,
    records: list[Record],
    links: Sequence[str],
    targets: Sequence[float],
    workers: int = 2,
) -> str:
    """Return the tables with their notes as Markdown."""
    parts = [
        f"{subject.about.format(workers=workers)} {_NOTES}",
        markdown(cells(subject, records, links, targets)),
        "Thinwire against the peers:\n",
        rows_document(list(rows(subject, records, links, targets))),
    ]
    parts.append(_circumstances(records))
    if troubles := failures(records):
        parts.append(
            "Troubles:\n\n" + "".join(f"- {' '.join(line.split())[:300]}\n" for line in troubles)
        )
    return "\n".join(parts)


def _circumstances(records: Sequence[Record]) -> str:
    """Return a line with the commits of the runs and the highest load before a run."""
    loads = [record["load_before"] for record in records if "load_before" in record]
    commits = sorted({record.get("commit", "unknown") for record in records if record["ok"]})
    load = f"Load before a run: {max(loads, default=0.0):.1f} at most."
    return f"{load} Commit {', '.join(commits)}.\n"


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


# -- Thinwire against the peers -----------------------------------------------------------------


def rows(
    subject: PeerTable, records: list[Record], links: Iterable[str], targets: Sequence[float]
) -> Iterator[Row]:
    """Yield the rows that compare Thinwire with the peers, for links with runs of both sides."""
    known = Known(records, targets)
    for link in links:
        present = _names(known, link)
        ours = [contender for contender in present if contender.sort == "ours"]
        peers = [contender for contender in present if contender.sort != "ours"]
        if ours and peers:
            yield from _rate_rows(known, link, ours, peers)
            # Learning rates are chosen by the highest target, so only this target has a goal.
            for target in targets:
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
        timed = [contender for contender in group if speeds(contender)]
        return max(timed, key=lambda each: statistics.median(speeds(each)), default=None)

    def row(mine: Contender | None, theirs: Contender | None, goal: float | None) -> Iterator[Row]:
        if mine is None or theirs is None:
            return
        ours_rates, peer_rates = speeds(mine), speeds(theirs)
        name = f"{mine.name} / {theirs.name}, samples/s, {_over(link)}"
        middle, limit = statistics.median(ours_rates), statistics.median(peer_rates)
        yield Row(
            name,
            middle,
            "samples/s",
            limit,
            middle / limit,
            goal,
            "higher",
            spread=f"{min(ours_rates):,.0f} to {max(ours_rates):,.0f}; "
            f"{min(peer_rates):,.0f} to {max(peer_rates):,.0f}",
        )

    if link == NO_LIMIT:
        dense = fastest(contender for contender in ours if contender.dense)
        for peer in peers:
            if peer.sort != "federated":  # a federated client exchanges once in many steps
                yield from row(dense, peer, 1.0)
        return
    sparse = fastest(
        contender
        for contender in ours
        if not contender.dense and "local steps" not in contender.name
    )
    servers = fastest(contender for contender in peers if contender.sort == "parameter server")
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
    """Yield two rows, in seconds and in bytes: Thinwire's best against the best peer."""
    target, text = named_target

    def best(group: list[Contender], bytes_too: bool) -> tuple[float, str, bool] | None:
        costs = []
        for contender in group:
            cost = known.cost(contender.name, link, target)
            if cost is not None:
                value = _both(cost[0]) if bytes_too else cost[0].seconds
                if value is not None:
                    costs.append((value, contender.name, cost[1]))
        return min(costs, default=None)

    for bytes_too, unit in ((False, "s"), (True, "MB")):
        best_ours, best_peer = best(ours, bytes_too), best(peers, bytes_too)
        if best_ours is None or best_peer is None:
            continue
        scale = 1e6 if bytes_too else 1.0
        note = "; ".join(
            f"{name}{' (computed)' if c else ''}" for _, name, c in (best_ours, best_peer)
        )
        what = "bytes" if bytes_too else "seconds"
        name = f"{what} to {text}, best of ours / best peer, {_over(link)}"
        yield Row(
            name,
            best_ours[0] / scale,
            unit,
            best_peer[0] / scale,
            best_ours[0] / best_peer[0],
            goal,
            "lower",
            note,
        )


def _over(link: str) -> str:
    return "no limit" if link == NO_LIMIT else f"{link} Mbit/s"
