"""What goes into the PS core and what comes out: plain data, no sockets, no clocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.ops.downlink.types import Operation
from thinwire.ops.types import Block, State, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


@dataclasses.dataclass(frozen=True)
class Join:
    """A worker said Hello; `incarnation` names this life of it."""

    worker: int
    incarnation: int
    reconnects: bool  # the worker claims to be this life already
    peer: str  # for messages
    epoch: int = 0  # on a following shard: of shard 0's Welcome to this life, if it says so


@dataclasses.dataclass(frozen=True)
class Pull:
    """A worker asks for the model; it holds `base_version` of `generation`, or nothing."""

    worker: int
    incarnation: int
    base_version: int | None
    generation: int


@dataclasses.dataclass(frozen=True)
class Push:
    """One validated, decoded, finite update."""

    worker: int
    incarnation: int
    step: int
    base_version: int
    generation: int
    epoch: int
    update: Update
    samples: int
    local_steps: int
    loss: float
    aux: Float32 | None = None  # [m] what is averaged over workers; to shard 0
    base_checksum: int | None = None  # CRC-32 of what the worker has of this shard
    num_bytes: int = 0  # of the update as it was coded
    lag: int = 0  # versions from the one the update was computed at to the base version
    # The wire's message and the pieces of its payload, for a journal; None: not kept.
    coded: tuple[Any, Sequence[Any]] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    @property
    def computed_at(self) -> int:
        """The version that the update was computed at."""
        return self.base_version - self.lag

    @property
    def is_copy(self) -> bool:
        """Whether this is no update, but a copy of the weights that the workers hold."""
        return self.samples == 0


@dataclasses.dataclass(frozen=True)
class Query:
    """A worker asks whether to push or to train on; with no local steps, it begins a round."""

    worker: int
    incarnation: int
    step: int  # of the exchange it would make
    local_steps: int  # done in this round
    step_seconds: float  # the last one's duration
    age_seconds: float  # since its end
    query_seconds: float  # round trip of the last question; 0 if none yet


@dataclasses.dataclass(frozen=True)
class EvaluationPull:
    """Somebody wants to look at the whole model (an evaluation pull)."""

    observer: int


@dataclasses.dataclass(frozen=True)
class WorkerAlive:
    """Anything was heard of a worker."""

    worker: int


@dataclasses.dataclass(frozen=True)
class WorkerDisconnected:
    """A worker's stream broke; it may come back before its lease ends."""

    worker: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class Leave:
    """A worker says farewell; `cause` is "diverged" when its gradients stay non-finite."""

    worker: int
    incarnation: int
    cause: str


@dataclasses.dataclass(frozen=True)
class GroupAssignment:
    """Groups formed while the run goes on."""

    epoch: int  # that they began with
    groups: tuple[tuple[int, ...], ...]  # of all workers, live or not
    after: Mapping[int, int]  # live worker -> the last step it took in the groups before


@dataclasses.dataclass(frozen=True)
class MembershipEpoch:
    """Shard 0 says who is live (to the other shards only)."""

    number: int
    live: tuple[int, ...]
    started: bool
    formed: GroupAssignment | None = None  # the newest groups, if not those the run began with
    lives: tuple[int, ...] = ()  # the incarnation of each of `live`; () or 0: not known


@dataclasses.dataclass(frozen=True)
class WorkerIncarnation:
    """One life of a worker."""

    worker: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class WorkerUnreachable:
    """A following shard has not heard a live worker for a whole lease (to shard 0 only)."""

    life: WorkerIncarnation


@dataclasses.dataclass(frozen=True)
class PushRejected:
    """A handler refused a push before it became an event; counted here."""

    worker: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Stop:
    """End the run: a supervisor's wish, a signal, or shard 0's word."""

    reason: str


@dataclasses.dataclass(frozen=True)
class ProcessStalled:
    """This process stood still for so long, and heard nobody meanwhile."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Tick:
    """Time has passed; see `PsCore.next_deadline`."""


@dataclasses.dataclass(frozen=True)
class Failed:
    """The core did not handle the event before, which a worker caused; see `ps.core.faults`."""

    worker: int
    incarnation: int  # 0: the event did not say
    step: int  # of a push, else 0
    is_hello: bool
    cause: str


#: What workers cause.
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
    """The worker is in; it may pull."""

    worker: int
    incarnation: int
    last_step: int
    knows_worker: bool
    epoch: int
    version: int


@dataclasses.dataclass(frozen=True)
class Reject:
    """A Hello (`step` 0) or a push is not accepted; `reason` names a Reason of the wire."""

    worker: int
    incarnation: int
    reason: str
    message: str
    step: int
    epoch: int
    retry_after_seconds: float = 0.0  # of a Hello: when to say it again


@dataclasses.dataclass(frozen=True)
class Reply:
    """The worker may go on, with this."""

    worker: int
    step: int  # 0 answers a pull
    operation: Operation
    update: Update | tuple[Block, ...]  # or blocks, already cut and coded
    version: int
    epoch: int
    learning_rate: float
    samples: int
    stop_reason: str | None  # why no more updates are wanted
    held_seconds: float = 0.0  # since the question, which the rule did not let be answered
    staleness: int = 0  # of the worker's newest push
    aux: Float32 | None = None  # [m] means over workers; not to be changed

    @property
    def stop(self) -> bool:
        """Whether no more updates are wanted."""
        return self.stop_reason is not None


@dataclasses.dataclass(frozen=True)
class Answer:
    """Answers Query: push now, or take another local step."""

    worker: int
    step: int
    local_steps: int
    ready: bool


@dataclasses.dataclass(frozen=True)
class EvaluationReply:
    """Answers Observe."""

    observer: int
    reply: Reply


@dataclasses.dataclass(frozen=True)
class NewEpoch:
    """Membership changed; to be told to the other shards."""

    epoch: MembershipEpoch


@dataclasses.dataclass(frozen=True)
class WorkersUnreachable:
    """Live workers have been silent on this shard for a whole lease; to be told to shard 0."""

    lives: tuple[WorkerIncarnation, ...]


@dataclasses.dataclass(frozen=True)
class GroupsChanged:
    """Shard 0 has formed groups by the workers' speeds, in samples per second."""

    groups: tuple[tuple[int, ...], ...]
    speeds: Mapping[int, float]


@dataclasses.dataclass(frozen=True)
class SaveSnapshot:
    """State to be written; the arrays are copies."""

    version: int
    state: State


@dataclasses.dataclass(frozen=True)
class RunEnded:
    """No more updates will be applied."""

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
