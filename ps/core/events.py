"""Inputs (events) and outputs (actions) of a PS shard's state machine, as data without sockets or
clocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.ops.downlink.types import Operation, RelayedRounds
from thinwire.ops.printable import printable
from thinwire.ops.push_head import PushHead, PushOrigin
from thinwire.ops.sync.base import Draw, Joiners
from thinwire.ops.types import Block, State, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Float32
    from thinwire.ops.wire.blocks import WireBlock

#: Largest number of characters of an exception's text that a refusal quotes to the worker.
_LONGEST_CAUSE = 200


@dataclasses.dataclass(frozen=True)
class Join:
    """Event: a worker registers at the shard (Hello); `incarnation` identifies the worker's
    process.
    """

    worker: int
    incarnation: int
    reconnects: bool  # True if the worker's process has joined before
    peer: str  # network address of the worker, quoted in messages
    # On a shard other than 0: membership epoch that shard 0's Welcome to the worker's process
    # names; 0 if it is not known.
    epoch: int = 0


@dataclasses.dataclass(frozen=True)
class Pull:
    """Event: a worker requests (pulls) the model's weights."""

    worker: int
    incarnation: int
    # Version of the weights that the worker has before its pull; None if the worker has no
    # weights.
    base_version: int | None
    generation: int  # number of restarts of the shard when it sent the worker's weights


@dataclasses.dataclass(frozen=True)
class Push:
    """Event: a worker pushed one update, which has been validated and decoded and is finite."""

    worker: int
    incarnation: int
    epoch: int  # newest membership epoch that the worker has received
    head: PushHead
    origin: PushOrigin  # model of this shard that the worker held when it pushed
    update: Update
    # Values [m] of the push that shard 0 averages over the workers; None without values.
    aux: Float32 | None = None
    num_bytes: int = 0  # size of the push's coded update, in bytes
    # Change that the training script made to its weights itself since the last reply; None without
    # a change.
    change: Update | None = None
    # Coded update for a relay to other workers; None if the shard must not relay the update.
    blocks: tuple[Block | WireBlock, ...] | None = None
    # Largest magnitude of the values in `update` and `change`; None if it has not been computed.
    peak: float | None = dataclasses.field(default=None, compare=False)
    # Push message and payload pieces as received, for the journal; None if they are not stored.
    coded: tuple[Any, Sequence[Any]] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    @property
    def num_decoded_bytes(self) -> int:
        """Size of a push's decoded update and decoded change of weights together, in bytes."""
        return self.update.num_bytes + (self.change.num_bytes if self.change else 0)

    @property
    def is_copy(self) -> bool:
        """True if the push holds no update but a copy of the weights that the workers hold."""
        head = self.head
        return head.samples == head.local_steps == 0 and self.update.indices is None


@dataclasses.dataclass(frozen=True)
class Query:
    """Event: a worker queries whether to push now or to take another local step.

    A worker's Query (push now or not) with `local_steps` 0 reports that the worker begins a
    training round.
    """

    worker: int
    incarnation: int
    step: int  # step number of the worker's next push
    local_steps: int  # number of local steps that the worker has taken in this round
    step_seconds: float  # duration in seconds of the worker's last local step
    age_seconds: float  # time in seconds since the end of the worker's last local step
    # Round trip time in seconds of the worker's last query; 0 if the worker has sent no query
    # before.
    query_seconds: float


@dataclasses.dataclass(frozen=True)
class EvaluationPull:
    """Event: an observer (the evaluator, for example) requests the whole model."""

    observer: int  # number of the observer's connection on this shard


@dataclasses.dataclass(frozen=True)
class WorkerAlive:
    """Event: a message or a heartbeat of a worker arrived on this shard."""

    worker: int


@dataclasses.dataclass(frozen=True)
class WorkerDisconnected:
    """Event: the gRPC stream of a worker broke; the worker may reconnect before its lease ends."""

    worker: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class Leave:
    """Event: a worker leaves the run; `cause` is "diverged" if its gradients stay non-finite."""

    worker: int
    incarnation: int
    cause: str


@dataclasses.dataclass(frozen=True)
class GroupAssignment:
    """Groups of workers that shard 0 has formed during the run, with the membership epoch of the
    change.
    """

    epoch: int  # number of the membership epoch in which the groups came into force
    groups: tuple[tuple[int, ...], ...]  # ids of the workers in each group, live or not
    after: Mapping[int, int]  # live worker id -> last step of the worker in the previous groups


@dataclasses.dataclass(frozen=True)
class MembershipEpoch:
    """Event: shard 0 announces the list of live workers to all other shards."""

    number: int
    live: tuple[int, ...]
    started: bool
    # Newest worker groups; None for the groups of the run's start.
    formed: GroupAssignment | None = None
    # Incarnation (process) of each worker in `live`; () or 0 if it is not known.
    incarnations: tuple[int, ...] = ()
    # Workers drawn at random for the newest rounds; () if no workers are drawn.
    draws: tuple[Draw, ...] = ()
    # Live workers that have finished no round on shard 0 since they joined.
    joiners: tuple[Joiners, ...] = ()
    # Worker id -> newest step of the worker that shard 0 merged or gave up; {} unless shard 0's
    # rounds stall.
    over: Mapping[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class WorkerIncarnation:
    """One process of a worker, identified by the worker's id and the process's incarnation."""

    worker: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class WorkerUnreachable:
    """Event: another shard reports to shard 0 that a live worker was silent for a whole lease."""

    member: WorkerIncarnation


@dataclasses.dataclass(frozen=True)
class PushRejected:
    """Event: a thread of the shard refused a worker's push while it decoded the push."""

    worker: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Stop:
    """Event: the Supervisor, a signal, or shard 0 requests the end of the run."""

    reason: str


@dataclasses.dataclass(frozen=True)
class ProcessStalled:
    """Event: the shard's process was stopped for some seconds and received no messages."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Tick:
    """Event: time has passed, so the deadline that `PsCore.next_deadline` returned may be over."""


@dataclasses.dataclass(frozen=True)
class Failed:
    """Event: the shard's state machine raised an exception while it handled the previous event, of
    a worker.

    After an exception, the shard's state machine expels the worker that caused the event; all other
    workers continue.
    """

    worker: int
    # Worker's incarnation in the event that failed; 0 if the event names no incarnation.
    incarnation: int
    step: int  # step of the push that failed; 0 if the event that failed was no push
    is_hello: bool
    cause: str

    @staticmethod
    def of(event: OfWorker, error: Exception) -> Failed:
        """Return the Failed event for an event whose handling made the shard's state machine raise
        `error`.
        """
        return Failed(
            event.worker,
            getattr(event, "incarnation", 0),
            event.head.step if isinstance(event, Push) else 0,
            isinstance(event, Join),
            printable(f"{type(error).__name__}: {error}", _LONGEST_CAUSE),
        )


#: Types of events of the shard's core that workers cause.
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
    """Action: answer a worker's Hello; the worker is admitted to the run and may pull the model."""

    worker: int
    incarnation: int
    last_step: int
    knows_worker: bool
    epoch: int
    version: int


@dataclasses.dataclass(frozen=True)
class Reject:
    """Action: reject a worker's Hello, its pull of the model (`step` 0) or its push of an update.

    The `reason` of a rejection is the name of a Reason in the wire format. A rejection that is a
    notice (`is_notice`) answers no request of the worker.
    """

    worker: int
    incarnation: int
    reason: str
    message: str
    step: int
    epoch: int
    # Time in seconds after which the worker may send its Hello again.
    retry_after_seconds: float = 0.0
    is_notice: bool = False


@dataclasses.dataclass(frozen=True)
class Reply:
    """Action: answer a worker's pull or push with the model; the worker may proceed."""

    worker: int
    step: int  # step of the push that the reply answers; 0 if the reply answers a pull
    operation: Operation
    # Content of the reply to a worker: an update, or coded blocks (one for each slice of the
    # shard), or merged rounds that the worker repeats on its own weights.
    update: Update | tuple[Block, ...] | RelayedRounds
    version: int
    epoch: int
    learning_rate: float
    samples: int
    stop_reason: str | None  # reason why the run accepts no more updates; None if the run continues
    held_seconds: float = 0.0  # time in seconds from the worker's request to the shard's reply
    # Number of versions applied between the computation and the merge of the worker's newest push.
    staleness: int = 0
    # Read-only means [m] over the workers; None if the run averages no values.
    aux: Float32 | None = None
    # Factor of the loss for the worker's next gradients; 0 if losses are not scaled.
    loss_scale: float = 0.0
    # For each optimizer of a script: number of batches at which the worker reads the optimizer's
    # learning rate schedule.
    schedule_counts: tuple[int, ...] = ()

    @property
    def stop(self) -> bool:
        """True if the training run is over and the shard accepts no more updates."""
        return self.stop_reason is not None


@dataclasses.dataclass(frozen=True)
class Answer:
    """Action: answer a worker's Query: push now (`ready`), or take another local step."""

    worker: int
    step: int
    local_steps: int
    ready: bool


@dataclasses.dataclass(frozen=True)
class EvaluationReply:
    """Action: answer an observer's EvaluationPull with the whole model."""

    observer: int
    reply: Reply


@dataclasses.dataclass(frozen=True)
class NewEpoch:
    """Action: send a new membership epoch (the list of live workers) to all other shards."""

    epoch: MembershipEpoch


@dataclasses.dataclass(frozen=True)
class WorkersUnreachable:
    """Action: report to shard 0 the live workers that were silent on this shard for a lease."""

    members: tuple[WorkerIncarnation, ...]


@dataclasses.dataclass(frozen=True)
class GroupsChanged:
    """Action: report that shard 0 has formed worker groups from measured speeds."""

    groups: tuple[tuple[int, ...], ...]
    speeds: Mapping[int, float]  # worker id -> measured examples per second


@dataclasses.dataclass(frozen=True)
class SaveSnapshot:
    """Action: write the shard's durable state to disk; later updates do not change the saved
    arrays.
    """

    version: int
    state: State


@dataclasses.dataclass(frozen=True)
class RunEnded:
    """Action: announce that the run has ended; the shard applies no more updates."""

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
