"""Compare methods on a language model: loss against tokens, seconds and bytes.

``python -m bench.studies.language_model`` runs four workers on links of 10 Mbit/s. All arms train
on the same number of tokens: `bsp` with AdamW, which exchanges at every step, and methods with many
local steps. The Simulator computes all gradients, codes the messages and counts their bytes;
``--real`` starts processes instead. The program writes bench/results/DATE-language-model.jsonl with
a line for each run, a .md file with the table, and docs/images/language_model.svg. ``--from FILE
...`` writes the table and the picture from earlier .jsonl files.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import origin
from thinwire.data.choices import CONTEXT
from thinwire.supervisor.report.figures import THEMES

PICTURE = origin.ROOT / "docs" / "images" / "language_model.svg"
WORKERS, LINK_MBPS = 4, 10
SYNCHRONOUS = "bsp"
#: Goal: an arm's loss may exceed the loss of `SYNCHRONOUS` by at most this share of it.
LOSS_GOAL = 0.02
NUM_EVALUATIONS = 20


@dataclasses.dataclass(frozen=True)
class ModelArm:
    """One method of the comparison.

    Attributes:
        flags: Flags of main.py, in addition to the flags of all arms.
        local_steps: Local steps of a worker between two exchanges.
        bytes_goal: Maximum of the arm's bytes, both ways, divided by `SYNCHRONOUS`'s bytes.
    """

    flags: tuple[str, ...]
    local_steps: int = 1
    bytes_goal: float = 1.0


#: Name of an arm -> the arm. `SYNCHRONOUS` uses the best of the rates 0.002, 0.004 and 0.008.
ARMS: Mapping[str, ModelArm] = {
    SYNCHRONOUS: ModelArm(
        ("--method=bsp", "--server_optimizer=adamw", "--weight_decay=0.1", "--learning_rate=0.004")
    ),
    "diloco": ModelArm(("--method=diloco", "--learning_rate=0.004"), 64, 1 / 50),
    "sparseloco": ModelArm(
        (
            *("--method=sparseloco", "--learning_rate=0.006", "--local_weight_decay=0.1"),
            # The run has few tokens per weight and few rounds. So a worker sends more values per
            # chunk, its residual does not decay, and its local steps include a part of the residual
            # that it has not sent yet.
            *("--chunk_k=150", "--value_dtype=means2", "--error_decay=1", "--error_ahead=0.3"),
            "--global_lr=2",
        ),
        30,
        1 / 1000,
    ),
    "sparseloco-paper": ModelArm(
        ("--method=sparseloco", "--learning_rate=0.002", "--local_weight_decay=0.1"), 30, 1 / 1000
    ),
}


@dataclasses.dataclass(frozen=True)
class LossPoint:
    """One evaluation of the central model."""

    tokens: int  # tokens that the run has consumed
    seconds: float
    num_bytes: int  # bytes of all workers, both ways
    loss: float  # mean cross-entropy of a byte of the held-out text, in nats


@dataclasses.dataclass(frozen=True)
class PlayedRun:
    """Record of one run.

    Attributes:
        arm: Key of `ARMS`.
        seed: Seed of the run.
        commit: Commit that was measured.
        flags: Flags of main.py, without the run directory.
        points: Evaluations in order of time; the last one is from the end of the run.
    """

    arm: str
    seed: int
    commit: str
    flags: Sequence[str]
    points: Sequence[LossPoint]

    @classmethod
    def of(cls, line: str) -> PlayedRun:
        """Return the run in a line that `json` wrote."""
        document = json.loads(line)
        return cls(**document | {"points": [LossPoint(**point) for point in document["points"]]})

    def json(self) -> str:
        """Return the run as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))


def flags_of(arm: str, seed: int, options: argparse.Namespace) -> list[str]:
    """Return the flags of main.py for one run of `options.steps` steps of each worker."""
    contender = ARMS[arm]
    updates = max(1, options.steps // contender.local_steps)
    steps = [f"--local_steps={contender.local_steps}"] if contender.local_steps > 1 else []
    role = ["--type_node=Cluster", "--port=0"] if options.real else ["--type_node=Simulator"]
    return [
        *role,
        "--task=tokens",
        "--dataset=stdlib",
        f"--network={options.network}",
        f"--nb_workers={WORKERS}",
        f"--batch_size={options.batch_size}",
        f"--iter_max={updates}",
        f"--seed={seed}",
        f"--lr_schedule={options.lr_schedule}",
        f"--link_mbps={LINK_MBPS}",
        f"--step_seconds={options.step_seconds:g}",
        f"--eval_interval_updates={max(1, updates // NUM_EVALUATIONS)}",
        "--eval_interval_seconds=1e6",
        *contender.flags,
        *steps,
        *options.flag,
    ]


def play(arm: str, seed: int, options: argparse.Namespace) -> PlayedRun:
    """Execute one run of an arm.

    Raises:
        subprocess.CalledProcessError: The run failed; its output is printed.
    """
    flags = flags_of(arm, seed, options)
    with tempfile.TemporaryDirectory(prefix="thinwire-lm-") as folder:
        command = [sys.executable, "main.py", *flags, f"--run_dir={folder}"]
        done = subprocess.run(command, cwd=origin.ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.stderr.write(done.stdout[-2000:] + done.stderr[-4000:])
            done.check_returncode()
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    evaluations = [record for record in map(json.loads, lines) if record["kind"] == "eval"]
    return PlayedRun(
        arm,
        seed,
        origin.commit(origin.facts()),
        flags,
        [_point(evaluation) for evaluation in evaluations],
    )


def _point(record: Mapping[str, Any]) -> LossPoint:
    return LossPoint(
        record["samples"] * CONTEXT,
        record["seconds"],
        record["bytes_up"] + record["bytes_down"],
        record["metrics"]["loss"],
    )


# -- results --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ArmSummary:
    """Results of one arm at the end of its runs: losses by seed, and means of the other figures."""

    arm: str
    losses: Sequence[float]
    tokens: float
    seconds: float
    num_bytes: float

    @property
    def loss(self) -> float:
        """Mean loss over the seeds."""
        return statistics.fmean(self.losses)


def summarise(runs: Sequence[PlayedRun]) -> dict[str, ArmSummary]:
    """Return the summaries of the arms that have runs, in the order of `ARMS`."""
    summaries = {}
    for arm in ARMS:
        ends = [run.points[-1] for run in runs if run.arm == arm]
        if ends:
            columns = ([getattr(end, name) for end in ends] for name in _COLUMNS)
            summaries[arm] = ArmSummary(
                arm, [end.loss for end in ends], *map(statistics.fmean, columns)
            )
    return summaries


_COLUMNS = ("tokens", "seconds", "num_bytes")


def table(runs: Sequence[PlayedRun]) -> str:
    """Return a Markdown table of the arms, which compares each arm with `SYNCHRONOUS`."""
    arms = summarise(runs)
    base = arms.get(SYNCHRONOUS)
    lines = [
        "| method | local steps | seeds | million tokens | loss | perplexity | above bsp | "
        "seconds | MB both ways | of bsp's bytes | goals |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, summary in arms.items():
        above = bytes_part = goals = ""
        if base is not None and arm != SYNCHRONOUS:
            excess, part = summary.loss / base.loss - 1, summary.num_bytes / base.num_bytes
            above, bytes_part = f"{100 * excess:+.1f} %", f"1/{1 / part:.0f}"
            met = excess <= LOSS_GOAL, part <= ARMS[arm].bytes_goal
            goals = ", ".join(
                f"{name} {'met' if is_met else 'MISSED'}"
                for name, is_met in zip(("loss", "bytes"), met, strict=True)
            )
        cells = [
            f"`{arm}`",
            str(ARMS[arm].local_steps),
            str(len(summary.losses)),
            f"{summary.tokens / 1e6:.2f}",
            f"{summary.loss:.3f}{_spread(summary.losses)}",
            f"{math.exp(summary.loss):.2f}",
            above,
            f"{summary.seconds:.0f}",
            f"{summary.num_bytes / 1e6:.1f}",
            bytes_part,
            goals,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> str:
    return f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""


def draw(runs: Sequence[PlayedRun], target: Path) -> None:
    """Draw the loss against tokens, seconds and bytes, with a line for each run."""
    import matplotlib
    from matplotlib.figure import Figure

    theme = THEMES["light"]
    matplotlib.rcParams["svg.hashsalt"] = "thinwire"  # makes equal data give an equal file
    figure = Figure(figsize=(10.5, 3.4), facecolor=theme.background, layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    scales = (
        ("tokens", 1e6, "million tokens"),
        ("seconds", 1.0, "seconds"),
        ("num_bytes", 1e6, "MB"),
    )
    for axes, (name, unit, caption) in zip(panels, scales, strict=True):
        for place, arm in enumerate(ARMS):
            for number, run in enumerate(played for played in runs if played.arm == arm):
                points = [point for point in run.points if getattr(point, name)]
                axes.plot(
                    [getattr(point, name) / unit for point in points],
                    [point.loss for point in points],
                    color=theme.series[place],
                    label=arm if not number else None,
                    linewidth=1.6,
                )
        axes.set_xlabel(caption, color=theme.muted)
        axes.set_xscale("linear" if name == "tokens" else "log")
        axes.tick_params(colors=theme.muted, length=0)
        axes.spines[:].set_visible(False)
        axes.grid(color=theme.grid)
        axes.set_axisbelow(True)
    panels[0].set_ylabel("loss of held-out text, nats a byte", color=theme.muted)
    panels[0].legend(frameon=False, labelcolor=theme.text)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None, dpi=120)


def main() -> None:
    """Execute the runs or read them from files, and write the table and the picture."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.studies.language_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=15360, help="steps of each worker")
    parser.add_argument("--batch_size", type=int, default=8, help="batch size of a worker")
    parser.add_argument("--network", default="decoder-small", help="value of --network")
    parser.add_argument(
        "--step_seconds",
        type=float,
        default=0.004,
        help="time of a mini-batch: decoder-small takes 4 ms for 8 sequences on one thread of a "
        "server's processor; decoder takes 60 ms for 16",
    )
    parser.add_argument("--lr_schedule", default="cosine:warmup=0.05,floor=0.1")
    parser.add_argument("--flag", action="append", default=[], help="flag of main.py for all arms")
    parser.add_argument(
        "--real", action="store_true", help="start processes instead of the Simulator"
    )
    parser.add_argument(
        "--from", dest="sources", type=Path, nargs="+", help="earlier .jsonl files to read"
    )
    parser.add_argument("--out", type=Path, help="the .jsonl file; the .md file has the same name")
    parser.add_argument("--picture", type=Path, default=PICTURE, help=".svg or .png")
    options = parser.parse_args()
    today = datetime.date.today().isoformat()
    out = options.out or origin.RESULTS / f"{today}-language-model.jsonl"
    if options.sources:
        lines = [line for path in options.sources for line in path.read_text().splitlines()]
        runs = [PlayedRun.of(line) for line in lines]
    else:
        runs = []
        for seed in options.seeds:
            for arm in options.arms:
                runs.append(play(arm, seed, options))
                with out.open("a") as file:
                    file.write(runs[-1].json() + "\n")
                end = runs[-1].points[-1]
                sys.stdout.write(f"{arm}, seed {seed}: {end}\n")
                sys.stdout.flush()
    text = table(runs)
    sys.stdout.write(f"\n{text}")
    commits = ", ".join(sorted({run.commit for run in runs}))
    title = f"# A language model on {WORKERS} workers at {LINK_MBPS} Mbit/s\n\nCommit {commits}."
    out.with_suffix(".md").write_text(f"{title}\n\n{text}")
    draw(runs, options.picture)


if __name__ == "__main__":
    main()
