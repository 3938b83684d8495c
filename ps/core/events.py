"""Inputs (events) and outputs (actions) of the PS core, as plain data without sockets or clocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.ops.downlink.types import Operation, RelayedRounds
from thinwire.ops.printable import printable
from thinwire.ops.sync.base import Draw, Joiners
from thinwire.ops.types import Block, State, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Float32
    from thinwire.ops.wire.blocks import WireBlock

#: Characters of an exception's text that a refusal quotes.
_LONGEST_CAUSE = 200


@dataclasses.dataclass(frozen=True)
class Join:
    """A worker sent its Hello; `incarnation` identifies the worker's process."""

    worker: int
    incarnation: int
    reconnects: bool  # the worker states that this incarnation has joined before
    peer: str  # address of the worker, for messages
    # On a following shard: epoch in shard 0's Welcome to this incarnation; 0: not known.
    epoch: int = 0


@dataclasses.dataclass(frozen=True)
class Pull:
    """A worker requests the model."""

    worker: int
    incarnation: int
    base_version: int | None  # version of the worker's weights; None: the worker has no weights
    generation: int  # generation of the shard that sent these weights


@dataclasses.dataclass(frozen=True)
class Push:
    """A worker pushes one update, which is validated, decoded and finite."""

    worker: int
    incarnation: int
    step: int
    base_version: int
    generation: int
    epoch: int
    update: Update
    samples: int
    local_steps: int
    loss: float | None  # None: the worker does not know its loss
    aux: Float32 | None = None  # [m] values to be averaged over the workers; only to shard 0
    base_checksum: int | None = None  # CRC-32 of the worker's weights of this shard
    num_bytes: int = 0  # size of the coded update
    lag: int = 0  # base_version minus the version that the update was computed at
    learning_rate: float | None = None  # rate set by the script; None: the script has set no rate
    loss_scale: float = 0.0  # factor of the loss when the update was computed; 0: no factor
    overflow: bool = False  # the gradient overflowed at this loss scale, and the update is empty
    optimizer: int = 0  # number of the script's optimizer that steps with this update
    repeats_batch: bool = False  # an earlier push has counted the examples of this push
    batch_parts: int = 0  # parts of the script's batches; nb_workers parts are one batch
    change: Update | None = None  # change of the weights by the script since the last reply
    blocks: tuple[Block | WireBlock, ...] | None = None  # coded update, if it may be relayed
    # Largest magnitude in the update and the change; None: not computed.
    peak: float | None = dataclasses.field(default=None, compare=False)
    # Message and payload pieces as received, for the journal; None: not stored.
    coded: tuple[Any, Sequence[Any]] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    @property
    def computed_at(self) -> int:
        """Version that the update was computed at."""
        return self.base_version - self.lag

    @property
    def num_decoded_bytes(self) -> int:
        """Bytes of the decoded update and of the decoded change."""
        return self.update.num_bytes + (self.change.num_bytes if self.change else 0)

    @property
    def is_copy(self) -> bool:
        """Whether the push is no update but a copy of the weights that the workers hold."""
        return self.samples == self.local_steps == 0 and self.update.indices is None


@dataclasses.dataclass(frozen=True)
class Query:
    """A worker queries whether to push now or to take another local step.

    A query with `local_steps` 0 reports that the worker begins a round.
    """

    worker: int
    incarnation: int
    step: int  # step of the worker's next push
    local_steps: int  # local steps of the worker in this round
    step_seconds: float  # duration of the last local step
    age_seconds: float  # time since the end of the last local step
    query_seconds: float  # round trip time of the last query; 0: the worker has sent no query


@dataclasses.dataclass(frozen=True)
class EvaluationPull:
    """An observer (the evaluator, for example) requests the whole model."""

    observer: int  # number of the observer's connection on this shard


@dataclasses.dataclass(frozen=True)
class WorkerAlive:
    """A message or heartbeat of a worker arrived."""

    worker: int


@dataclasses.dataclass(frozen=True)
class WorkerDisconnected:
    """A worker's stream broke; the worker may reconnect before its lease ends."""

    worker: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class Leave:
    """A worker leaves the run; `cause` is "diverged" if its gradients stay non-finite."""

    worker: int
    incarnation: int
    cause: str


@dataclasses.dataclass(frozen=True)
class GroupAssignment:
    """Groups of workers, formed during the run."""

    epoch: int  # epoch in which the groups came into force
    groups: tuple[tuple[int, ...], ...]  # ids of all workers, live or not, by group
    after: Mapping[int, int]  # live worker -> its last step in the previous groups


@dataclasses.dataclass(frozen=True)
class MembershipEpoch:
    """Shard 0 announces the live workers to the following shards."""

    number: int
    live: tuple[int, ...]
    started: bool
    formed: GroupAssignment | None = None  # newest groups; None: the groups of the run's start
    incarnations: tuple[int, ...] = ()  # incarnation of each worker in `live`; () or 0: not known
    draws: tuple[Draw, ...] = ()  # workers drawn for the newest rounds, if workers are drawn
    joiners: tuple[Joiners, ...] = ()  # live workers that have finished no round at shard 0
    # Only if rounds at shard 0 are stalled: worker -> newest step released or given up there.
    over: Mapping[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class WorkerIncarnation:
    """One process of a worker."""

    worker: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class WorkerUnreachable:
    """A following shard reports to shard 0 that a live worker was silent there for a lease."""

    member: WorkerIncarnation


@dataclasses.dataclass(frozen=True)
class PushRejected:
    """A stream handler refused a push before the push became an event."""

    worker: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Stop:
    """End the run: requested by the Supervisor, a signal, or shard 0."""

    reason: str


@dataclasses.dataclass(frozen=True)
class ProcessStalled:
    """The shard's process was stopped for some seconds and received no messages in that time."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Tick:
    """Time has passed, so a deadline of `PsCore.next_deadline` may be due."""


@dataclasses.dataclass(frozen=True)
class Failed:
    """The core raised an exception over the previous event, which a worker caused.

    The core expels that worker; all other workers continue.
    """

    worker: int
    incarnation: int  # 0: the previous event names no incarnation
    step: int  # step of the push; 0: the previous event was no push
    is_hello: bool
    cause: str

    @staticmethod
    def of(event: OfWorker, error: Exception) -> Failed:
        """Return the event that replaces an event over which the core raised `error`."""
        return Failed(
            event.worker,
            getattr(event, "incarnation", 0),
            event.step if isinstance(event, Push) else 0,
            isinstance(event, Join),
            printable(f"{type(error).__name__}: {error}", _LONGEST_CAUSE),
        )


#: Events that workers cause.
OfWorker = Join | Pull | Push | Query | WorkerAlive | WorkerDisconnected | Leave | PushRejected
Event = (
    OfWorker
    | EvaluationPull
    | MembershipEpoch
    | WorkerUnreachable
    | Stop
    | ProcessStalled
    | Tick
    | Failed
)


@dataclasses.dataclass(frozen=True)
class Welcome:
    """Answers a Hello: the worker is admitted and may pull."""

    worker: int
    incarnation: int
    last_step: int
    knows_worker: bool
    epoch: int
    version: int


@dataclasses.dataclass(frozen=True)
class Reject:
    """Rejects a Hello, a pull (`step` 0) or a push; `reason` names a Reason of the wire format.

    A notice (`is_notice`) answers no request: the worker has no open request on this shard.
    """

    worker: int
    incarnation: int
    reason: str
    message: str
    step: int
    epoch: int
    retry_after_seconds: float = 0.0  # time after which the worker may send its Hello again
    is_notice: bool = False


@dataclasses.dataclass(frozen=True)
class Reply:
    """Answers a pull or a push with the model; the worker may proceed."""

    worker: int
    step: int  # step of the answered push; 0: the reply answers a pull
    operation: Operation
    # An update, or coded blocks (one for each slice), or rounds that the worker repeats.
    update: Update | tuple[Block, ...] | RelayedRounds
    version: int
    epoch: int
    learning_rate: float
    samples: int
    stop_reason: str | None  # why the run accepts no more updates; None: the run continues
    held_seconds: float = 0.0  # time from the request to this reply
    staleness: int = 0  # versions applied between the computation and the merge of the newest push
    aux: Float32 | None = None  # [m] means over the workers, shared with the core: read-only
    loss_scale: float = 0.0  # factor of the loss for the next gradients; 0: no factor
    # For each optimizer of a script: batch count at which to read its learning rate schedule.
    schedule_counts: tuple[int, ...] = ()

    @property
    def stop(self) -> bool:
        """Whether the run accepts no more updates."""
        return self.stop_reason is not None


@dataclasses.dataclass(frozen=True)
class Answer:
    """Answers a Query: push now (`ready`), or take another local step."""

    worker: int
    step: int
    local_steps: int
    ready: bool


@dataclasses.dataclass(frozen=True)
class EvaluationReply:
    """Answers an EvaluationPull with the whole model."""

    observer: int
    reply: Reply


@dataclasses.dataclass(frozen=True)
class NewEpoch:
    """Membership changed: send this epoch to the following shards."""

    epoch: MembershipEpoch


@dataclasses.dataclass(frozen=True)
class WorkersUnreachable:
    """Live workers were silent on this shard for a whole lease: report the workers to shard 0."""

    members: tuple[WorkerIncarnation, ...]


@dataclasses.dataclass(frozen=True)
class GroupsChanged:
    """Shard 0 has formed groups from measured speeds."""

    groups: tuple[tuple[int, ...], ...]
    speeds: Mapping[int, float]  # worker -> samples per second


@dataclasses.dataclass(frozen=True)
class SaveSnapshot:
    """Write this durable state to disk; its arrays do not change with the core's arrays."""

    version: int
    state: State


@dataclasses.dataclass(frozen=True)
class RunEnded:
    """The run has ended: the shard applies no more updates."""

    reason: str


Action = (
    Welcome
    | Reject
    | Reply
    | Answer
    | EvaluationReply
    | NewEpoch
    | WorkersUnreachable
    | GroupsChanged
    | SaveSnapshot
    | RunEnded
)
