"""Scripts of users, alone and distributed: do they run, end, clean up, and learn as well?

``python -m tests.scripts.quality [--only NAME ...] [--methods asgd,bsp,dgs] [--seeds 3]`` runs each
script of this folder as ``python SCRIPT`` and as ``thinwire run --nb_workers=2 --method=METHOD
SCRIPT``, with everything at its default, and writes the table of docs/guide/examples.md. Results
are kept in ``--results``; a successful run is not repeated. With the environment variable
KERAS_BACKEND=jax or torch it runs the scripts that do not import another backend.

The margin was fixed before anything was measured: the mean over the seeds may be at most one point
(0.01) or two standard errors of the difference below that of the script alone, whichever is more.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
PAGE = ROOT / "docs" / "guide/examples.md"
ALONE = "alone"
METHODS = ("asgd", "bsp", "dgs")
BACKENDS = ("tensorflow", "jax", "torch")
MARGIN = 0.01
STANDARD_ERRORS = 2.0
#: Every process below a run has this variable with the run's unique value.
MARK = "THINWIRE_QUALITY_RUN"

_RESULT = re.compile(r'\{"metric":.*\}')
_BEGIN, _END = "<!-- table: begin -->", "<!-- table: end -->"


def scripts() -> dict[str, Path]:
    """Return the users' scripts of this folder that run on Keras' backend here, by name."""
    own = {"__init__", "quality"}
    others = set(BACKENDS) - {os.environ.get("KERAS_BACKEND", BACKENDS[0])}
    imports_other = re.compile(rf"^import ({'|'.join(others)})\b", re.MULTILINE)
    return {
        path.stem: path
        for path in sorted(FOLDER.glob("*.py"))
        if path.stem not in own
        and not path.stem.startswith("test_")
        and not imports_other.search(path.read_text())
    }


def nasty(name: str) -> Path:
    """Return one of the scripts that must fail."""
    return FOLDER / "nasty" / f"{name}.py"


@dataclasses.dataclass(frozen=True)
class Finished:
    """One finished run of a script, and its remaining files and processes."""

    code: int
    seconds: float
    output: str
    results: tuple[dict[str, object], ...]  # one per worker: {"metric", "value"}
    processes: tuple[str, ...] = ()  # command lines that still run
    files: tuple[str, ...] = ()  # in the folder for temporary files and in the working directory
    timed_out: bool = False

    @property
    def values(self) -> list[float]:
        return [float(str(result["value"])) for result in self.results]

    def problems(self, workers: int) -> list[str]:
        """Return the run's problems, apart from its quality."""
        found = [f"exit code {self.code}"] if self.code else []
        found += ["did not end"] if self.timed_out else []
        found += [f"process left: {line}" for line in self.processes]
        found += [f"file left: {name}" for name in self.files]
        if len(self.results) != workers:
            found.append(f"{len(self.results)} results for {workers} workers")
        return found


def run(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    method: str = ALONE,
    workers: int = 2,
    flags: Sequence[str] = (),
    run_dir: Path | None = None,
    timeout: float = 600,
    python: str = sys.executable,
) -> Finished:
    """Run a script alone or with `method`, in separate folders, and wait for its end.

    Args:
        script: The user's script.
        arguments: Its own arguments.
        method: `alone`, or what --method takes, with more flags: "diloco+local_steps=8".
        workers: How many.
        flags: More flags for ``thinwire run``.
        run_dir: The run's directory; by default one that is removed.
        timeout: Seconds after which everything is killed.
        python: Which runs it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in ("tmp", "work"):
            (folder / each).mkdir()
        command = [python]
        if method != ALONE:
            own, *more = method.split("+")
            command += ["-m", "thinwire", "run", f"--nb_workers={workers}", f"--method={own}"]
            command += [f"--{flag}" for flag in more]
            command += [f"--run_dir={run_dir or folder / 'run'}", *flags]
        command += [str(script), *arguments]
        mark = uuid.uuid4().hex
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder / "tmp"),
            "CUDA_VISIBLE_DEVICES": "-1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
            MARK: mark,
        }
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=folder / "work",
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        timed_out = False
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            _kill(mark)
            output, _ = process.communicate()
        finally:
            if process.poll() is None:  # interrupted from outside
                _kill(mark)
                process.wait()
        seconds = time.monotonic() - start
        left = _kill(mark)
        files = [
            str(path.relative_to(folder))
            for each in ("tmp", "work")
            for path in (folder / each).iterdir()
        ]
    results = tuple(json.loads(match[0]) for match in _RESULT.finditer(output))
    return Finished(
        process.returncode, seconds, output, results, tuple(left), tuple(sorted(files)), timed_out
    )


def _kill(mark: str) -> list[str]:
    """Kill the processes that carry the mark; return their command lines."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                if line:  # not a process that has ended and is not reaped yet
                    found.append(line)
                    os.kill(int(folder.name), signal.SIGKILL)
    return found


@dataclasses.dataclass(frozen=True)
class Compared:
    """The quality of one method compared with the script alone, paired by seed."""

    alone: float
    distributed: float
    standard_error: float

    @property
    def margin(self) -> float:
        return max(MARGIN, STANDARD_ERRORS * self.standard_error)

    @property
    def is_as_good(self) -> bool:
        return self.distributed >= self.alone - self.margin


def compare(alone: Sequence[float], distributed: Sequence[float]) -> Compared:
    """Compare the values of the same seeds."""
    differences = [d - a for a, d in zip(alone, distributed, strict=True)]
    error = 0.0
    if len(differences) > 1:
        error = statistics.stdev(differences) / len(differences) ** 0.5
    return Compared(statistics.fmean(alone), statistics.fmean(distributed), error)


# -- the table ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Results:
    """Results stored in a file: (script, method, seed) -> values, seconds, problems."""

    path: Path
    rows: dict[str, dict[str, object]]

    @classmethod
    def read(cls, path: Path) -> Results:
        return cls(path, json.loads(path.read_text()) if path.exists() else {})

    @staticmethod
    def _key(script: str, method: str, seed: int) -> str:
        return f"{script} {method} {seed}"

    def get(self, script: str, method: str, seed: int) -> dict[str, object] | None:
        return self.rows.get(self._key(script, method, seed))

    def add(self, script: str, method: str, seed: int, row: dict[str, object]) -> None:
        self.rows[self._key(script, method, seed)] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.rows, indent=1) + "\n")

    def series(self, script: str, method: str, seeds: Iterable[int]) -> list[dict[str, object]]:
        """Return the rows of some seeds, without those that have not been run."""
        rows = [self.get(script, method, seed) for seed in seeds]
        return [row for row in rows if row is not None]


def cell(results: Results, script: str, method: str, seeds: Sequence[int]) -> str:
    """Return the table's cell of one script with one method."""
    alone, rows = (results.series(script, each, seeds) for each in (ALONE, method))
    if len(rows) < len(seeds) or len(alone) < len(seeds):
        return "-"
    problems = sorted({str(problem) for row in rows for problem in _list(row["problems"])})
    if problems:
        return f"**fails**: {problems[0]}"
    compared = compare([_value(row) for row in alone], [_value(row) for row in rows])
    text = f"{compared.distributed:.3f}"
    return text if compared.is_as_good else f"**{text}** (needs {-compared.margin:+.3f})"


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value


def _value(row: dict[str, object]) -> float:
    """Return a run's value: the mean over its workers."""
    values = [float(str(value)) for value in _list(row["values"])]
    return statistics.fmean(values) if values else float("nan")


def table(results: Results, methods: Sequence[str], seeds: Sequence[int]) -> str:
    """Return the Markdown table of the scripts that were measured alone with every seed."""
    lines = [
        f"| script | what it is | metric | alone | {' | '.join(methods)} |",
        f"|---|---|---|---|{'---|' * len(methods)}",
    ]
    for name, path in scripts().items():
        alone = results.series(name, ALONE, seeds)
        if len(alone) < len(seeds):
            continue
        what = path.read_text().split('"""')[1].strip().splitlines()[0].rstrip(".")
        value = f"{statistics.fmean(_value(row) for row in alone):.3f}"
        metric = str(alone[0]["metric"])
        cells = " | ".join(cell(results, name, method, seeds) for method in methods)
        link = f"[{name}](../../tests/scripts/{path.name})"
        lines.append(f"| {link} | {what} | {metric} | {value} | {cells} |")
    return "\n".join(lines)


def write_page(text: str, page: Path = PAGE) -> None:
    """Put the table between the marks of the page."""
    before, rest = page.read_text().split(_BEGIN)
    after = rest.split(_END)[1]
    page.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{after}")


def measure(results: Results, script: str, method: str, seed: int, workers: int) -> None:
    """Run one script once, unless its result is stored; failures are run again."""
    row = results.get(script, method, seed)
    if row is not None and not row["problems"]:
        return
    flags = [f"--seed={seed}"]
    finished = run(scripts()[script], flags, method=method, workers=workers, flags=flags)
    row = {
        "metric": finished.results[0]["metric"] if finished.results else "-",
        "values": finished.values,
        "seconds": round(finished.seconds, 1),
        "problems": finished.problems(1 if method == ALONE else workers),
    }
    results.add(script, method, seed, row)
    sys.stdout.write(f"{script} {method} seed {seed}: {json.dumps(row)}\n")
    if row["problems"]:
        sys.stdout.write("".join(f"    {line}\n" for line in finished.output.splitlines()[-25:]))
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Run, compare, write; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.scripts.quality", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="names of scripts; default: all")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "scripts" / "results.json")
    parser.add_argument(
        "--page", action="store_true", help="write the table into docs/guide/examples.md"
    )
    options = parser.parse_args(arguments)
    names = options.only or list(scripts())
    methods, seeds = options.methods.split(","), range(1, options.seeds + 1)
    results = Results.read(options.results)
    failed = False
    for name in names:
        for method in (ALONE, *methods):
            for seed in seeds:
                measure(results, name, method, seed, options.workers)
        for method in methods:
            shown = cell(results, name, method, seeds)
            failed = failed or shown.startswith("**")
            sys.stdout.write(f"{name} {method}: {shown}\n")
    if options.page:
        write_page(table(results, methods, seeds))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
