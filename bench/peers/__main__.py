"""Compare Thinwire with the peers: train the same model alternately, over links of several rates.

    python -m bench.peers --link none 100 10 --lr 0.01 0.03 0.1 --seconds 60 --target 0.80 0.85

Run ``bench/peers/setup.sh`` once before. As root, every node runs in its own network namespace.
Without root all nodes run on loopback without a rate limit, limited links are run by Thinwire alone
with its emulated links, and bytes are not counted. Every run is appended to a file of records when
it ends. ``--resume FILE`` continues a file of records; with ``--seconds 0`` the program only prints
the table. The exit code is 1 if a run failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import origin
from bench.peers import plan, report, work
from bench.peers.contenders import CONTENDERS, ENVIRONMENTS, OURS, ROOT, over_emulated_link
from bench.peers.evaluating import evaluator
from bench.peers.lab import Lab, namespaces, this_machine, why_not
from bench.peers.running import PeerDiverged, PeerFailed, run
from bench.peers.subjects import SUBJECTS, PeerTable
from bench.table import Row

_ATTEMPTS = 2  # of a run that fails
_TEXT = sysconfig.get_path("stdlib")  # all processes read the library of this Python
#: Parts of names of contenders that the short table (`rows`) omits, because no goal refers to them.
_LEFT_OUT = ("local", "thinwire gd", "thinwire dgc", "thinwire torch")
_WORKERS, _MOMENTUM, _SEED = 2, 0.9, 1
_CNN = SUBJECTS[work.MNIST_CNN]


class Harness:
    """Executes the runs of a table and appends their records to a file.

    Args:
        settings: Settings of the table.
        path: File of records, one JSON object per line. Runs that it records are not repeated.
        log: Function that writes one log line.
        commit: Commit that is measured; stored in every record.
    """

    def __init__(
        self,
        settings: plan.Settings,
        path: Path,
        log: Callable[[str], object],
        commit: str = "unknown",
    ) -> None:
        self.settings, self._path, self._log, self._commit = settings, path, log, commit
        self.records = read_records(path)
        self._obstacle = why_not()
        self._evaluate: Callable[[Path], float] | None = None

    def measure(self) -> None:
        """Execute the runs that have no record yet."""
        if self._obstacle:
            self._log(
                f"no network namespaces ({self._obstacle}): on limited links only Thinwire runs, "
                "over emulated links, and bytes are not counted"
            )
        minutes = plan.estimated_seconds(self.settings, self.records) / 60
        self._log(
            f"about {minutes:.0f} min for {len(self.settings.names)} contenders; "
            f"records: {self._path}"
        )
        for planned in plan.pending(self.settings, self.records):
            if self._obstacle and planned.link != plan.NO_LIMIT and planned.contender not in OURS:
                record = plan.record_of(planned, None, left_out=True, error=self._obstacle)
            else:
                record = self._measured(planned)
                with open(self._path, "a") as file:
                    file.write(json.dumps(record) + "\n")
            self.records.append(record)

    def _measured(self, wanted: plan.PlannedRun) -> plan.Record:
        """Execute a run, and repeat it if it fails; return its record."""
        result, errors, attempts, diverged = None, "", 0, False
        began, load = time.monotonic(), os.getloadavg()[0]
        while result is None and not diverged and attempts < _ATTEMPTS:
            attempts += 1
            try:
                result = self._run(wanted)
            except PeerFailed as error:
                errors, diverged = _without_paths(str(error)), isinstance(error, PeerDiverged)
                self._log(f"{wanted.contender}, attempt {attempts}: {errors[-600:]}")
        if result is not None:
            self._log(
                f"{wanted.contender}, {wanted.link}, lr {wanted.learning_rate:g}, round "
                f"{wanted.round}: {result['samples_per_second']:,.0f} samples/s, best "
                f"{_best(wanted.contender, result)}, took {time.monotonic() - began:.0f} s"
            )
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        more = {
            "error": errors,
            "attempts": attempts,
            "ended": now,
            "load_before": round(load, 2),
            "commit": self._commit,
            "emulated": bool(self._obstacle),
            "diverged": diverged,
        }
        return plan.record_of(wanted, result, **more)

    def _run(self, wanted: plan.PlannedRun) -> plan.Record:
        """Execute a run once; return its results.

        Raises:
            PeerFailed: The run failed, or the contender's interpreter is missing.
        """
        contender = CONTENDERS[wanted.contender]
        task = work.Work(
            wanted.seconds,
            0,
            self.settings.workers,
            SUBJECTS[contender.model].batch_size,
            wanted.learning_rate,
            _MOMENTUM,
            _SEED,
            wanted.steps,
            wanted.snapshot_seconds,
            model=contender.model,
            text=_TEXT,
        )
        if self._evaluate is None:
            self._evaluate = evaluator(contender.model, task.text)
        rate = plan.mbps(wanted.link)
        if self._obstacle and rate is not None:
            contender = over_emulated_link(wanted.contender, rate)
        if not contender.python.exists():
            raise PeerFailed(f"no {contender.python}; run bench/peers/setup.sh")
        with self._lab(rate) as lab:
            return run(contender, task, lab, self.settings.targets, self._evaluate)

    @contextlib.contextmanager
    def _lab(self, rate: float | None) -> Iterator[Lab]:
        workers = self.settings.workers
        manager = this_machine(workers) if self._obstacle else namespaces(workers, rate)
        with manager as lab:
            yield lab


def read_records(path: Path) -> list[plan.Record]:
    """Return the records of a file, without failed runs and incomplete lines."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if record["ok"] or record.get("diverged"):
                records.append(record)
    return records


def _best(name: str, found: plan.Record) -> str:
    """Return the best score of a run as text."""
    scores = [point["score"] for point in found["curve"]]
    return SUBJECTS[CONTENDERS[name].model].text(max(scores)) if scores else "unknown"


def _without_paths(text: str) -> str:
    """Return a message without the machine's folder names, so that records are portable."""
    for folder in (ROOT, Path(sys.prefix).parent):
        text = text.replace(f"{folder}/", "")
    return text


def peer_versions() -> dict[str, str]:
    """Return the versions of the packages in the peers' environments."""
    versions = {}
    for stamp in sorted(ENVIRONMENTS.glob("*/.complete")):
        for package in stamp.read_text().split():
            name, _, version = package.partition("==")
            if name != "numpy":
                versions[name] = version
    return versions


def rows(seconds: float, rounds: int) -> list[Row]:
    """Measure the contenders that exchange at every step; return their rows.

    The links have no limit or 100 Mbit/s, and there is one learning rate.
    """
    contenders = {
        name: contender
        for name, contender in CONTENDERS.items()
        if contender.model == _CNN.model and not any(word in name for word in _LEFT_OUT)
    }
    names = [name for name, contender in contenders.items() if contender.python.exists()]
    if missing := sorted(contenders.keys() - set(names)):
        _log(f"not installed, omitted: {', '.join(missing)}; run bench/peers/setup.sh")
    table = settings(names, ["none", "100"], [0.01], rounds, seconds, seconds, _CNN.targets)
    path = origin.RESULTS / f"{datetime.date.today()}-bench-peers.jsonl"
    origin.RESULTS.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)  # an older file's records must not mix with these
    harness = Harness(table, path, _log, origin.commit(origin.facts()))
    harness.measure()
    return list(report.rows(_CNN, harness.records, table.links, table.targets))


def rows_of(path: Path) -> list[Row]:
    """Return the rows that compare Thinwire with the peers, from the records in a file."""
    records = read_records(path)
    links = dict.fromkeys(record["link"] for record in records)
    return list(report.rows(_CNN, records, links, _CNN.targets))


def settings(
    names: Sequence[str],
    links: Sequence[str],
    rates: Sequence[float],
    rounds: int,
    seconds: float,
    most_seconds: float,
    targets: Sequence[float],
    workers: int = _WORKERS,
    snapshot_seconds: float = _CNN.snapshot_seconds,
) -> plan.Settings:
    """Return the settings of a table of the named contenders."""
    chosen = [CONTENDERS[name] for name in names]
    dense = frozenset(contender.name for contender in chosen if contender.dense)
    round_steps = {e.name: e.round_steps for e in chosen if e.round_steps and e.sort != "ours"}
    return plan.Settings(
        *(names, dense, links, rates, rounds, seconds, most_seconds, targets),
        *(workers, round_steps, snapshot_seconds),
    )


def _log(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = options.add_argument
    add("--model", choices=list(SUBJECTS), default=work.MNIST_CNN, help="model to train")
    add("--link", nargs="+", help="rates of each worker's link: none, or Mbit/s")
    add("--lr", nargs="+", type=float, help="learning rates to try")
    add("--seconds", type=float, help="length of a run over unlimited links; 0: no run")
    add("--most_seconds", type=float, help="maximum length of a run over a limited link")
    add("--target", nargs="+", type=float, help="test accuracies; for the decoder, losses")
    add("--workers", type=int, default=_WORKERS, help="number of workers")
    add("--snapshot_seconds", type=float, help="minimum time between two snapshots of the model")
    add("--rounds", type=int, help="runs of each contender over each link")
    add("--only", nargs="+", default=[""], help="contenders whose names contain one of these")
    add("--without", nargs="+", default=[], help="omit names that contain one of these")
    add("--resume", type=Path, help="file of records to continue")
    return options


def _chosen(arguments: argparse.Namespace) -> list[str]:
    return [
        name
        for name, contender in CONTENDERS.items()
        if contender.model == arguments.model
        and any(part in name for part in arguments.only)
        and not any(part in name for part in arguments.without)
    ]


def main() -> int:
    options = _options()
    arguments = options.parse_args()
    subject = SUBJECTS[arguments.model]
    if not (names := _chosen(arguments)):
        options.error(f"no contender matches; the contenders are: {', '.join(CONTENDERS)}")
    links = arguments.link or subject.links
    if bad := [link for link in links if link != "none" and not _is_rate(link)]:
        options.error(f"--link {bad[0]}: expected none or a number of Mbit/s above 0")
    if subject is _CNN and not work.full_set_is_installed():
        _log("Fashion-MNIST is not installed: all contenders train on the shipped sample")
    facts = origin.facts(peer_versions())
    origin.RESULTS.mkdir(exist_ok=True)
    stem = subject.stem
    if arguments.workers != _WORKERS:
        stem += f"-{arguments.workers}-workers"
    path = arguments.resume or origin.RESULTS / f"{facts['date'][:10]}-{stem}.jsonl"
    if arguments.resume is None and path.exists():
        options.error(f"{path} exists: --resume it, or move it away")
    seconds = subject.seconds if arguments.seconds is None else arguments.seconds
    table = settings(
        names,
        links,
        arguments.lr or subject.learning_rates,
        arguments.rounds or subject.rounds,
        seconds,
        arguments.most_seconds or subject.most_seconds,
        subject.scores(arguments.target or subject.targets),
        arguments.workers,
        arguments.snapshot_seconds or subject.snapshot_seconds,
    )
    harness = Harness(table, path, _log, origin.commit(facts))
    # Exit by SystemExit, so that context managers end the run's processes and namespaces.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if seconds > 0:
            harness.measure()
    finally:
        _write(harness, subject, facts, path.parent, stem)
    fine = ("ok", "left_out", "diverged")
    return 0 if all(any(map(record.get, fine)) for record in harness.records) else 1


def _is_rate(link: str) -> bool:
    try:
        return float(link) > 0
    except ValueError:
        return False


def _write(
    harness: Harness, subject: PeerTable, found: dict[str, Any], folder: Path, stem: str
) -> None:
    """Write the tables of all records to the records' folder, and print them."""
    table, records = harness.settings, harness.records
    text = report.document(subject, records, table.links, table.targets, table.workers)
    body = f"# Peers on the same work\n\n{origin.describe(found)}\n\n{text}"
    sheet = report.sheet(subject, records, table.links, table.targets)
    paths = origin.write(stem, found, {"md": body, "csv": sheet}, folder)
    sys.stdout.write(f"{body}\nwritten: {', '.join(map(str, paths))}\n")


if __name__ == "__main__":
    sys.exit(main())
