"""Compares the Advisor's predictions (``advice.json``) with the measured figures of a run.

The Advisor writes ``advice.json`` once, before a run. The node that ends the run reads
``advice.json`` and adds the block ``advice`` to summary.json.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any

from thinwire.ops.methods.method import Method
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.documents import Document, parse_json
from thinwire.runtime.run.files import read_bounded
from thinwire.runtime.run.settings import Run
from thinwire.runtime.telemetry.run_status import RunStatus

ADVICE_FILE = "advice.json"
_SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Prediction(Document):
    """Predicted speed and traffic of a method (a composition of policies) if all workers train."""

    updates_per_second: float
    samples_per_second: float
    bytes_up_per_push: float
    bytes_down_per_pull: float


@dataclasses.dataclass(frozen=True)
class PredictionSetting(Document):
    """Settings of the training run for which the Advisor's predictions are valid."""

    network: str
    dataset: str
    batch_size: int
    nb_workers: int
    nb_ps: int


@dataclasses.dataclass(frozen=True)
class Predicted(Document):
    """A method (composition of policies), with the Advisor's prediction of speed and traffic."""

    flags: list[str]  # command-line flags that select the composition
    digest: str  # digest of the composition's policies and their settings
    prediction: Prediction
    coding_seconds: float  # seconds to encode and decode an update on the Advisor's host


@dataclasses.dataclass(frozen=True)
class WorkerLink(Document):
    """The Advisor's measurements of one worker's device and network link."""

    worker: int  # worker id, from 1
    step_seconds: float  # compute time of one mini-batch, in seconds
    up_mbps: float  # uplink rate, in Mbit/s; 0: no limit was found
    down_mbps: float  # downlink rate, in Mbit/s; 0: no limit was found
    round_trip_seconds: float  # round-trip time: an exchange without transfer and coding
    rounds: int  # number of training rounds that were measured


@dataclasses.dataclass(frozen=True)
class Excluded(Document):
    """A method (composition of policies) for which the Advisor has no prediction."""

    flags: list[str]  # command-line flags that select the composition
    why: str  # reason why the composition has no prediction


@dataclasses.dataclass(frozen=True)
class Recommendation(Document):
    """Content of ``advice.json``, the file in which the Advisor role writes predictions."""

    setting: PredictionSetting
    given: list[str]  # flags of the run for which the Advisor made the file
    links: list[WorkerLink]
    ideal_samples_per_second: float  # training rate without communication
    rate: float  # fraction of the ideal rate that is fast enough for a proposal
    predicted: list[Predicted]  # compositions with predictions, from lossless to lossy
    left_out: list[Excluded]  # compositions without a prediction, with the reasons
    proposal: int  # index of the proposed composition in `predicted`
    reached: bool  # True if the proposed composition reaches the fraction `rate`
    script: list[str] = dataclasses.field(default_factory=list)  # path and arguments of the script
    schema: int = _SCHEMA


def digest_of(method: Method) -> str:
    """Return a digest of a training method: equal policies and settings have equal digests."""
    text = "\n".join(f"{name}={value}" for name, value in method.fingerprint())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load(path: pathlib.Path) -> Recommendation:
    """Read and check the Advisor's file (advice.json) at a path.

    Raises:
        ConfigurationError: The advice file cannot be read, or no Advisor of this version wrote it.
    """
    try:
        advice = Recommendation.from_dict(parse_json(read_bounded(path)))
        if advice.schema != _SCHEMA or advice.proposal >= len(advice.predicted):
            raise ValueError(f"schema {advice.schema} or proposal {advice.proposal} is not valid")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is not an advice file of this version ({error}); give the file {ADVICE_FILE} "
            "that --type_node=Advisor has written."
        ) from error
    return advice


def of_run(run: Run) -> tuple[pathlib.Path, Recommendation] | None:
    """Return path and content of the Advisor's file for a run; None without a file.

    The flag --advice names the Advisor's file, which by default is ``advice.json`` in the run
    directory.

    Raises:
        ConfigurationError: The advice file cannot be read, or no Advisor of this version wrote it.
    """
    path = pathlib.Path(run.advice) if run.advice else run.run_dir / ADVICE_FILE
    if run.advice is None and not path.is_file():
        return None
    return path, load(path)


def outcome(
    advice: Recommendation, run: Run, status: RunStatus, summary: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the block ``advice`` of summary.json, which compares predictions with the run.

    Args:
        advice: Content of advice.json, the Advisor's file with predictions.
        run: Settings of the finished run.
        status: Last status document of the run, from PS shard 0.
        summary: Summary of the run, with the measured values.

    Returns:
        Dicts by figure under ``predicted``, ``measured`` and ``off_by`` (predicted / measured - 1).
        If the file has no prediction for the run, ``predicted`` is None and ``why`` the reason.
    """
    names = [field.name for field in dataclasses.fields(Prediction)]
    measured = {name: summary[name] for name in names}
    digest = digest_of(run.method)
    matches = [n for n, row in enumerate(advice.predicted) if row.digest == digest]
    why = _difference(advice.setting, _setting_of(run, status))
    if not why and not matches:
        why = "the Advisor has not predicted this composition"
    if why:
        return {"predicted": None, "why": why, "measured": measured}
    row = advice.predicted[matches[0]]
    predicted = row.prediction.to_dict()
    return {
        "flags": list(row.flags),
        "proposed": matches[0] == advice.proposal,
        "predicted": predicted,
        "measured": measured,
        "off_by": {
            name: predicted[name] / value - 1 if value else None for name, value in measured.items()
        },
    }


def in_words(block: Mapping[str, Any]) -> str:
    """Return a comparison of predicted and measured values (by `outcome`) as a line of a log."""
    if block["predicted"] is None:
        return f"not comparable: {block['why']}"
    return ", ".join(
        f"{name} {value:.4g} predicted, {measured:.4g} measured"
        if (measured := block["measured"][name]) is not None
        else f"{name} {value:.4g} predicted"
        for name, value in block["predicted"].items()
    )


def network_of(run: Run) -> str:
    """Return the name of a run's model: the path of a user's file, or a built-in network's name."""
    return run.model.path or run.model.network


def _setting_of(run: Run, status: RunStatus) -> PredictionSetting:
    """Return a run's settings for a comparison with predictions, with the status's batch size."""
    samples = sum(worker.samples for worker in status.workers)
    steps = sum(worker.local_steps for worker in status.workers)
    return PredictionSetting(
        network=network_of(run),
        dataset=run.data.dataset,
        batch_size=round(samples / steps) if steps else 0,
        nb_workers=status.nb_workers,
        nb_ps=status.nb_ps,
    )


def _difference(predicted: PredictionSetting, here: PredictionSetting) -> str:
    """Return a phrase for the first setting that differs between prediction and run, or ""."""
    for name, value in predicted.to_dict().items():
        if (now := getattr(here, name)) != value:
            return f"the prediction is for {name} {value}, this run has {now}"
    return ""
