"""Proposes a composition of policies for a user's training script by measuring its model.

For the Advisor, the user's script runs on one worker until `fit` has measured a few training steps
(`thinwire.script.keras.measure`). After the script's measurement, real nodes measure the links
while they train a stand-in model, whose tensor shapes and step time equal the tensor shapes and
step time of the script's model. The Advisor's predictions use the gradients of the user's script.
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
#: Time limit for measuring a script, in seconds. The limit is long, because a script first loads
#: data and builds its model.
_PATIENCE_SECONDS = 600.0
_LAST_LINES = 5  # number of lines of a failed script's output that the error message quotes
#: Names of flags that emulate a slower device. The Advisor accepts these flags for a script,
#: although `thinwire run` rejects them.
_OF_DEVICES = ("step_seconds", "slowdown")


def complete_flags(script: Sequence[str]) -> list[str]:
    """Set --run_dir by the script's name before flags are read; return script and arguments.

    Raises:
        ConfigurationError: The script does not exist, or a flag has no effect on a script's run.
    """
    target = ScriptTarget.of(script)
    present = [name for name in FLAGS if FLAGS[name].present]
    script_flags.refuse(name for name in present if name not in _OF_DEVICES)
    if FLAGS.run_dir is None:
        FLAGS["run_dir"].value = f"runs/{target.label}"
    return list(script)


def main(run: Run, script: Sequence[str]) -> int:
    """Propose a composition of policies for a user's training script; return the exit code.

    Args:
        run: Settings of the planned training run. The model, data and batch size come from the
            script.
        script: Path and arguments of the user's training script.

    Raises:
        ConfigurationError: The script does not train by `fit` of a distributed model, every
            composition of policies contradicts the flags, or the links were not measured in time.
    """
    return role.advise(run, _ScriptModel(script))


class _ScriptModel(role.AdvisedModel):
    """Model of a user's script, for which the Advisor proposes policies."""

    def __init__(self, script: Sequence[str]) -> None:
        self.script = list(script)
        self._measured: MeasuredModel | None = None

    def prepare(self, run: Run, folder: pathlib.Path) -> Run:
        """Measure the script's model; return the run's settings with a stand-in for the model."""
        measured = measure(run, self.script, folder)
        self._measured = measured
        self.server_optimizer = _server_optimizer(measured.optimizer)
        logging.info("%s", describe(measured))
        stand_in = write_stand_in(measured, run.nb_workers, folder)
        settings = {"model": str(stand_in), "batch_size": str(measured.rows)}
        if not FLAGS["step_seconds"].present:
            settings["step_seconds"] = f"{measured.step_seconds:.6g}"
        for name, value in settings.items():
            FLAGS[name].parse(value)
        return read_run()

    def predictor(self, run: Run, pushes: int) -> Predictor:
        """Return a predictor that simulates training runs with the script's measured gradients."""
        measured = self._measured
        if measured is None:
            raise RuntimeError("the Advisor has not measured the script's steps yet")
        pool = GradientPool(
            measured.spec,
            measured.weights,
            measured.statistics,
            measured.gradients,
            measured.rows,
        )
        number = _num_examples(measured, run.nb_workers)
        inputs, labels = np.zeros((number, 1, 1, 1), np.float32), np.zeros(number, np.int32)
        dataset = Dataset(inputs, labels, inputs[:0], labels[:0])
        return Predictor(pool, dataset, load_kernels(run.kernels, on_gpu=has_gpu(run)), pushes)

    def parts_of_batch(self, run: Run) -> int:
        """Return the number of workers if they divide the script's batches; else 1."""
        return run.nb_workers if _divides_batch(run) else 1


def _divides_batch(run: Run) -> bool:
    """Return True if workers divide each batch of the script, False if each takes whole ones."""
    usual = "global" if run.method.steps_together and run.data.shard == "auto" else "worker"
    return (run.data.batch or usual) == "global"


def measure(run: Run, script: Sequence[str], folder: pathlib.Path) -> MeasuredModel:
    """Run a user's script until its `fit` has measured a few training steps.

    Raises:
        ConfigurationError: The user's script ended, or reached the time limit, before the
            measurement.
    """
    path = (folder / _MEASURED).resolve()
    path.unlink(missing_ok=True)
    command = [
        *(sys.executable, *SCRIPT, f"--run_dir={folder}", "--id_worker=1", f"--seed={run.seed}"),
        *(f"--nb_workers={run.nb_workers}", f"--device={run.device}", f"{MEASURED_TO}{path}"),
        *("--", *script),
    ]
    name = ScriptTarget.of(script).shown
    logging.info("measuring the script %s: running a few steps of its fit", name)
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
            f"script {name} ran no steps of fit within {_PATIENCE_SECONDS:g} s; reduce the "
            "script's data, for example by an argument of the script."
        ) from error
    finally:
        # The script, which has ended, leaves its folder of settings
        shutil.rmtree(folder / "settings", ignore_errors=True)
    try:
        return load(path)
    except (OSError, ValueError) as error:
        lines = [line for line in output.splitlines() if line.strip()][-_LAST_LINES:]
        raise ConfigurationError(
            f"script {name} ended with exit code {done.returncode} before its fit could be "
            f"measured; its last output: {' / '.join(lines)[-800:] or 'it wrote nothing'}. "
            "Expected a script that calls thinwire.distribute(model) and then model.fit(...)."
        ) from error


def write_stand_in(found: MeasuredModel, nb_workers: int, folder: pathlib.Path) -> pathlib.Path:
    """Write a Python file of a model with the measured model's tensor shapes; return its path."""
    path = (folder / _STAND_IN.name).resolve()
    shapes = [list(tensor.shape) for tensor in found.spec.tensors]
    examples = _num_examples(found, nb_workers)
    path.write_text(f"{_STAND_IN.read_text()}\n\nSHAPES = {shapes}\nEXAMPLES = {examples}\n")
    return path


def describe(found: MeasuredModel) -> str:
    """Return the measured model's size and step time as one line of text."""
    megabytes = 4e-6 * found.spec.num_parameters
    embeddings = f", {found.embedding_share:.0%} of it embeddings" if found.embedding_share else ""
    return (
        f"{found.name}: {found.spec.num_parameters:,} parameters ({megabytes:.1f} MB{embeddings}), "
        f"{found.optimizer}, {1e3 * found.step_seconds:.1f} ms a step of {found.rows} examples "
        f"(median of {found.num_steps} steps, alone on this machine)"
    )


def _num_examples(found: MeasuredModel, nb_workers: int) -> int:
    """Return the size of a training set with four batches for each worker."""
    return 4 * found.rows * nb_workers


def _server_optimizer(name: str) -> str | None:
    """Return "adam" as --server_optimizer; return None if the script's optimizer is Keras's SGD."""
    return None if name == "SGD" else "adam"
