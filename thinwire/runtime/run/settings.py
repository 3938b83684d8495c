"""Settings of a training run that every role needs, parsed once from the command line."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

from thinwire.ops.aggregation.outliers import Guards
from thinwire.ops.methods.method import Method
from thinwire.ops.offer import FROM_FLAGS, FROM_WORKER
from thinwire.ops.optimizers.schedule import Budget, RateInRound, Schedule
from thinwire.ops.routing.base import Transport
from thinwire.ops.types import ConfigurationError, Link
from thinwire.runtime.run import signals
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials
from thinwire.runtime.run.own_policies import OwnPolicies
from thinwire.runtime.run.target import ACCURACY_REACHED, REACHED, Target

Value = TypeVar("Value")
#: Exit codes of a node's process in every role (docs/reference/operations.md).
EXIT_DONE = 0
EXIT_BAD_FLAG = 1
EXIT_SCRIPT = 1
EXIT_CONFIGURATION = 2
EXIT_UNREACHABLE = 3
EXIT_REFUSED = 4
EXIT_DIVERGED = 5
EXIT_INTERRUPTED = signals.EXIT_INTERRUPTED

#: Time for which a PS of an interrupted run waits for pushes that are in transit, in seconds.
DRAIN_SECONDS = 1.5

#: Stop reasons that workers' scripts cause: all scripts have ended, a script has raised an error,
#: or a script has ended while another script still trains.
FINISHED, SCRIPT_FAILED, RETURNED_EARLY = "finished", "script_failed", "returned_early"

#: Stop reasons after which the same command repeats the run, instead of reporting its end.
SCRIPT_FAILURES = (SCRIPT_FAILED, RETURNED_EARLY)

#: Stop reason of a run whose PS rejected every worker that connected.
NOBODY_ADMITTED = "nobody_admitted"
#: Stop reason -> exit code of the run's nodes. A stop reason without an entry means EXIT_DONE.
EXIT_OF_STOP = {
    "interrupted": EXIT_INTERRUPTED,
    "diverged": EXIT_DIVERGED,
    SCRIPT_FAILED: EXIT_SCRIPT,
    RETURNED_EARLY: EXIT_SCRIPT,
    NOBODY_ADMITTED: EXIT_REFUSED,
    "journal_failed": EXIT_CONFIGURATION,  # a PS could not write its journal to the disk
}

#: Stop reasons of a run that reached its target.
TARGET_REASONS = (ACCURACY_REACHED, REACHED)
#: Stop reasons of a run that reached a limit or its target. The stop reason of a limit is the name
#: of the limit's flag.
LIMIT_REASONS = ("iter_max", "epochs", "max_seconds", *TARGET_REASONS)
#: Stop reasons of a run that ended as planned: at a limit, at its target, or with its scripts.
END_REASONS = (*LIMIT_REASONS, FINISHED)


class Diverged(Exception):
    """A run's gradients or weights stayed NaN or infinite; the node's exit code is 5."""


@dataclasses.dataclass(frozen=True)
class ModelChoice:
    """Flags that choose the model of a run: a built-in network, or a user's model file."""

    network: str
    path: str | None  # value of --model: the user's file; None for a built-in network
    image_size: int
    image_depth: int
    nb_classes: int
    model_from: str = FROM_FLAGS  # source of a PS's model: the PS's flags or a worker's script
    task: str = "classification"  # task that the model is trained for


@dataclasses.dataclass(frozen=True)
class DataChoice:
    """Flags that choose the training examples and their partition among the workers."""

    dataset: str
    data_dir: str | None
    scaling: str | None  # scaling of the model's inputs; None: default of the data set
    partition: str
    sharding_file: str | None
    dirichlet_alpha: float | None = None  # concentration of --partition=dirichlet
    no_block_shuffle: bool = False  # True: --partition=class keeps the order by label in each epoch
    augment: str | None = None  # augmentation of training images; None: default of the data set
    batch: str | None = (
        None  # script's batch size is for all workers ("global") or each one; None: by method
    )
    shard: str = "auto"  # "auto" divides a script's data among workers; "off" does not
    partition_file: str | None = None  # file of row numbers per worker, for --partition=positions
    whole_epochs: bool = False  # True: no mini-batch spans two passes over a worker's examples


@dataclasses.dataclass(frozen=True)
class Run:
    """Settings of a training run that are common to all roles."""

    type_node: str
    method: Method
    nb_workers: int
    addresses: tuple[str, ...]  # host:port of every PS shard, in order of shard id
    seed: int
    run_dir: pathlib.Path
    overwrite: bool
    model: ModelChoice
    data: DataChoice
    batch_size: int
    schedule: Schedule
    iter_max: int | None  # number of updates at which the run ends; None: no limit
    epochs: float | None  # passes over the training set at which the run ends; None: no limit
    max_seconds: float | None  # training time at which the run ends, in seconds; None: no limit
    target: Target | None  # metric bound at which an evaluation ends the run; None: no target
    kernels: str
    device: str
    lease_seconds: float
    checkpoint_interval_seconds: float
    keep_checkpoints: int
    reconnect_timeout_seconds: float
    transport: Transport = dataclasses.field(
        default_factory=Transport
    )  # settings of the datagrams that some routers send instead of using gRPC
    guards: Guards = dataclasses.field(default_factory=Guards)  # guards against faulty updates
    dp_delta: float = 1e-5  # delta for which the privacy accountant reports epsilon
    top5: bool = False  # True: evaluations also compute the top-5 accuracy
    advice: str | None = None  # file of predictions to compare; None: advice.json in run_dir
    on_metrics: str | None = None  # module:function called with every record; None: no function
    policy: OwnPolicies | None = None  # the user's file of policies, --policy
    credentials: Credentials = NO_CREDENTIALS  # TLS certificate and token of this node
    checkpoint_dir: str | None = None  # folder or address of a PS's checkpoints; None: run_dir
    report_dir: str | None = None  # address for copies of the Supervisor's records; None: no copy
    metrics_port: int = 0  # port on which this node serves /metrics; 0: no server
    metrics_host: str = "127.0.0.1"
    metrics_login: str | None = None  # file with the login for /metrics; None: no login
    clip_norm: float = 0.0  # L2 norm to which a worker clips gradients; 0: no clipping
    worker_weight_decay: float = 0.0  # coefficient of a worker's weight decay
    resume: bool = False  # True: continue a run despite changed code or a script's failure

    @property
    def nb_ps(self) -> int:
        """Number of PS shards of the run."""
        return len(self.addresses)

    @property
    def model_is_offered(self) -> bool:
        """True if a PS receives the model from a worker's script, not from the PS's flags."""
        return self.model.model_from == FROM_WORKER

    def budget(self, num_examples: int) -> Budget:
        """Return the limits of the run's length in model updates and in training examples.

        Args:
            num_examples: Number of examples of the training set; 0 if not known.
        """
        examples = self.epochs and num_examples and max(1, round(self.epochs * num_examples))
        return Budget(self.iter_max, examples or None)

    def rate_in_round(self, num_examples: int) -> RateInRound | None:
        """Return the learning-rate schedule that a worker uses for its local steps, or None.

        A worker without a learning-rate schedule takes the learning rate from the PS shards'
        replies.

        Args:
            num_examples: Number of examples of the training set; 0 if not known.
        """
        if not self.schedule.goes_on_in_rounds:
            return None
        longest = self.method.pacer.longest_round
        return RateInRound(self.schedule, self.budget(num_examples), self.nb_workers, longest)


def per_worker(values: Sequence[Value], nb_workers: int, flag: str) -> tuple[Value, ...]:
    """Return one value per worker from a flag's values; a single value counts for all workers.

    Raises:
        ConfigurationError: A flag's number of values is neither 1 nor the number of workers.
    """
    if len(values) == 1:
        return tuple(values) * nb_workers
    if len(values) != nb_workers:
        raise ConfigurationError(
            f"--{flag} has {len(values)} values; expected one value, or one value for each of the "
            f"{nb_workers} workers (--nb_workers)."
        )
    return tuple(values)


def links(columns: Mapping[str, Sequence[float]], nb_workers: int) -> tuple[Link, ...]:
    """Return the emulated network link of every worker, in order of worker id.

    Args:
        columns: Name of a field of `Link` -> one value for all workers, or one value per worker.
        nb_workers: Number of workers of the run.

    Raises:
        ConfigurationError: A flag's number of values is neither 1 nor the number of workers.
    """
    spread = [per_worker(values, nb_workers, f"link_{name}") for name, values in columns.items()]
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*spread, strict=True))
    return tuple(Link(**row) for row in rows)


def limit_of(run: Run, reason: str | None) -> float | str | None:
    """Return the limit (or target, as text) that a run's stop reason names; None if not set."""
    if reason in TARGET_REASONS:
        return str(run.target) if run.target and run.target.stop_reason == reason else None
    return getattr(run, reason) if reason in LIMIT_REASONS else None


def is_finished(run: Run, reason: str | None, reached: float | str | None) -> bool:
    """Return True if a run that has ended needs no more training under the present settings.

    Args:
        run: Present settings of the run. If they raise the limit that ended the run, the run
            continues.
        reason: Stop reason with which the run ended.
        reached: Progress of the run at its end, in the unit of the limit that the stop reason
            names, at least the value of `limit_of` at the end.
    """
    if reason == FINISHED:
        return True
    if reason in TARGET_REASONS:
        return run.target is not None and run.target.is_implied_by(reached)
    limit = limit_of(run, reason)
    return limit is not None and reached is not None and float(limit) <= float(reached)
