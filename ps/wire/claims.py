"""Bounds of the numbers that a worker's message may contain, which a shard checks on decoding.

Workers count their own steps and examples, and a PS shard cannot repeat the count. A shard rejects
a number that no worker of the run can have reached. The error for a rejected number names the
field, its value and the bound. A false number within its bounds affects only the worker that
reports it, and how soon a run with --epochs ends.
"""

from __future__ import annotations

import dataclasses

from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.methods.method import Method
from thinwire.ops.offer import LARGEST_SCALE, MAX_VARIABLES, MOST_BATCHES, SMALLEST_SCALE
from thinwire.ops.optimizers.torch_groups import is_legal
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed

#: Upper bound of every count that a worker sends, for example steps and versions. 2**53 is exact in
#: every number format of the messages. A process that takes over a worker's id can continue the
#: count from any value up to 2**53 without reaching 2**64.
MOST_COUNTED = 1 << 53
#: Upper bound of any duration that a worker measured, in seconds.
MOST_SECONDS = 1e6
#: Upper bound of a learning rate that a training script sets.
_LARGEST_RATE = 1e6
#: Upper bound of a mini-batch, in examples, if the size of the training set is not known. No device
#: can hold a larger mini-batch.
_LARGEST_BATCH = 1 << 24
#: Upper bound of the local steps in one round if the pacer sets no limit (--pacer=esync). The bound
#: is half an hour of local steps that take 0.1 ms each.
_MOST_LOCAL_STEPS = 1 << 24
#: Number of consecutive mini-batches with a loss or gradient that is not finite, after which a
#: worker gives up.
_MOST_LEFT_OUT = 100
#: Upper bound of the examples of one push. The product of local steps and batch size is a second
#: bound.
_MOST_SAMPLES = (1 << 31) - 1
_OF_PACER = " (of a round, by --pacer, --local_steps and --max_local_steps)"


@dataclasses.dataclass(frozen=True)
class ClaimBounds:
    """The largest numbers that a correct worker of a run can claim.

    The `step` of a push is 1 to 2**53. Step numbers need not be consecutive: each rejected update
    uses up a step number, and after a PS has restored a snapshot, the workers' step numbers are
    ahead of the PS.

    The `base_version` of a push (the version of the worker's weights) is 0 to 2**53. A
    `base_version` may exceed the shard's version if a crash has undone updates; the shard then
    rejects the push.

    The `lag` of a push is 0 without --overlap. With --overlap, the `lag` of a push is at most
    `base_version`: no update was computed before version 0, and a shard may apply any number of
    updates between two updates of a slow worker.

    The number of `local_steps` of a push is 1 to the length of the pacer's longest round: 1,
    --local_steps, or --max_local_steps; 2**24 if the pacer has no limit.

    The number of `samples` (examples) of a push is, for each local step, at least one example and
    at most the largest batch: the size of the training set, if --epochs makes that size known, else
    2**24. The number of `samples` of a push is never above 2**31 - 1. The number of `samples` of a
    push is 0 if the round has one local step and the worker has no training example left for this
    step.

    The `learning_rate` of a push is finite and not negative, and at most 1e6 if the optimizer steps
    with this rate.

    The `batch_parts` of a push count parts of the script's batches; nb_workers parts are one batch.
    The `batch_parts` of a push are at most two batches (at the end of an epoch with a remainder)
    for each local step and for each of up to 100 mini-batches skipped before the step.

    The `loss_scale` of a push is 0 if the script has no LossScaleOptimizer, else finite and above
    0. The field `overflow` of a push is True only if the script scales its loss; the push then has
    no blocks.

    The `changes` of a push (the script's own changes of weights) are absent if workers all-reduce
    gradients, or if the shard limits the norms of updates. Durations in a worker's messages
    (`..._seconds`) are 0 to 1e6 and not NaN.

    A push that only copies the model to the shard has 0 local steps and 0 samples. If a worker had
    no examples in a round, its push has 0 local steps, 0 samples and no blocks of an update.
    `PushDecoder` reports a loss that is not finite as `NonFinite`, not as a false claim. The
    default bounds of the reported numbers are wide enough for all training methods. A shard reads
    its journal with the default bounds, because it has checked the journal's events when they
    arrived.

    Attributes:
        most_local_steps: Largest number of a worker's local optimizer steps that one push may
            cover.
        largest_batch: Largest number of training examples of one local step.
        lags: True if a push may be computed at an older version than the worker holds (--overlap).
        scales_loss: True if a training script of the run has a LossScaleOptimizer.
        takes_changes: True if a training script may change weights outside its optimizer.
        nb_workers: Number of workers, which is the number of parts of one batch of the script.
        setting_limits: For each torch optimizer of a script, the smallest and the largest legal
            value of each number in a push's settings; empty if the optimizers are not torch's.
    """

    most_local_steps: int = _MOST_SAMPLES
    largest_batch: int = _MOST_SAMPLES
    lags: bool = True
    scales_loss: bool = True
    takes_changes: bool = True
    nb_workers: int = _MOST_SAMPLES
    setting_limits: tuple[tuple[tuple[float, float], ...], ...] = ()

    @staticmethod
    def of(
        method: Method,
        num_train: int | None = None,
        scales_loss: bool = False,
        measures: bool = False,
        nb_workers: int = 1,
    ) -> ClaimBounds:
        """Return the bounds of the numbers that the workers of a run may claim.

        Args:
            method: Training method of the run.
            num_train: Number of examples in the training set; None if it is not known.
            scales_loss: True if a training script of the run has a LossScaleOptimizer.
            measures: True if the run compares the norms of updates with a limit.
            nb_workers: Number of workers in the run.
        """
        most_local_steps = method.pacer.longest_round or _MOST_LOCAL_STEPS
        batch = num_train or _LARGEST_BATCH
        takes_changes = method.collective == THROUGH_PS and not measures
        return ClaimBounds(
            *(most_local_steps, batch, method.overlap, scales_loss, takes_changes, nb_workers),
            method.server.traits.setting_limits,
        )

    def check_push(self, push: pb.Push) -> None:
        """Check the bounds of all numbers that a worker's push contains.

        Raises:
            Malformed: A number of the push is out of its bounds.
        """
        _check("step", push.step, 1, MOST_COUNTED)
        _check("base_version", push.base_version, 0, MOST_COUNTED)
        why = " (its base_version)" if self.lags else " (more only with --overlap)"
        _check("lag", push.lag, 0, push.base_version if self.lags else 0, why)
        if not 0 <= push.learning_rate < float("inf"):
            raise Malformed(
                f"the push has learning_rate {push.learning_rate}; expected finite, not negative"
            )
        if push.sets_rate:
            _check("learning_rate", push.learning_rate, 0, _LARGEST_RATE)
        self._check_scale(push)
        self._check_parts(push)
        self._check_settings(push)
        if push.changes and not self.takes_changes:
            raise Malformed(
                "the push has changes of weights outside the script's optimizer, but this run "
                "measures updates (--max_update_norm, --update_norm_factor), or its workers sum "
                "them (--collective); expected no such changes. Leave these flags out."
            )
        if push.kind == pb.UPDATE_KIND_VALUES and push.samples == push.local_steps == 0:
            return
        if push.kind == pb.UPDATE_KIND_DELTA and push.samples == push.local_steps == 0:
            if push.blocks or push.more:
                raise Malformed(
                    f"the push of step {push.step}: an update from 0 examples has blocks; "
                    "expected no blocks, because the worker had no examples in this round"
                )
            return
        _check("local_steps", push.local_steps, 1, self.most_local_steps, _OF_PACER)
        most = min(_MOST_SAMPLES, push.local_steps * self.largest_batch)
        reason = "at least one if there are several local steps, and at most the training set"
        least = 1 if push.local_steps > 1 else 0
        _check("samples", push.samples, least, most, f" ({reason} for each local step)")

    def _check_parts(self, push: pb.Push) -> None:
        num_batches = max(1, push.local_steps) + _MOST_LEFT_OUT
        most = min(_MOST_SAMPLES, MOST_BATCHES * self.nb_workers * num_batches)
        _check("batch_parts", push.batch_parts, 0, most, " (two batches per mini-batch)")

    def _check_settings(self, push: pb.Push) -> None:
        """Check the numbers of parameter groups, and the positions of parameters, in a push."""
        known = self.setting_limits
        limits = known[push.optimizer] if push.optimizer < len(known) else ()
        if push.settings and len(push.settings) != len(limits):
            raise Malformed(
                f"the push has {len(push.settings)} settings; expected {len(limits)} or none"
            )
        for value, bounds in zip(push.settings, limits, strict=False):
            if not is_legal(value, bounds):
                raise Malformed(
                    f"a setting of the push is {value}; expected {bounds[0]:g} to {bounds[1]:g}"
                )
        positions = push.without_gradient
        if len(positions) > MAX_VARIABLES or max(positions, default=0) >= MAX_VARIABLES:
            raise Malformed(
                f"the push names {len(positions)} parameters without a gradient; expected at most "
                f"{MAX_VARIABLES}, with positions below that number"
            )

    def _check_scale(self, push: pb.Push) -> None:
        """Check the loss scale of a push, and that a push with an overflow has no blocks."""
        least, most = (SMALLEST_SCALE, LARGEST_SCALE) if self.scales_loss else (0, 0)
        if push.loss_scale or push.overflow:
            why = "" if self.scales_loss else " (no script of this run has a LossScaleOptimizer)"
            _check("loss_scale", push.loss_scale, least, most, why)
        if push.overflow and (push.blocks or push.more or push.HasField("manifest")):
            raise Malformed(f"push of step {push.step}: overflow and update; expected no blocks")

    def check_query(self, query: pb.Query) -> None:
        """Check the bounds of all numbers in a query (a worker's report to the pacer).

        Raises:
            Malformed: A number of the query is out of its bounds.
        """
        _check("step", query.step, 0, MOST_COUNTED)
        _check("local_steps", query.local_steps, 0, self.most_local_steps, _OF_PACER)
        for name in ("step_seconds", "age_seconds", "query_seconds"):
            _check(name, getattr(query, name), 0, MOST_SECONDS)

    def check_pull(self, pull: pb.Pull) -> None:
        """Check the bounds of the version of the weights that a worker reports in a pull.

        Raises:
            Malformed: The claimed version is out of its bounds.
        """
        _check("base_version", pull.base_version, 0, MOST_COUNTED)


def _check(name: str, value: float, least: float, most: float, why: str = "") -> None:
    if not least <= value <= most:  # this comparison also rejects a value that is NaN
        raise Malformed(
            f"the received message has {name} {value}: expected {least} to {most}{why}. Install "
            "the same Thinwire on all nodes, and give them the same flags."
        )
