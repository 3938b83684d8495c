"""Ours and the peers on the same work, in turn, over links of several rates.

    python -m bench.peers --link none 100 10 --lr 0.01 0.03 0.1 --seconds 60 --target 0.80 0.85

Run ``bench/peers/setup.sh`` once before. Root gives every node a network namespace; without it all
run on loopback without a limit, ours alone over links that it emulates, and bytes are not counted.
Every run is appended to a file as it ends; ``--resume FILE`` goes on with it, and with
``--seconds 0`` only prints its table. Ends with 1 if a run failed.
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

_ATTEMPTS = 2
#: In the short table: no goal is of these.
_TEXT = sysconfig.get_path("stdlib")  # every process reads this Python's
_LEFT_OUT = ("local", "thinwire gd", "thinwire dgc")
_WORKERS, _MOMENTUM, _SEED = 2, 0.9, 1
_CNN = SUBJECTS[work.MNIST_CNN]


class Harness:
    """Makes the runs of a table and keeps their records in a file.

    Args:
        settings: The table.
        path: Records, one JSON object a line; those that are there are not made again.
        log: Takes lines for people.
        commit: What is measured; kept with every record.
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
        """Make the runs that are left."""
        if self._obstacle:
            self._log(
                f"no network namespaces ({self._obstacle}): ours alone over emulated links, "
                "and bytes are not counted"
            )
        minutes = plan.estimated_seconds(self.settings, self.records) / 60
        self._log(
            f"about {minutes:.0f} min for {len(self.settings.names)} contenders; "
            f"records: {self._path}"
        )
        for wanted in plan.pending(self.settings, self.records):
            if self._obstacle and wanted.link != plan.NO_LIMIT and wanted.contender not in OURS:
                record = plan.record_of(wanted, None, left_out=True, error=self._obstacle)
            else:
                record = self._measured(wanted)
                with open(self._path, "a") as file:
                    file.write(json.dumps(record) + "\n")
            self.records.append(record)

    def _measured(self, wanted: plan.PlannedRun) -> plan.Record:
        """Make a run, again if it fails; return its record."""
        found, errors, attempts, diverged = None, "", 0, False
        began, load = time.monotonic(), os.getloadavg()[0]
        while found is None and not diverged and attempts < _ATTEMPTS:
            attempts += 1
            try:
                found = self._run(wanted)
            except PeerFailed as error:
                errors, diverged = _without_paths(str(error)), isinstance(error, PeerDiverged)
                self._log(f"{wanted.contender}, attempt {attempts}: {errors[-600:]}")
        if found is not None:
            self._log(
                f"{wanted.contender}, {wanted.link}, lr {wanted.learning_rate:g}, round "
                f"{wanted.round}: {found['samples_per_second']:,.0f} samples/s, best "
                f"{_best(wanted.contender, found)}, took {time.monotonic() - began:.0f} s"
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
        return plan.record_of(wanted, found, **more)

    def _run(self, wanted: plan.PlannedRun) -> plan.Record:
        """Make a run.

        Raises:
            PeerFailed: It did not work.
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
        made = this_machine(workers) if self._obstacle else namespaces(workers, rate)
        with made as lab:
            yield lab


def read_records(path: Path) -> list[plan.Record]:
    """Return the runs of a file of records but failed ones; an interrupted one is half a line."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if record["ok"] or record.get("diverged"):
                found.append(record)
    return found


def _best(name: str, found: plan.Record) -> str:
    """Return the best score of a run as people write it."""
    scores = [point["score"] for point in found["curve"]]
    return SUBJECTS[CONTENDERS[name].model].text(max(scores)) if scores else "unknown"


def _without_paths(text: str) -> str:
    """Return a message as it would be anywhere: no folder of this machine in it."""
    for folder in (ROOT, Path(sys.prefix).parent):
        text = text.replace(f"{folder}/", "")
    return text


def peer_versions() -> dict[str, str]:
    """Return the versions of the packages in the peers' environments."""
    found = {}
    for stamp in sorted(ENVIRONMENTS.glob("*/.complete")):
        for package in stamp.read_text().split():
            name, _, version = package.partition("==")
            if name != "numpy":
                found[name] = version
    return found


def rows(seconds: float, rounds: int) -> list[Row]:
    """Measure who exchanges at every step, without a limit and at 100 Mbit/s, with one rate."""
    wanted = {
        name: each
        for name, each in CONTENDERS.items()
        if each.model == _CNN.model and not any(word in name for word in _LEFT_OUT)
    }
    names = [name for name, each in wanted.items() if each.python.exists()]
    if missing := sorted(wanted.keys() - set(names)):
        _log(f"not installed, left out: {', '.join(missing)}; run bench/peers/setup.sh")
    found = settings(names, ["none", "100"], [0.01], rounds, seconds, seconds, _CNN.targets)
    path = origin.RESULTS / f"{datetime.date.today()}-bench-peers.jsonl"
    origin.RESULTS.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)  # every row is to be of one run
    harness = Harness(found, path, _log, origin.commit(origin.facts()))
    harness.measure()
    return list(report.rows(_CNN, harness.records, found.links, found.targets))


def rows_of(path: Path) -> list[Row]:
    """Return the comparison of ours with theirs from the records of an earlier run."""
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
    """Return a table's settings."""
    chosen = [CONTENDERS[name] for name in names]
    dense = frozenset(each.name for each in chosen if each.dense)
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
    add("--model", choices=list(SUBJECTS), default=work.MNIST_CNN, help="the work")
    add("--link", nargs="+", help="none, or Mbit/s of each worker")
    add("--lr", nargs="+", type=float, help="to choose from")
    add("--seconds", type=float, help="of a run without a limit, from its first step; 0: no run")
    add("--most_seconds", type=float, help="of a run over a link to the top target")
    add("--target", nargs="+", type=float, help="test accuracies; of the decoder losses")
    add("--workers", type=int, default=_WORKERS, help="of each run")
    add("--rounds", type=int, help="of all contenders over all links")
    add("--only", nargs="+", default=[""], help="contenders whose names hold one of these")
    add("--without", nargs="+", default=[], help="and none of these")
    add("--resume", type=Path, help="file of records to go on with")
    return options


def _chosen(arguments: argparse.Namespace) -> list[str]:
    return [
        name
        for name, each in CONTENDERS.items()
        if each.model == arguments.model
        and any(part in name for part in arguments.only)
        and not any(part in name for part in arguments.without)
    ]


def main() -> int:
    options = _options()
    arguments = options.parse_args()
    subject = SUBJECTS[arguments.model]
    if not (names := _chosen(arguments)):
        options.error(f"no such contender; there are: {', '.join(CONTENDERS)}")
    links = arguments.link or subject.links
    if bad := [link for link in links if link != "none" and not _is_rate(link)]:
        options.error(f"--link {bad[0]}: expected none or a number of Mbit/s above 0")
    if subject is _CNN and not work.full_set_is_installed():
        _log("Fashion-MNIST is not installed: all train on the shipped sample")
    found = origin.facts(peer_versions())
    origin.RESULTS.mkdir(exist_ok=True)
    stem = subject.stem
    if arguments.workers != _WORKERS:
        stem += f"-{arguments.workers}-workers"
    path = arguments.resume or origin.RESULTS / f"{found['date'][:10]}-{stem}.jsonl"
    if arguments.resume is None and path.exists():
        options.error(f"{path} exists: --resume it, or move it away")
    seconds = subject.seconds if arguments.seconds is None else arguments.seconds
    wanted = settings(
        names,
        links,
        arguments.lr or subject.learning_rates,
        arguments.rounds or subject.rounds,
        seconds,
        arguments.most_seconds or subject.most_seconds,
        subject.scores(arguments.target or subject.targets),
        arguments.workers,
        subject.snapshot_seconds,
    )
    harness = Harness(wanted, path, _log, origin.commit(found))
    # Whoever ends this ends its processes and namespaces with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if seconds > 0:
            harness.measure()
    finally:
        _write(harness, subject, found, path.parent, stem)
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
    """Write the table of what is known beside the records, and print it."""
    wanted, records = harness.settings, harness.records
    text = report.document(subject, records, wanted.links, wanted.targets, wanted.workers)
    body = f"# Peers on the same work\n\n{origin.describe(found)}\n\n{text}"
    sheet = report.sheet(subject, records, wanted.links, wanted.targets)
    paths = origin.write(stem, found, {"md": body, "csv": sheet}, folder)
    sys.stdout.write(f"{body}\nwritten: {', '.join(map(str, paths))}\n")


if __name__ == "__main__":
    sys.exit(main())
