"""Compare ESync and its baselines on three uneven workers, and draw the ESync paper's five figures.

``python -m bench.studies.uneven`` trains LeNet on Fashion-MNIST with two workers as fast as the
machine and one worker that is twenty times slower. SSGD, ASGD, DC-ASGD and ESync train for the same
time, once with randomly split examples and once with examples split by class. Then the program
draws the figures. It skips finished runs, so the same command continues an interrupted study. With
the defaults it takes about a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from thinwire.tools.esync import figures

ROOT = pathlib.Path(__file__).resolve().parents[2]
METHODS = ("ssgd", "asgd", "dcasgd", "esync")
PARTITIONS = ("iid", "class")
_COMMON = (
    "--type_node=Cluster",
    "--network=lenet",
    "--nb_workers=3",
    "--batch_size=32",
    "--iter_max=1000000",
    "--port=0",
    "--quiet",
)


def command(method: str, partition: str, options: argparse.Namespace) -> list[str]:
    """Return the command line of main.py for one run."""
    return [
        sys.executable,
        str(ROOT / "main.py"),
        *_COMMON,
        options.devices,
        f"--method={method}",
        f"--partition={partition}",
        f"--dataset={options.dataset}",
        f"--learning_rate={options.learning_rate}",
        f"--max_seconds={options.seconds}",
        f"--eval_interval_seconds={options.eval_seconds}",
        f"--seed={options.seed}",
        f"--run_dir={run_dir(method, partition, options.runs)}",
    ]


def run_dir(method: str, partition: str, folder: pathlib.Path) -> pathlib.Path:
    """Return the run directory of one run."""
    return folder / f"{method}-{partition}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Execute the unfinished runs, then draw the figures; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.studies.uneven", description=__doc__)
    parser.add_argument("--runs", type=pathlib.Path, default=pathlib.Path("runs/uneven"))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--partitions", nargs="+", default=list(PARTITIONS), choices=PARTITIONS)
    parser.add_argument("--dataset", default="fashion_mnist_sample")
    parser.add_argument("--learning_rate", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, default=60.0, help="training time of each run")
    parser.add_argument(
        "--devices",
        default="--slowdown=1,1,20",
        help="flag that sets the devices (%(default)s). With --slowdown each run measures its own "
        "step; on a busy machine --devices=--step_seconds=0.01,0.01,0.2 compares better",
    )
    parser.add_argument("--eval_seconds", type=float, default=1.5, help="interval of evaluations")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    chosen = [(method, part) for part in options.partitions for method in options.methods]
    for method, partition in chosen:
        sys.stdout.write(f"{method}, {partition}\n")
        sys.stdout.flush()
        code = subprocess.run(command(method, partition, options), check=False).returncode
        if code:
            sys.stderr.write(f"{method}, {partition} ended with {code}; no figures drawn\n")
            return code
    folders = [str(run_dir(method, part, options.runs)) for method, part in chosen]
    return figures.main([*folders, "--out", str(options.runs / "figures")])


if __name__ == "__main__":
    sys.exit(main())
