"""The Advisor role: measures devices and links, and proposes a composition of policies."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

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
_LONGEST_FLAG = 1000  # maximum number of characters of a flag in advice.json
#: Names of the flags of the Advisor's command line that the proposed command line omits.
_NOT_OF_THE_RUN = ("type_node", "flagfile", "overwrite", "resume", "advice", *advisor_flags.NAMES)


class AdvisedModel:
    """The model for which the Advisor proposes policies: here a model and data set from flags.

    Attributes:
        script: Path and arguments of the user's training script; empty for a model from flags.
        server_optimizer: Value of --server_optimizer for methods that push gradients of a script;
            None for the value of the flag.
    """

    script: Sequence[str] = ()
    server_optimizer: str | None = None

    def prepare(self, run: Run, folder: pathlib.Path) -> Run:
        """Measure the model's step time; return the settings of the run that measures the links.

        A model from flags needs no measurement, so its run has the settings of the planned run.
        """
        return run

    def predictor(self, run: Run, pushes: int) -> Predictor:
        """Train a few steps; return a predictor that simulates runs with the steps' gradients."""
        return _predictor(run, pushes)

    def parts_of_batch(self, run: Run) -> int:
        """Return how many workers share a measured batch; 1 if each takes whole batches."""
        return 1


def main(run: Run) -> int:
    """Propose a composition of policies for the model that flags name; return the exit code.

    Raises:
        ConfigurationError: Flags, data or model contradict each other, every composition of
            policies contradicts the flags, or the links were not measured in time.
    """
    return advise(run, AdvisedModel())


def advise(run: Run, subject: AdvisedModel) -> int:
    """Measure links, predict the speed of compositions, print a proposal; return the exit code.

    Args:
        run: Settings of the planned training run.
        subject: Model for which the Advisor proposes a composition of policies.

    Raises:
        ConfigurationError: Flags, data or model contradict each other, every composition of
            policies contradicts the flags, or the links were not measured in time.
    """
    settings, path = advisor_flags.read(), run.run_dir / predictions.ADVICE_FILE
    run_flags = given_flags(_NOT_OF_THE_RUN)
    _refuse_long(run_flags)
    if path.is_file() and not run.overwrite:
        return _repeat(path, run_flags, subject.script)
    folder = run.run_dir / "advice"
    folder.mkdir(parents=True, exist_ok=True)
    run = subject.prepare(run, folder)
    trials, left_out = predict.trials(folder, server_optimizer=subject.server_optimizer)
    predictor = subject.predictor(run, settings.pushes)
    try:
        measured = _measure(run, predictor, settings.probe_seconds)
    except ProbeFailed as failure:
        logging.error("the Advisor could not measure the links; logs of its runs are in %s", folder)
        return int(failure.args[0])
    rows = [
        _predict(predictor, trial, measured, subject.parts_of_batch(trial.run), settings.rate)
        for trial in trials
    ]
    ideal = predict.ideal_samples_per_second(measured, run.batch_size)
    number, reached = predict.propose(rows, ideal, settings.rate)
    advice = predictions.Recommendation(
        _setting_of(run),
        run_flags,
        measured,
        ideal,
        settings.rate,
        rows,
        left_out,
        number,
        reached,
        list(subject.script),
    )
    write_json_atomically(path, advice.to_dict())
    sys.stdout.write(predict.describe(advice, path))
    return EXIT_DONE


def _refuse_long(given: list[str]) -> None:
    """Reject flags that are too long for the file advice.json, before links are measured."""
    for flag in given:
        if len(flag) > _LONGEST_FLAG:
            raise ConfigurationError(
                f"the flag {flag[:40]}... has {len(flag)} characters; the Advisor stores at most "
                f"{_LONGEST_FLAG}. Give one value for all workers, or reduce --nb_workers."
            )


def _repeat(path: Any, given: list[str], script: Sequence[str]) -> int:
    """Print the stored advice of an earlier Advisor with equal flags; return the exit code.

    Raises:
        ConfigurationError: The stored advice is for other flags or another script than this
            Advisor's.
    """
    advice = predictions.load(path)
    stored, current = [*advice.given, *advice.script], [*given, *script]
    if stored != current:
        raise ConfigurationError(
            f"the advice in {path} is for the flags {' '.join(stored)}, but this command has the "
            f"flags {' '.join(current)}; give --overwrite, or choose another --run_dir."
        )
    logging.info("printing the Advisor's stored proposal; --overwrite measures the links again")
    sys.stdout.write(predict.describe(advice, path))
    return EXIT_DONE


def _predictor(run: Run, pushes: int) -> Predictor:
    refuse_script_steps(run.method, "the Advisor")
    settings = worker_flags.read(run.nb_workers)
    limit_threads(settings.threads)
    shared = SharedModel(run.model, run.seed)
    dataset = load_dataset(run.data, run.model, shared.user_module, run.seed, parts=("train",))
    trainer = Trainer(shared, run.method.bn_sync, settings.clip_norm, settings.weight_decay)
    bodies = load_kernels(run.kernels, on_gpu=has_gpu(run))
    return Predictor(GradientPool.of_first_steps(run, trainer, dataset), dataset, bodies, pushes)


def _measure(run: Run, predictor: Predictor, seconds: float) -> list[predictions.WorkerLink]:
    """Measure every worker's step time and link with two probes (short real training runs)."""
    folder = run.run_dir / "advice"
    dense_coding = predictor.coding_seconds(measure.composition(measure.DENSE, folder))
    sparse_coding = predictor.coding_seconds(measure.composition(measure.SPARSE, folder))
    dense = measure.play(run, measure.DENSE, seconds)
    sparse = measure.play(run, measure.SPARSE, seconds)
    return [
        measure.worker_link(
            worker, dense.get(worker, []), sparse.get(worker, []), dense_coding, sparse_coding
        )
        for worker in range(1, run.nb_workers + 1)
    ]


def _predict(
    predictor: Predictor,
    trial: RunnableCandidate,
    measured: list[predictions.WorkerLink],
    parts: int,
    rate: float,
) -> predictions.Predicted:
    """Predict the rates of one composition of policies; choose its number of local steps.

    If n workers share a measured batch, the prediction assumes that a training step on 1 / n of the
    batch takes 1 / n of the measured time.
    """
    coding_seconds = predictor.coding_seconds(trial.settled)
    links = [dataclasses.replace(link, step_seconds=link.step_seconds / parts) for link in measured]
    prediction = predictor.predict(trial.settled, links, coding_seconds)
    if trial.with_steps is not None:
        slowest = max(link.step_seconds for link in links)
        # A round of 2 * PLAYED_STEPS has PLAYED_STEPS more optimizer steps than a round of
        # PLAYED_STEPS.
        longer = trial.with_steps(2 * PLAYED_STEPS).settled
        stepping = (predictor.coding_seconds(longer) - coding_seconds) / PLAYED_STEPS
        round_costs = RoundCosts.of(prediction, slowest, max(0.0, stepping))
        steps = round_costs.steps_for(rate, *trial.local_steps)
        prediction = round_costs.stretched(prediction, steps)
        trial = trial.with_steps(steps)
    samples = prediction.samples_per_second / parts
    prediction = dataclasses.replace(prediction, samples_per_second=samples)
    trial_flags = list(trial.candidate.flags)
    logging.info("%s: %.1f samples/s", " ".join(trial_flags), prediction.samples_per_second)
    digest = predictions.digest_of(trial.run.method)
    return predictions.Predicted(trial_flags, digest, prediction, coding_seconds)


def _setting_of(run: Run) -> predictions.PredictionSetting:
    return predictions.PredictionSetting(
        network=predictions.network_of(run),
        dataset=run.data.dataset,
        batch_size=run.batch_size,
        nb_workers=run.nb_workers,
        nb_ps=run.nb_ps,
    )
