"""Measure the speed-up of many devices over one, by method and link, and draw the picture.

    python -m bench.systems.speedup              # measure, simulate, check by real runs, draw
    python -m bench.systems.speedup --from FILE  # draw the results of an earlier call

The program first measures costs in processor time: a gradient of the network on one core, and with
light clients (`bench.systems.many`) the cost of a push and its reply for the PS and a worker. The
Simulator then plays 1 to 64 devices with these costs and counts the bytes of all coded messages.
Each device has its own link with one rate both ways; the one PS has 10 Gbit/s. The speed-up is the
rate of samples divided by the rate of one device that does not exchange. For comparison, two real
devices run on emulated links.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from bench import origin
from bench.peers import thinwire
from bench.systems import many
from thinwire.cli import node as command_line
from thinwire.supervisor.report.figures import THEMES

if TYPE_CHECKING:
    from thinwire.advisor.predict import GradientPool, Predictor
    from thinwire.data.registry import Dataset
    from thinwire.simulator.flags import ShardSpeed

PICTURE = origin.ROOT / "docs" / "images" / "speedup.svg"
WORKERS = (1, 2, 4, 8, 16, 32, 64)
#: Composition of `bench.systems.many` -> label in the picture.
METHODS: Mapping[str, str] = {
    "asgd": "asgd",
    "bsp": "bsp",
    "adacomp": "adacomp, 1 %",
    "dgs": "dgs, 1 %",
    "dgs-both": "dgs, 1 % both ways",
    "esync": "esync",
    "diloco": "diloco, 50 local steps",
}
#: Asynchronous compositions, in which no worker waits for another worker.
_FREE = ("asgd", "adacomp", "dgs", "dgs-both")
LOCAL_STEPS = 50
SERVER_MBPS = 10_000.0
BATCH_SIZE = 64
#: Number of streams in the measurement of the PS's cost of an exchange.
_COST_STREAMS = 8
#: Pushes of each simulated worker; only the second half is counted. Synchronous methods need fewer
#: pushes, because their rounds are alike.
_PUSHES, _PUSHES_IN_LOCKSTEP = 8, 4
_STEPS = 30  # timed gradient computations
_TICKS = ("1/256", "1/64", "1/16", "1/4", "1", "4", "16", "64")
_REAL_WORKERS = 2
_REAL_TAIL_SECONDS = 300.0
#: (method, Mbit/s) of the real runs: a run makes enough exchanges, and a core is free for each
#: device most of the time.
REAL = (
    *((method, 100.0) for method in METHODS if method != "diloco"),
    ("dgs-both", 10.0),
)


@dataclasses.dataclass(frozen=True)
class Panel:
    """One panel of the picture, for one rate of every device's link."""

    title: str
    mbps: float


PANELS = (
    Panel("10 Mbit/s", 10.0),
    Panel("100 Mbit/s", 100.0),
    Panel("1 Gbit/s", 1000.0),
    Panel("10 Gbit/s", 10_000.0),
)


@dataclasses.dataclass(frozen=True)
class ExchangeCosts:
    """Measured processor seconds of one method's exchange.

    Attributes:
        server_seconds: Processor seconds of the PS.
        client_seconds: Processor seconds of the worker from the gradient to the new weights,
            without local steps.
        stepping_seconds: Processor seconds of the worker's local optimizer per local step; 0 if the
            method has no local steps.
    """

    server_seconds: float
    client_seconds: float
    stepping_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class SpeedupPoint:
    """One point of a panel: the speed-up of one method with one number of devices."""

    panel: str
    method: str
    workers: int
    samples_per_second: float
    speedup: float


@dataclasses.dataclass(frozen=True)
class RealPoint:
    """The speed-up of two devices in a real run, and in the simulation."""

    method: str
    mbps: float
    speedup: float
    simulated: float


@dataclasses.dataclass(frozen=True)
class Findings:
    """All results of one call of the program.

    Attributes:
        facts: Machine, versions and commit.
        command: Command line of the call.
        step_seconds: Processor seconds of a mini-batch on one core.
        costs: Method -> measured costs.
        points: Simulated points of all panels.
        real: Results of the real runs.
    """

    facts: dict[str, Any]
    command: str
    step_seconds: float
    costs: dict[str, ExchangeCosts]
    points: list[SpeedupPoint]
    real: list[RealPoint]

    def to_json(self) -> str:
        """Return the results as a JSON document."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def of(cls, text: str) -> Findings:
        """Return the results in a JSON document that `to_json` wrote."""
        document = json.loads(text)
        return cls(
            document["facts"],
            document["command"],
            document["step_seconds"],
            {method: ExchangeCosts(**costs) for method, costs in document["costs"].items()},
            [SpeedupPoint(**point) for point in document["points"]],
            [RealPoint(**point) for point in document["real"]],
        )


# -- the model, its gradients and their time ---------------------------------------------------


class SimulatedDevices:
    """Simulates devices with measured costs; all devices share one model and its gradients.

    Attributes:
        step_seconds: Processor seconds of a mini-batch on one core.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        """Load the data, train some steps, and measure the time of a step."""
        from thinwire.advisor import predict
        from thinwire.advisor.predict import GradientPool
        from thinwire.data.loading import load_dataset, take_shards
        from thinwire.models.flat_model import SharedModel
        from thinwire.ops.kernels import load_kernels
        from thinwire.ops.kernels.numpy_ops import aligned
        from thinwire.simulator.trainer import Trainer
        from thinwire.worker.role import limit_threads

        limit_threads(1)
        command_line.define_flags()
        flags.FLAGS(["main.py", *many.WORK_FLAGS, f"--dataset={many.dataset()}"])
        self._predict, self._folder = predict, folder
        run = self._composed("asgd", 1)
        shared = SharedModel(run.model, run.seed)
        self._dataset: Dataset = load_dataset(run.data, run.model, None, run.seed, parts=("train",))
        trainer = Trainer(shared, bn_sync=False, clip_norm=0.0)
        self._pool: GradientPool = GradientPool.of_first_steps(run, trainer, self._dataset)
        self._bodies = load_kernels("numpy")
        shard, weights = take_shards(run, self._dataset)[0], aligned(len(trainer.weights))
        weights[:] = trainer.weights
        local = trainer.local_of(1)
        began = time.process_time()
        for _ in range(_STEPS):
            trainer.step(weights, trainer.statistics, shard, local)
        self.step_seconds = (time.process_time() - began) / _STEPS

    def stepping_seconds(self, method: str) -> float:
        """Return the local optimizer's processor seconds per local step; 0 without local steps."""
        if method not in many.COUNTED_STEPS:
            return 0.0
        from thinwire.advisor.rounds import PLAYED_STEPS

        predictor = self._predictor(1)
        few, more = (
            predictor.coding_seconds(self._composed(method, 1, f"--local_steps={steps}"))
            for steps in (PLAYED_STEPS, 2 * PLAYED_STEPS)
        )
        return max(0.0, (more - few) / PLAYED_STEPS)

    def rate(self, method: str, workers: int, panel: Panel, costs: ExchangeCosts) -> float:
        """Return the samples per second of all devices together, in the simulation."""
        from thinwire.advisor.rounds import RoundCosts
        from thinwire.runtime.telemetry.predictions import WorkerLink

        step = self.step_seconds + costs.stepping_seconds
        links = [
            WorkerLink(number, step, panel.mbps, panel.mbps, 0.0, 0)
            for number in range(1, workers + 1)
        ]
        run = self._composed(method, workers)
        pushes = _PUSHES if method in _FREE else _PUSHES_IN_LOCKSTEP
        predictor = self._predictor(pushes, costs.server_seconds)
        played = predictor.predict(run, links, costs.client_seconds)
        if costs.stepping_seconds:
            played = RoundCosts.of(played, step, 0.0).stretched(played, LOCAL_STEPS)
        return played.samples_per_second

    def _predictor(self, pushes: int, server_seconds: float = 0.0) -> Predictor:
        from thinwire.simulator.flags import ShardSpeed

        server: ShardSpeed = ShardSpeed(server_seconds, SERVER_MBPS)
        return self._predict.Predictor(self._pool, self._dataset, self._bodies, pushes, server)

    def _composed(self, method: str, workers: int, *extra: str) -> Any:
        words = (f"--nb_workers={workers}", *many.COMPOSITIONS[method], *extra)
        return self._predict.compose(words, self._folder)


def measured_costs(method: str, seconds: float, stepping_seconds: float = 0.0) -> ExchangeCosts:
    """Return the costs of an exchange, measured with light clients that do not sleep."""
    (load,) = many.measure(method, 1, [_COST_STREAMS], seconds, step_seconds=0.0)
    client = 1e-3 * load.client_ms - many.COUNTED_STEPS.get(method, 0) * stepping_seconds
    return ExchangeCosts(1e-3 * load.server_ms, max(0.0, client), stepping_seconds)


# -- real runs ---------------------------------------------------------------------------------


def real_rate(method: str, mbps: float, seconds: float) -> float:
    """Return the samples per second of two real workers on emulated links."""
    method_flags = (
        *many.COMPOSITIONS[method],
        *((f"--local_steps={LOCAL_STEPS}",) if method == "diloco" else ()),
    )
    with tempfile.TemporaryDirectory(prefix="thinwire-speedup-") as name:
        folder = pathlib.Path(name)
        command = [
            *(sys.executable, str(origin.ROOT / "main.py"), "--type_node=Cluster", "--port=0"),
            *(*many.WORK_FLAGS, f"--dataset={many.dataset()}", f"--nb_workers={_REAL_WORKERS}"),
            *(f"--link_mbps={mbps:g}", *method_flags),
            f"--max_seconds={thinwire.WARMUP_SECONDS + seconds}",
        ]
        thinwire.run(command, seconds + _REAL_TAIL_SECONDS, folder)
        steady = thinwire.steady(folder)
    return steady["samples"] / steady["seconds"]


# -- tables and picture ------------------------------------------------------------------------


def document(found: Findings) -> str:
    """Return the tables of costs, speed-ups and real runs as Markdown."""
    text = f"# Speed-up against the number of workers\n\n{origin.describe(found.facts)}\n"
    text += f"- `{found.command}`\n- one device alone: {1e3 * found.step_seconds:.1f} ms of a core"
    text += f" for a mini-batch of {BATCH_SIZE}\n\nProcessor time of an exchange, measured:\n\n"
    lines: list[tuple[str, ...]] = [("method", "PS ms", "worker ms", "local optimizer ms a step")]
    lines += [
        (METHODS[method], *(f"{1e3 * point:.2f}" for point in dataclasses.astuple(costs)))
        for method, costs in found.costs.items()
    ]
    text += origin.markdown(lines)
    for panel in PANELS:
        points = [point for point in found.points if point.panel == panel.title]
        if not points:
            continue
        numbers = sorted({point.workers for point in points})
        rows = [("workers", *map(str, numbers))]
        for method in found.costs:
            speedups = {point.workers: point.speedup for point in points if point.method == method}
            rows.append((METHODS[method], *(f"{speedups[number]:.3g}" for number in numbers)))
        text += f"\n## {panel.title}\n\n{origin.markdown(rows)}"
    if found.real:
        rows = [("method, two devices", "Mbit/s", "simulated", "real", "off by")]
        rows += [
            (
                METHODS[point.method],
                f"{point.mbps:g}",
                f"{point.simulated:.3g}",
                f"{point.speedup:.3g}",
                f"{100 * (point.simulated / point.speedup - 1):+.0f} %",
            )
            for point in found.real
        ]
        text += f"\n## Real runs\n\n{origin.markdown(rows)}"
    return text


def draw(found: Findings, target: pathlib.Path) -> None:
    """Draw a panel for each link, with a line for each method and a ring for each real run."""
    import matplotlib
    from matplotlib.figure import Figure

    theme = THEMES["light"]
    matplotlib.rcParams["svg.hashsalt"] = "thinwire"  # makes equal data give an equal file
    figure = Figure(figsize=(10.5, 3.6), facecolor=theme.background, layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, panel in zip(panels, PANELS, strict=True):
        _draw_panel(axes, panel, found)
    panels[0].set_ylabel("times one device", color=theme.muted)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=5, frameon=False, labelcolor=theme.text
    )
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None, dpi=120)


def _draw_panel(axes: Any, panel: Panel, found: Findings) -> None:
    theme = THEMES["light"]
    axes.plot(WORKERS, WORKERS, ":", color=theme.muted, label="n times one device")
    for place, (method, label) in enumerate(METHODS.items()):
        points = [p for p in found.points if p.panel == panel.title and p.method == method]
        axes.plot(
            [point.workers for point in points],
            [point.speedup for point in points],
            color=theme.series[place],
            label=label,
            linewidth=2.4 if method.startswith("dgs") else 1.5,
            linestyle="--"
            if method == "esync"
            else "-",  # dashed, because it may coincide with bsp
        )
        real = [run for run in found.real if run.method == method and run.mbps == panel.mbps]
        axes.plot(
            [_REAL_WORKERS] * len(real),
            [run.speedup for run in real],
            "o",
            color=theme.series[place],
            markerfacecolor="none",
            label="real, two workers" if place == len(METHODS) - 1 else None,
        )
    axes.set_title(panel.title, color=theme.text, fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(WORKERS, [str(n) for n in WORKERS])
    axes.set_ylim(1 / 256, 64)
    axes.set_yticks([4.0**power for power in range(-4, 4)], _TICKS)
    axes.minorticks_off()
    axes.set_xlabel("workers", color=theme.muted)
    axes.tick_params(colors=theme.muted, length=0)
    axes.spines[:].set_visible(False)
    axes.grid(color=theme.grid)
    axes.set_axisbelow(True)


# -- the command -------------------------------------------------------------------------------


def _simulated(
    devices: SimulatedDevices, costs: Mapping[str, ExchangeCosts], workers: Sequence[int]
) -> Iterator[SpeedupPoint]:
    for panel in PANELS:
        for method, cost in costs.items():
            for number in workers:
                rate = devices.rate(method, number, panel, cost)
                speedup = rate * devices.step_seconds / BATCH_SIZE
                point = SpeedupPoint(panel.title, method, number, rate, speedup)
                sys.stdout.write(f"{panel.title}, {method}, {number}: {speedup:.2f}\n")
                sys.stdout.flush()
                yield point


def _real(
    devices: SimulatedDevices, points: Sequence[SpeedupPoint], seconds: float
) -> Iterator[RealPoint]:
    titles = {panel.mbps: panel.title for panel in PANELS}
    simulated = {
        (point.method, point.panel): point.speedup
        for point in points
        if point.workers == _REAL_WORKERS
    }
    for method, mbps in REAL:
        if (method, titles[mbps]) in simulated:
            rate = real_rate(method, mbps, seconds)
            speedup = rate * devices.step_seconds / BATCH_SIZE
            sys.stdout.write(f"real, {method}, {mbps:g} Mbit/s: {speedup:.2f}\n")
            sys.stdout.flush()
            yield RealPoint(method, mbps, speedup, simulated[method, titles[mbps]])


def measure(options: argparse.Namespace) -> Findings:
    """Measure the costs, simulate the devices, and execute the real runs."""
    facts = origin.facts()
    command = " ".join(["python -m bench.systems.speedup", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as name:
        devices = SimulatedDevices(pathlib.Path(name))
        costs = {
            method: measured_costs(method, options.seconds, devices.stepping_seconds(method))
            for method in options.methods
        }
        sys.stdout.write(f"{1e3 * devices.step_seconds:.1f} ms a step, {costs}\n")
        points = list(_simulated(devices, costs, options.workers))
        real = list(_real(devices, points, options.real_seconds)) if options.real_seconds else []
    return Findings(facts, command, devices.step_seconds, costs, points, real)


def main() -> None:
    options = argparse.ArgumentParser(
        prog="python -m bench.systems.speedup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    options.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    options.add_argument(
        "--seconds", type=float, default=8.0, help="length of a cost's measurement"
    )
    options.add_argument(
        "--real_seconds", type=float, default=10.0, help="length of each real run; 0: no real runs"
    )
    options.add_argument(
        "--from", dest="source", type=pathlib.Path, help="read the results from this .json"
    )
    options.add_argument("--picture", type=pathlib.Path, default=PICTURE, help=".svg or .png")
    arguments = options.parse_args()
    findings = Findings.of(arguments.source.read_text()) if arguments.source else measure(arguments)
    text = document(findings)
    paths = origin.write("speedup", findings.facts, {"md": text, "json": findings.to_json()})
    draw(findings, arguments.picture)
    sys.stdout.write(f"{text}\nwritten: {', '.join(map(str, (*paths, arguments.picture)))}\n")


if __name__ == "__main__":
    main()
