"""Advice on a user's script: its own model is measured, and stands in for nothing else.

The script runs alone until `fit` has measured a few steps (`thinwire.script.keras.measure`). Links
are measured as ever, by real processes, with a stand-in of the same tensors that takes as long for
a step; predictions are played with the script's own gradients.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
from absl import flags, logging

from thinwire.advisor import role
from thinwire.advisor.predict import GradientPool, Predictor
from thinwire.data.registry import Dataset
from thinwire.flags import script as script_flags
from thinwire.flags.run import read_run
from thinwire.launcher.program import SCRIPT
from thinwire.launcher.role import environment
from thinwire.models.flat_model import has_gpu
from thinwire.models.measured import MeasuredModel, load
from thinwire.ops.kernels import load_kernels
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.script_settings import MEASURED_TO
from thinwire.runtime.run.script_target import ScriptTarget
from thinwire.runtime.run.settings import Run

FLAGS = flags.FLAGS
_MEASURED = "script.npz"
_STAND_IN = pathlib.Path(__file__).with_name("stand_in.py")
#: A script may load its data, and build a large model, before it trains.
_PATIENCE_SECONDS = 600.0
_LAST_LINES = 5
#: Flags that emulate a device: they describe it where nobody could measure it.
_OF_DEVICES = ("step_seconds", "slowdown")


def complete_flags(script: Sequence[str]) -> list[str]:
    """Set what follows from the script, before the flags are read; return script and arguments.

    Raises:
        ConfigurationError: No such file, or flags that a script's run does not heed.
    """
    target = ScriptTarget.of(script)
    given = [name for name in FLAGS if FLAGS[name].present]
    script_flags.refuse(name for name in given if name not in _OF_DEVICES)
    if FLAGS.run_dir is None:
        FLAGS["run_dir"].value = f"runs/{target.label}"
    return list(script)


def main(run: Run, script: Sequence[str]) -> int:
    """Advise on a script; return the exit code.

    Args:
        run: The run's settings; the model, the data and the batch are the script's.
        script: Its path and its arguments.

    Raises:
        ConfigurationError: The script does not train by `fit` of a distributed model, or as
            `thinwire.advisor.role.main`.
    """
    return role.advise(run, _ScriptSubject(script))


class _ScriptSubject:
    """What the Advisor measures of a script; see `role.Subject`."""

    def __init__(self, script: Sequence[str]) -> None:
        self.script = list(script)
        self.server_optimizer: str | None = None
        self._measured: MeasuredModel | None = None

    def prepare(self, run: Run, folder: pathlib.Path) -> Run:
        """Measure the script; return the run with a model that stands in for the script's."""
        found = measure(run, self.script, folder)
        self._measured = found
        self.server_optimizer = _server_optimizer(found.optimizer)
        logging.info("%s", describe(found))
        stand_in = write_stand_in(found, run.nb_workers, folder)
        given = {"model": str(stand_in), "batch_size": str(found.rows)}
        if not FLAGS["step_seconds"].present:
            given["step_seconds"] = f"{found.step_seconds:.6g}"
        for name, value in given.items():
            FLAGS[name].parse(value)
        return read_run()

    def predictor(self, run: Run, pushes: int) -> Predictor:
        """Return what plays compositions with the script's own gradients."""
        found = self._measured
        if found is None:
            raise RuntimeError("the script has not been measured")
        pool = GradientPool(
            found.spec, found.weights, found.statistics, found.gradients, found.rows
        )
        number = _num_examples(found, run.nb_workers)
        inputs, labels = np.zeros((number, 1, 1, 1), np.float32), np.zeros(number, np.int32)
        dataset = Dataset(inputs, labels, inputs[:0], labels[:0])
        return Predictor(pool, dataset, load_kernels(run.kernels, on_gpu=has_gpu(run)), pushes)

    def parts_of_batch(self, run: Run) -> int:
        """Return the number of workers where they step together."""
        return run.nb_workers if _divides_batch(run) else 1


def _divides_batch(run: Run) -> bool:
    """Whether the script's batch is the whole run's, as `thinwire.script.keras.place` has it."""
    usual = "global" if run.method.steps_together and run.data.shard == "auto" else "worker"
    return (run.data.batch or usual) == "global"


def measure(run: Run, script: Sequence[str], folder: pathlib.Path) -> MeasuredModel:
    """Run a script until its `fit` has measured a few steps.

    Raises:
        ConfigurationError: It did not come to that.
    """
    path = (folder / _MEASURED).resolve()
    path.unlink(missing_ok=True)
    command = [
        *(sys.executable, *SCRIPT, f"--run_dir={folder}", "--id_worker=1", f"--seed={run.seed}"),
        *(f"--nb_workers={run.nb_workers}", f"--device={run.device}", f"{MEASURED_TO}{path}"),
        *("--", *script),
    ]
    name = ScriptTarget.of(script).shown
    logging.info("measuring the script %s: a few steps of its own fit", name)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment(),
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
        output = f"{done.stdout}\n{done.stderr}"
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(
            f"{name} came to no steps of fit within {_PATIENCE_SECONDS:g} s; advise on a "
            "smaller part of its data, by an argument of the script."
        ) from error
    finally:
        shutil.rmtree(folder / "settings", ignore_errors=True)  # the script ended where it stood
    try:
        return load(path)
    except (OSError, ValueError) as error:
        lines = [line for line in output.splitlines() if line.strip()][-_LAST_LINES:]
        raise ConfigurationError(
            f"{name} ended with code {done.returncode} before its fit could be measured: "
            f"{' / '.join(lines)[-800:] or 'it wrote nothing'}. Expected a script that calls "
            "thinwire.distribute(model) and then model.fit(...)."
        ) from error


def write_stand_in(found: MeasuredModel, nb_workers: int, folder: pathlib.Path) -> pathlib.Path:
    """Write a model file with tensors of the same shapes; return its path."""
    path = (folder / _STAND_IN.name).resolve()
    shapes = [list(each.shape) for each in found.spec.tensors]
    examples = _num_examples(found, nb_workers)
    path.write_text(f"{_STAND_IN.read_text()}\n\nSHAPES = {shapes}\nEXAMPLES = {examples}\n")
    return path


def describe(found: MeasuredModel) -> str:
    """Return what was measured, as one line."""
    megabytes = 4e-6 * found.spec.num_parameters
    rows = f", {found.embedding_share:.0%} of it embeddings" if found.embedding_share else ""
    return (
        f"{found.name}: {found.spec.num_parameters:,} parameters ({megabytes:.1f} MB{rows}), "
        f"{found.optimizer}, {1e3 * found.step_seconds:.1f} ms a step of {found.rows} examples "
        f"(median of {found.num_steps}, alone on this machine)"
    )


def _num_examples(found: MeasuredModel, nb_workers: int) -> int:
    """Return so many that each worker's part holds a few batches."""
    return 4 * found.rows * nb_workers


def _server_optimizer(name: str) -> str | None:
    """Return the value of --server_optimizer that changes as many entries; None: plain SGD."""
    return None if name == "SGD" else "adam"
