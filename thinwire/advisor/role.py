"""The Advisor role: measures devices and links, predicts compositions, proposes one."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any, Protocol

from absl import flags, logging

from thinwire.advisor import flags as advisor_flags
from thinwire.advisor import measure, predict
from thinwire.advisor.measure import ProbeFailed
from thinwire.advisor.predict import GradientPool, Predictor, RunnableCandidate
from thinwire.advisor.rounds import PLAYED_STEPS, RoundCosts
from thinwire.data.loading import load_dataset
from thinwire.launcher.role import given_flags
from thinwire.models.flat_model import SharedModel, has_gpu
from thinwire.ops.kernels import load_kernels
from thinwire.ops.methods.validation import refuse_script_steps
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.documents import write_json_atomically
from thinwire.runtime.run.settings import EXIT_DONE, Run
from thinwire.runtime.telemetry import predictions
from thinwire.simulator.trainer import Trainer
from thinwire.worker import flags as worker_flags
from thinwire.worker.role import limit_threads

FLAGS = flags.FLAGS
_LONGEST_FLAG = 1000  # of a text in a document
_NOT_OF_THE_RUN = ("type_node", "flagfile", "overwrite", "resume", "advice", *advisor_flags.NAMES)


class Subject(Protocol):
    """What advice is wanted on.

    Attributes:
        script: Path and arguments of a script; empty for a model of the flags.
        server_optimizer: That the script's methods have on the PS; None: that of the flags.
    """

    script: list[str]
    server_optimizer: str | None

    def prepare(self, run: Run, folder: pathlib.Path) -> Run:
        """Measure what must be known before links are; return the run to measure them with."""

    def predictor(self, run: Run, pushes: int) -> Predictor:
        """Return what plays compositions."""

    def parts_of_batch(self, run: Run) -> int:
        """Return into how many parts workers divide the batch that was measured."""


class _ModelSubject:
    """A model and a data set that flags name."""

    def __init__(self) -> None:
        self.script: list[str] = []
        self.server_optimizer: str | None = None

    def prepare(self, run: Run, folder: pathlib.Path) -> Run:
        """Return the run as it is."""
        del folder
        return run

    def predictor(self, run: Run, pushes: int) -> Predictor:
        """Train a few steps."""
        return _predictor(run, pushes)

    def parts_of_batch(self, run: Run) -> int:
        """Return 1: --batch_size is each worker's."""
        del run
        return 1


def main(run: Run) -> int:
    """Advise on the model that flags name; return the exit code.

    Raises:
        ConfigurationError: As `advise`.
    """
    return advise(run, _ModelSubject())


def advise(run: Run, subject: Subject) -> int:
    """Advise; return the exit code.

    Args:
        run: The run's settings.
        subject: What is measured.

    Raises:
        ConfigurationError: Flags, data or model do not fit, no composition goes with the flags, or
            links were not measured in time.
    """
    own, path = advisor_flags.read(), run.run_dir / predictions.ADVICE_FILE
    given = given_flags(_NOT_OF_THE_RUN)
    _refuse_long(given)
    if path.is_file() and not run.overwrite:
        return _repeat(path, given, subject.script)
    folder = run.run_dir / "advice"
    folder.mkdir(parents=True, exist_ok=True)
    run = subject.prepare(run, folder)
    trials, left_out = predict.trials(folder, server_optimizer=subject.server_optimizer)
    predictor = subject.predictor(run, own.pushes)
    try:
        measured = _measure(run, predictor, own.probe_seconds)
    except ProbeFailed as failure:
        logging.error("links were not measured; logs: %s", folder)
        return int(failure.args[0])
    rows = [
        _predict(predictor, trial, measured, subject.parts_of_batch(trial.run), own.rate)
        for trial in trials
    ]
    ideal = predict.ideal_samples_per_second(measured, run.batch_size)
    number, reached = predict.propose(rows, ideal, own.rate)
    found = predictions.Recommendation(
        _setting_of(run),
        given,
        measured,
        ideal,
        own.rate,
        rows,
        left_out,
        number,
        reached,
        subject.script,
    )
    write_json_atomically(path, found.to_dict())
    sys.stdout.write(predict.describe(found, path))
    return EXIT_DONE


def _refuse_long(given: list[str]) -> None:
    """Reject flags that could not be stored beside the advice, before anything is measured."""
    for flag in given:
        if len(flag) > _LONGEST_FLAG:
            raise ConfigurationError(
                f"{flag[:40]}... has {len(flag)} characters; an Advisor keeps flags of at most "
                f"{_LONGEST_FLAG}. Give one value for all workers, or advise on fewer."
            )


def _repeat(path: Any, given: list[str], script: list[str]) -> int:
    """Print advice that is there already, if it is about the same run."""
    found = predictions.load(path)
    then, now = [*found.given, *found.script], [*given, *script]
    if then != now:
        raise ConfigurationError(
            f"{path} is advice for {' '.join(then)}, and this is for {' '.join(now)}; "
            "--overwrite it, or choose another --run_dir."
        )
    logging.info("advice of an earlier time; --overwrite measures again")
    sys.stdout.write(predict.describe(found, path))
    return EXIT_DONE


def _predictor(run: Run, pushes: int) -> Predictor:
    refuse_script_steps(run.method, "the Advisor")
    own = worker_flags.read(run.nb_workers)
    limit_threads(own.threads)
    shared = SharedModel(run.model, run.seed)
    dataset = load_dataset(run.data, run.model, shared.user_module, run.seed, parts=("train",))
    trainer = Trainer(shared, run.method.bn_sync, own.clip_norm, own.weight_decay)
    bodies = load_kernels(run.kernels, on_gpu=has_gpu(run))
    return Predictor(GradientPool.of_first_steps(run, trainer, dataset), dataset, bodies, pushes)


def _measure(run: Run, predictor: Predictor, seconds: float) -> list[predictions.WorkerLink]:
    """Return every worker's device and link, as measured."""
    folder = run.run_dir / "advice"
    coding = measure.CodingCosts(
        dense=predictor.coding_seconds(measure.composition(measure.DENSE, folder)),
        sparse=predictor.coding_seconds(measure.composition(measure.SPARSE, folder)),
    )
    dense = measure.play(run, measure.DENSE, seconds)
    sparse = measure.play(run, measure.SPARSE, seconds)
    return [
        measure.worker_link(worker, dense.get(worker, []), sparse.get(worker, []), coding)
        for worker in range(1, run.nb_workers + 1)
    ]


def _predict(
    predictor: Predictor,
    trial: RunnableCandidate,
    measured: list[predictions.WorkerLink],
    parts: int,
    rate: float,
) -> predictions.Predicted:
    """Play a composition; a part of a batch takes that part of a step's time."""
    coding_seconds = predictor.coding_seconds(trial.settled)
    links = [dataclasses.replace(each, step_seconds=each.step_seconds / parts) for each in measured]
    prediction = predictor.predict(trial.settled, links, coding_seconds)
    if trial.with_steps is not None:
        slowest = max(link.step_seconds for link in links)
        longer = trial.with_steps(2 * PLAYED_STEPS).settled
        stepping = (predictor.coding_seconds(longer) - coding_seconds) / PLAYED_STEPS
        of_round = RoundCosts.of(prediction, slowest, max(0.0, stepping))
        steps = of_round.steps_for(rate, *trial.local_steps)
        prediction = of_round.stretched(prediction, steps)
        trial = trial.with_steps(steps)
    samples = prediction.samples_per_second / parts
    prediction = dataclasses.replace(prediction, samples_per_second=samples)
    flags_of_it = list(trial.candidate.flags)
    logging.info("%s: %.1f samples/s", " ".join(flags_of_it), prediction.samples_per_second)
    digest = predictions.digest_of(trial.run.method)
    return predictions.Predicted(flags_of_it, digest, prediction, coding_seconds)


def _setting_of(run: Run) -> predictions.PredictionSetting:
    return predictions.PredictionSetting(
        network=predictions.network_of(run),
        dataset=run.data.dataset,
        batch_size=run.batch_size,
        nb_workers=run.nb_workers,
        nb_ps=run.nb_ps,
    )
