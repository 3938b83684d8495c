"""``python -m tests.fuzz``: fuzz one target or all, list targets, keep new inputs.

The inputs of a run are in ``build/fuzz/<target>``; ``--keep`` copies inputs that reach new lines
into the repository's corpus. A crash is reported with its input's file; put this file into
``tests/fuzz/crashes/<target>`` together with the fix.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys

from absl import logging

from tests.fuzz import guided, registry
from tests.fuzz.target import CORPUS, CRASHES, FOLDER_VARIABLE, in_memory

WORK = pathlib.Path(__file__).parents[2] / "build" / "fuzz"
#: In wall-clock time, for targets that wait for ever; targets limit their processor time.
_TIMEOUT_SECONDS = 1200


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    add = parser.add_argument
    add("--list", action="store_true", help="name the targets and end")
    add("--target", action="append", choices=registry.names(), help="may be repeated; default: all")
    add("--seconds", type=float, default=60.0, help="of each target")
    add("--seed", type=int, default=1, help="of the fuzzer; 0: another one each time")
    add("--keep", action="store_true", help="no fuzzing: put what was found into the corpus")
    given = parser.parse_args(arguments)
    chosen = given.target or registry.names()
    if given.list:
        lines = (f"{name:14} {registry.load(name).about}\n" for name in chosen)
        sys.stdout.write("".join(lines))
        return 0
    if given.keep:
        from tests.fuzz import corpus_choice

        logging.set_verbosity(logging.FATAL)
        for name in chosen:
            sys.stdout.write(f"{name}: {corpus_choice.keep(name, WORK / name / 'found')}\n")
        return 0
    if why := guided.is_missing():
        sys.stderr.write(f"{why}\n")
        return 2
    crashed = [name for name in chosen if not _fuzz(name, given.seconds, given.seed)]
    if crashed:
        sys.stdout.write(f"crashes: {', '.join(crashed)}; see {WORK}/<target>/crash-*\n")
    return 1 if crashed else 0


def _fuzz(name: str, seconds: float, seed: int) -> bool:
    """Fuzz one target; return whether nothing crashed."""
    target, place = registry.load(name), WORK / name
    found, seeds = place / "found", place / "seeds"
    for folder in (found, seeds):
        folder.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(target.seeds()):
        (seeds / f"{number:04d}").write_bytes(content)
    known = [str(folder / name) for folder in (CORPUS, CRASHES) if (folder / name).is_dir()]
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.guided",
        name,
        f"-max_total_time={max(1, round(seconds))}",
        f"-max_len={target.longest}",
        f"-timeout={_TIMEOUT_SECONDS}",
        f"-artifact_prefix={place}/",
        f"-seed={seed}",
        "-print_final_stats=1",
        "-rss_limit_mb=4096",
        str(found),
        str(seeds),
        *known,
    ]
    sys.stdout.write(f"{name}: {target.about}, {seconds:g} s\n")
    sys.stdout.flush()
    log = place / "log.txt"
    with log.open("wb") as output, in_memory() as files:  # a fuzzer's process cleans up nothing
        ended = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
            env={**os.environ, FOLDER_VARIABLE: files},
        )
    lines = log.read_text(errors="replace").splitlines()
    told = [line for line in lines if line.startswith("Done ") or "exec/s" in line][-2:]
    sys.stdout.write("".join(f"  {line.strip()}\n" for line in told))
    if ended.returncode:
        sys.stdout.write(f"  exit code {ended.returncode}; the end of {log}:\n")
        sys.stdout.write("".join(f"    {line}\n" for line in lines[-40:]))
    sys.stdout.flush()
    return ended.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
