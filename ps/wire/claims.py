"""What a worker may claim in numbers: bounds of what is possible for it, checked while decoding.

Workers count and measure for themselves, and a shard cannot count again. But whatever no worker of
this run can have done is refused before the core gets it, with a message that names the field,
its value and the bound. What is within the bounds is harmless to everybody but the one who claims
it, and to how soon a run of --epochs ends.
"""

from __future__ import annotations

import dataclasses

from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.methods.method import Method
from thinwire.ops.offer import LARGEST_SCALE, MOST_BATCHES, SMALLEST_SCALE
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed

#: Of steps, versions, and whatever a worker counts: exact in every number format on the way, and
#: so far below 2**64 that whoever takes over a worker's number can count on from any of them.
MOST_COUNTED = 1 << 53
#: Of anything that a worker may have measured.
MOST_SECONDS = 1e6
#: Of a rate that a script has set.
_LARGEST_RATE = 1e6
#: Where the size of the training set is not known: more than a device holds in a mini-batch.
_LARGEST_BATCH = 1 << 24
#: Where a round has no limit (--pacer=esync): half an hour of steps of a tenth of a millisecond.
_MOST_LOCAL_STEPS = 1 << 24
#: Mini-batches in a row that a worker leaves out, as they are not finite, before it gives up.
_MOST_LEFT_OUT = 100
#: Of one push, whatever follows from the others.
_MOST_SAMPLES = (1 << 31) - 1
_OF_PACER = " (of a round, by --pacer, --local_steps and --max_local_steps)"


@dataclasses.dataclass(frozen=True)
class ClaimBounds:
    """The largest numbers that a worker of a run can claim honestly.

    ======================= =====================================================================
    step                    1 to 2**53. Steps need not be consecutive: refused updates use up a
                            number each, and a PS that came back from a snapshot meets workers
                            that are ahead of it.
    base_version            0 to 2**53. It may be ahead of the shard, which then refuses it: a crash
                            has undone updates.
    lag                     0 without --overlap. With it, up to base_version: nothing was computed
                            before version 0, and nobody knows how many updates of others fall
                            between two of a slow worker.
    local_steps             1 to what the pacer lets a round have: 1, --local_steps, or
                            --max_local_steps; 2**24 where that is no limit.
    samples                 At least one, and at most a largest batch, for each local step. No
                            batch is larger than the training set. Its size is known where --epochs
                            counts by it; else 2**24. Never above 2**31 - 1. None in a round of one
                            step that a worker without a row left sits out.
    learning_rate           Finite and not negative; at most 1e6 where the optimizer steps with it.
    batch_parts             Of the script's batches; nb_workers parts are one. At most two batches
                            for each local step, as at an end of an epoch that leaves a rest; and
                            for each of a hundred mini-batches before, which were not finite.
    loss_scale              0 without a LossScaleOptimizer; with it finite and above 0.
    overflow                Only with a loss scale, and then without blocks.
    changes                 None where workers sum among themselves, or updates are measured.
    ..._seconds             0 to 1e6; not NaN.
    ======================= =====================================================================

    A mere copy of the model has no steps and no samples; nor has a round without an example, whose
    push has no blocks either. A loss that is not finite is no claim but
    a mishap, which `PushDecoder` reports apart. The defaults are the bounds of all methods
    together: journals are read with them, for their events were checked when they arrived.
    """

    most_local_steps: int = _MOST_SAMPLES
    largest_batch: int = _MOST_SAMPLES
    lags: bool = True  # updates may be computed at an older version than the worker holds
    scales_loss: bool = True  # a script has a LossScaleOptimizer
    takes_changes: bool = True  # a script may change weights itself
    nb_workers: int = _MOST_SAMPLES  # parts that make one batch of the script

    @staticmethod
    def of(
        method: Method,
        num_train: int | None = None,
        scales_loss: bool = False,
        measures: bool = False,
        nb_workers: int = 1,
    ) -> ClaimBounds:
        """Return the bounds of a run.

        Args:
            method: Its composition.
            num_train: Size of the training set; None: not known.
            scales_loss: Whether a script has a LossScaleOptimizer.
            measures: Whether the norms of updates are compared.
            nb_workers: Number of workers in the run.
        """
        most_local_steps = method.pacer.longest_round or _MOST_LOCAL_STEPS
        batch = num_train or _LARGEST_BATCH
        takes_changes = method.collective == THROUGH_PS and not measures
        return ClaimBounds(
            *(most_local_steps, batch, method.overlap, scales_loss, takes_changes, nb_workers)
        )

    def check_push(self, push: pb.Push) -> None:
        """Check everything that a push counts.

        Raises:
            Malformed: No worker can have counted that.
        """
        _check("step", push.step, 1, MOST_COUNTED)
        _check("base_version", push.base_version, 0, MOST_COUNTED)
        why = " (it is base_version)" if self.lags else " (only with --overlap it is more)"
        _check("lag", push.lag, 0, push.base_version if self.lags else 0, why)
        if not 0 <= push.learning_rate < float("inf"):
            raise Malformed(
                f"learning_rate {push.learning_rate}: expected a finite rate, not negative"
            )
        if push.sets_rate:
            _check("learning_rate", push.learning_rate, 0, _LARGEST_RATE)
        self._check_scale(push)
        self._check_parts(push)
        if push.changes and not self.takes_changes:
            raise Malformed(
                "changes: the script has set weights itself, and this run measures updates "
                "(--max_update_norm, --update_norm_factor), or its workers sum among themselves "
                "(--collective); expected none. Leave these flags out."
            )
        if push.kind == pb.UPDATE_KIND_VALUES and push.samples == push.local_steps == 0:
            return
        if push.kind == pb.UPDATE_KIND_DELTA and push.samples == push.local_steps == 0:
            if push.blocks or push.more:
                raise Malformed(
                    f"step {push.step}: an update of no examples; expected no blocks, as of a "
                    "round in which a worker had none"
                )
            return
        _check("local_steps", push.local_steps, 1, self.most_local_steps, _OF_PACER)
        most = min(_MOST_SAMPLES, push.local_steps * self.largest_batch)
        of_what = "one at least in several local steps, and at most the training set for each"
        least = 1 if push.local_steps > 1 else 0
        _check("samples", push.samples, least, most, f" ({of_what} that the PS counts)")

    def _check_parts(self, push: pb.Push) -> None:
        """Check how much of the script's batches a push stands for."""
        num_batches = max(1, push.local_steps) + _MOST_LEFT_OUT
        most = min(_MOST_SAMPLES, MOST_BATCHES * self.nb_workers * num_batches)
        _check("batch_parts", push.batch_parts, 0, most, " (two batches for each mini-batch)")

    def _check_scale(self, push: pb.Push) -> None:
        """Check the loss scale of a push, and that an overflow brings nothing."""
        least, most = (SMALLEST_SCALE, LARGEST_SCALE) if self.scales_loss else (0, 0)
        if push.loss_scale or push.overflow:
            why = "" if self.scales_loss else " (this run scales no loss)"
            _check("loss_scale", push.loss_scale, least, most, why)
        if push.overflow and (push.blocks or push.more or push.HasField("manifest")):
            raise Malformed(f"step {push.step}: an overflow with an update; expected no blocks")

    def check_query(self, query: pb.Query) -> None:
        """Check everything that a query counts and measures.

        Raises:
            Malformed: No worker can have counted or measured that.
        """
        _check("step", query.step, 0, MOST_COUNTED)
        _check("local_steps", query.local_steps, 0, self.most_local_steps, _OF_PACER)
        for name in ("step_seconds", "age_seconds", "query_seconds"):
            _check(name, getattr(query, name), 0, MOST_SECONDS)

    def check_pull(self, pull: pb.Pull) -> None:
        """Check the version that a worker claims to have.

        Raises:
            Malformed: No shard gets that far.
        """
        _check("base_version", pull.base_version, 0, MOST_COUNTED)


def _check(name: str, value: float, least: float, most: float, why: str = "") -> None:
    if not least <= value <= most:  # NaN fails as well
        raise Malformed(
            f"{name} {value}: expected {least} to {most}{why}. Install the same Thinwire on all "
            "nodes, and give them the same flags."
        )
