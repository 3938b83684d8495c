"""Predictions of an Advisor: the file ``advice.json``, and how a run compares with them.

The Advisor writes the file once; the node that ends a run reads it and adds the block ``advice`` to
summary.json.
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
    """The predicted figures of a composition, while all workers train."""

    updates_per_second: float
    samples_per_second: float
    bytes_up_per_push: float
    bytes_down_per_pull: float


@dataclasses.dataclass(frozen=True)
class PredictionSetting(Document):
    """The run that a prediction is valid for, besides its links and devices."""

    network: str
    dataset: str
    batch_size: int
    nb_workers: int
    nb_ps: int


@dataclasses.dataclass(frozen=True)
class Predicted(Document):
    """One composition of the table."""

    flags: list[str]
    digest: str  # of its policies and their settings
    prediction: Prediction
    coding_seconds: float  # of an exchange, on the machine of the Advisor


@dataclasses.dataclass(frozen=True)
class WorkerLink(Document):
    """The measurements of one worker."""

    worker: int  # from 1
    step_seconds: float  # of a mini-batch
    up_mbps: float  # 0: no limit was found
    down_mbps: float
    round_trip_seconds: float  # of an exchange, besides its bytes and their coding
    rounds: int  # that this is the median of


@dataclasses.dataclass(frozen=True)
class Excluded(Document):
    """A composition that was not predicted."""

    flags: list[str]
    why: str


@dataclasses.dataclass(frozen=True)
class Recommendation(Document):
    """The content of the file."""

    setting: PredictionSetting
    given: list[str]  # flags of the run in question
    links: list[WorkerLink]
    ideal_samples_per_second: float  # every worker computes all the time
    rate: float  # share of that which the proposal had to reach
    predicted: list[Predicted]  # from true to lossy
    left_out: list[Excluded]
    proposal: int  # index in `predicted`
    reached: bool  # whether it reaches `rate`
    script: list[str] = dataclasses.field(default_factory=list)  # its path, its arguments
    schema: int = _SCHEMA


def digest_of(method: Method) -> str:
    """Return a digest that two compositions share only if all their settings are equal."""
    text = "\n".join(f"{name}={value}" for name, value in method.fingerprint())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load(path: pathlib.Path) -> Recommendation:
    """Read an Advisor's file.

    Raises:
        ConfigurationError: It cannot be read, or is not an Advisor's.
    """
    try:
        advice = Recommendation.from_dict(parse_json(read_bounded(path)))
        if advice.schema != _SCHEMA or advice.proposal >= len(advice.predicted):
            raise ValueError(f"schema {advice.schema}, proposal {advice.proposal}")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is not an advice file of this version ({error}); name the {ADVICE_FILE} that "
            "--type_node=Advisor has written."
        ) from error
    return advice


def of_run(run: Run) -> tuple[pathlib.Path, Recommendation] | None:
    """Return the recommendation to compare a run with: that of --advice, or of its folder.

    Raises:
        ConfigurationError: As `load`.
    """
    path = pathlib.Path(run.advice) if run.advice else run.run_dir / ADVICE_FILE
    if run.advice is None and not path.is_file():
        return None
    return path, load(path)


def outcome(
    advice: Recommendation, run: Run, status: RunStatus, summary: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a summary's block ``advice``.

    Args:
        advice: The predictions.
        run: The run's settings.
        status: The run's last status.
        summary: The run's figures.

    Returns:
        ``predicted``, ``measured`` and ``off_by`` (predicted / measured - 1) by name; without a
        prediction of this run ``predicted`` is None, and ``why`` is the reason.
    """
    names = [field.name for field in dataclasses.fields(Prediction)]
    measured = {name: summary[name] for name in names}
    digest = digest_of(run.method)
    found = [n for n, row in enumerate(advice.predicted) if row.digest == digest]
    why = _difference(advice.setting, _setting_of(run, status))
    if not why and not found:
        why = "this composition is not among those that were predicted"
    if why:
        return {"predicted": None, "why": why, "measured": measured}
    row = advice.predicted[found[0]]
    predicted = row.prediction.to_dict()
    return {
        "flags": list(row.flags),
        "proposed": found[0] == advice.proposal,
        "predicted": predicted,
        "measured": measured,
        "off_by": {
            name: predicted[name] / value - 1 if value else None for name, value in measured.items()
        },
    }


def in_words(block: Mapping[str, Any]) -> str:
    """Return an `outcome` as one line for a log."""
    if block["predicted"] is None:
        return f"not comparable: {block['why']}"
    return ", ".join(
        f"{name} {value:.4g} predicted, {measured:.4g} measured"
        if (measured := block["measured"][name]) is not None
        else f"{name} {value:.4g} predicted"
        for name, value in block["predicted"].items()
    )


def network_of(run: Run) -> str:
    """Return the name of a run's model."""
    return run.model.path or run.model.network


def _setting_of(run: Run, status: RunStatus) -> PredictionSetting:
    """The batch size is that of the workers' steps: a Supervisor's --batch_size may differ."""
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
    """Return the first difference from the prediction's run, in words."""
    for name, value in predicted.to_dict().items():
        if (now := getattr(here, name)) != value:
            return f"the prediction is for {name} {value}, this run has {now}"
    return ""
