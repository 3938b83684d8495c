"""What every role needs to know of a run: read once from the command line, then passed around."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from thinwire.ops.aggregation.outliers import Guards
from thinwire.ops.methods.method import Method
from thinwire.ops.offer import FROM_FLAGS, FROM_WORKER
from thinwire.ops.optimizers.schedule import Budget, RateInRound, Schedule
from thinwire.ops.routing.base import Transport
from thinwire.ops.types import ConfigurationError, Link
from thinwire.runtime.run import signals
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials
from thinwire.runtime.run.target import ACCURACY_REACHED, REACHED, Target

#: Exit codes of every role (docs/reference/operations.md).
EXIT_DONE = 0
EXIT_BAD_FLAG = 1
EXIT_SCRIPT = 1
EXIT_CONFIGURATION = 2
EXIT_UNREACHABLE = 3
EXIT_REFUSED = 4
EXIT_DIVERGED = 5
EXIT_INTERRUPTED = signals.EXIT_INTERRUPTED

#: How long an interrupted run waits for pushes that are on their way.
DRAIN_SECONDS = 1.5

#: Stop reasons that the scripts of a run bring about: all have ended; one has raised an error; one
#: has ended while another trains on.
FINISHED, SCRIPT_FAILED, RETURNED_EARLY = "finished", "script_failed", "returned_early"

#: Those that leave a run which the same command begins again.
SCRIPT_FAILURES = (SCRIPT_FAILED, RETURNED_EARLY)

#: Stop reason of a server that workers came to, and none could be admitted.
NOBODY_ADMITTED = "nobody_admitted"
#: Why a run stopped -> the exit code of its nodes; every other reason is a run that is done.
EXIT_OF_STOP = {
    "interrupted": EXIT_INTERRUPTED,
    "diverged": EXIT_DIVERGED,
    SCRIPT_FAILED: EXIT_SCRIPT,
    RETURNED_EARLY: EXIT_SCRIPT,
    NOBODY_ADMITTED: EXIT_REFUSED,
    "journal_failed": EXIT_CONFIGURATION,  # a PS's disk does not take what is to be kept
}

#: Stop reasons of a run that reached its target.
TARGET_REASONS = (ACCURACY_REACHED, REACHED)
#: Stop reasons of a run that reached one of its limits, which each other is named after.
LIMIT_REASONS = ("iter_max", "epochs", "max_seconds", *TARGET_REASONS)
#: Stop reasons of a run that reached an end of its own.
END_REASONS = (*LIMIT_REASONS, FINISHED)


class Diverged(Exception):
    """Gradients or weights stayed non-finite. Exit code 5."""


@dataclasses.dataclass(frozen=True)
class ModelChoice:
    """Which model: a built-in network, or the user's file."""

    network: str
    path: str | None  # --model
    image_size: int
    image_depth: int
    nb_classes: int
    model_from: str = FROM_FLAGS  # who names it to a PS
    task: str = "classification"  # what it is for


@dataclasses.dataclass(frozen=True)
class DataChoice:
    """Which examples, and who gets which."""

    dataset: str
    data_dir: str | None
    scaling: str | None  # None: the data set's usual one
    partition: str
    sharding_file: str | None
    dirichlet_alpha: float | None = None  # of partition dirichlet
    no_block_shuffle: bool = False  # every epoch of partition class in the order by label
    augment: str | None = None  # of training images; None: the data set's usual one
    batch: str | None = None  # whose a script's batch size is; None: as the method's workers step
    shard: str = "auto"  # whether scripts share what each of them gives to `fit`
    partition_file: str | None = None  # of partition positions
    whole_epochs: bool = False  # no mini-batch spans two passes over a worker's examples


@dataclasses.dataclass(frozen=True)
class Run:
    """Settings common to all roles."""

    type_node: str
    method: Method
    nb_workers: int
    addresses: tuple[str, ...]  # host:port of every shard
    seed: int
    run_dir: pathlib.Path
    overwrite: bool
    model: ModelChoice
    data: DataChoice
    batch_size: int
    schedule: Schedule
    iter_max: int | None  # None: no limit
    epochs: float | None
    max_seconds: float | None
    target: Target | None  # of an evaluation, that ends the run
    kernels: str
    device: str
    lease_seconds: float
    checkpoint_interval_seconds: float
    keep_checkpoints: int
    reconnect_timeout_seconds: float
    transport: Transport = dataclasses.field(
        default_factory=Transport
    )  # of datagrams, where the router sends any
    guards: Guards = dataclasses.field(default_factory=Guards)  # against faulty devices
    dp_delta: float = 1e-5  # at which the accountant gives epsilon
    top5: bool = False  # evaluations also count labels among the best five answers
    advice: str | None = None  # an Advisor's file to compare the run with; None: RUN_DIR's, if any
    on_metrics: str | None = None  # module:function that gets each record; None: nobody
    credentials: Credentials = NO_CREDENTIALS  # of this node
    checkpoint_dir: str | None = None  # of PS, a folder or an address; None: in run_dir
    report_dir: str | None = None  # address where a Supervisor's records are kept, too
    metrics_port: int = 0  # where this node's figures are read; 0: nowhere
    metrics_host: str = "127.0.0.1"
    metrics_login: str | None = None  # file with name and password of its readers
    clip_norm: float = 0.0  # of workers that have the flags of this node
    worker_weight_decay: float = 0.0  # likewise
    resume: bool = False  # also a run that was trained by other code, or whose script failed

    @property
    def nb_ps(self) -> int:
        """Number of PS shards."""
        return len(self.addresses)

    @property
    def model_is_offered(self) -> bool:
        """Whether a PS has its model from the first worker that it admits."""
        return self.model.model_from == FROM_WORKER

    def budget(self, num_examples: int) -> Budget:
        """Return what ends the run; `num_examples` are of the training set, 0: not known."""
        examples = self.epochs and num_examples and max(1, round(self.epochs * num_examples))
        return Budget(self.iter_max, examples or None)

    def rate_in_round(self, num_examples: int) -> RateInRound | None:
        """Return what a worker reads the rate of its local steps at; None: the shards' replies."""
        if not self.schedule.goes_on_in_rounds:
            return None
        longest = self.method.pacer.longest_round
        return RateInRound(self.schedule, self.budget(num_examples), self.nb_workers, longest)


def per_worker(values: Sequence[float], nb_workers: int, flag: str) -> tuple[float, ...]:
    """Spread one value, or one per worker, over all workers.

    Raises:
        ConfigurationError: Another number of values.
    """
    if len(values) == 1:
        return tuple(values) * nb_workers
    if len(values) != nb_workers:
        raise ConfigurationError(
            f"--{flag} has {len(values)} values; give one, or one for each of the "
            f"{nb_workers} workers (--nb_workers)."
        )
    return tuple(values)


def links(columns: Mapping[str, Sequence[float]], nb_workers: int) -> tuple[Link, ...]:
    """Return the emulated link of every worker, in order of id.

    Args:
        columns: Field of Link -> one value, or one per worker.
        nb_workers: How many there are.

    Raises:
        ConfigurationError: Another number of values.
    """
    spread = [per_worker(values, nb_workers, f"link_{name}") for name, values in columns.items()]
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*spread, strict=True))
    return tuple(Link(**row) for row in rows)


def limit_of(run: Run, reason: str | None) -> float | str | None:
    """Return the limit of a stop reason, if it has one and it was given; a target as its text."""
    if reason in TARGET_REASONS:
        return str(run.target) if run.target and run.target.stop_reason == reason else None
    return getattr(run, reason) if reason in LIMIT_REASONS else None


def is_finished(run: Run, reason: str | None, reached: float | str | None) -> bool:
    """Return whether a run that once ended this way has nothing left to do.

    Args:
        run: The settings of now; a raised limit makes the run go on.
        reason: Why it ended then.
        reached: How far it had come by the measure of that reason: the `limit_of` then, or more.
    """
    if reason == FINISHED:
        return True
    if reason in TARGET_REASONS:
        return run.target is not None and run.target.is_implied_by(reached)
    limit = limit_of(run, reason)
    return limit is not None and reached is not None and float(limit) <= float(reached)
