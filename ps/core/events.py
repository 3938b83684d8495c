"""What goes into the PS core and what comes out: plain data, no sockets, no clocks."""

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

_LONGEST_CAUSE = 200


@dataclasses.dataclass(frozen=True)
class Join:
    """A worker sent its Hello; `incarnation` names this process of it."""

    worker: int
    incarnation: int
    reconnects: bool  # the worker claims to be this incarnation already
    peer: str  # for messages
    epoch: int = 0  # on a following shard: of shard 0's Welcome to this incarnation; 0: not known


@dataclasses.dataclass(frozen=True)
class Pull:
    """A worker requests the model; it holds `base_version` of `generation`, or nothing."""

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
    loss: float | None  # None: the worker does not know it
    aux: Float32 | None = None  # [m] what is averaged over workers; to shard 0
    base_checksum: int | None = None  # CRC-32 of what the worker has of this shard
    num_bytes: int = 0  # of the update as it was coded
    lag: int = 0  # versions from the one the update was computed at to the base version
    learning_rate: float | None = None  # the rate that the script has set; None: it has not
    loss_scale: float = 0.0  # of the loss that the update was computed with; 0: none
    overflow: bool = False  # it overflowed at that scale, and is empty
    optimizer: int = 0  # which of a script's optimizers steps with it
    repeats_batch: bool = False  # an earlier push has counted its examples
    batch_parts: int = 0  # of the script's batches; nb_workers parts are one batch
    change: Update | None = None  # of the weights, by the script itself since the last answer
    blocks: tuple[Block | WireBlock, ...] | None = None  # of it as coded, if it may be relayed
    # The largest magnitude in the update and the change; None: nobody has looked.
    peak: float | None = dataclasses.field(default=None, compare=False)
    # The wire's message and the pieces of its payload, for a journal; None: not kept.
    coded: tuple[Any, Sequence[Any]] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    @property
    def computed_at(self) -> int:
        """The version that the update was computed at."""
        return self.base_version - self.lag

    @property
    def num_decoded_bytes(self) -> int:
        """Memory of what it holds, decoded."""
        return self.update.num_bytes + (self.change.num_bytes if self.change else 0)

    @property
    def is_copy(self) -> bool:
        """Whether this is no update, but a copy of the weights that the workers hold."""
        return self.samples == self.local_steps == 0 and self.update.indices is None


@dataclasses.dataclass(frozen=True)
class Query:
    """A worker queries whether to push or to train on; with no local steps, it begins a round."""

    worker: int
    incarnation: int
    step: int  # of the exchange it would make
    local_steps: int  # done in this round
    step_seconds: float  # the last one's duration
    age_seconds: float  # since its end
    query_seconds: float  # round trip of the last query; 0 if none yet


@dataclasses.dataclass(frozen=True)
class EvaluationPull:
    """Somebody wants to look at the whole model (an evaluation pull)."""

    observer: int


@dataclasses.dataclass(frozen=True)
class WorkerAlive:
    """Anything arrived from a worker."""

    worker: int


@dataclasses.dataclass(frozen=True)
class WorkerDisconnected:
    """A worker's stream broke; it may come back before its lease ends."""

    worker: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class Leave:
    """A worker leaves; `cause` is "diverged" when its gradients stay non-finite."""

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
    """Shard 0 announces who is live (to the other shards only)."""

    number: int
    live: tuple[int, ...]
    started: bool
    formed: GroupAssignment | None = None  # the newest groups, if not those the run began with
    incarnations: tuple[int, ...] = ()  # of each of `live`; () or 0: not known
    draws: tuple[Draw, ...] = ()  # the newest rounds' workers, if not all live ones take part
    joiners: tuple[Joiners, ...] = ()  # the live workers that have finished no round at shard 0
    # Where rounds of shard 0 stand still: worker -> newest step that is over there.
    over: Mapping[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class WorkerIncarnation:
    """One process of a worker, from its Hello to its end."""

    worker: int
    incarnation: int


@dataclasses.dataclass(frozen=True)
class WorkerUnreachable:
    """A live worker was silent on a following shard for a whole lease (to shard 0 only)."""

    member: WorkerIncarnation


@dataclasses.dataclass(frozen=True)
class PushRejected:
    """A handler refused a push before it became an event; counted here."""

    worker: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Stop:
    """End the run: a supervisor's wish, a signal, or shard 0's order."""

    reason: str


@dataclasses.dataclass(frozen=True)
class ProcessStalled:
    """This process stood still for some time, and received nothing meanwhile."""

    seconds: float


@dataclasses.dataclass(frozen=True)
class Tick:
    """Time has passed; see `PsCore.next_deadline`."""


@dataclasses.dataclass(frozen=True)
class Failed:
    """The core could not handle the event before, which a worker caused.

    It costs the sender its place, and nobody else anything: see `PsCore`.
    """

    worker: int
    incarnation: int  # 0: the event does not name it
    step: int  # of a push, else 0
    is_hello: bool
    cause: str

    @staticmethod
    def of(event: OfWorker, error: Exception) -> Failed:
        """Return the event that takes the place of the one over which the core raised `error`."""
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
    """The worker is in; it may pull."""

    worker: int
    incarnation: int
    last_step: int
    knows_worker: bool
    epoch: int
    version: int


@dataclasses.dataclass(frozen=True)
class Reject:
    """A Hello, a pull (`step` 0) or a push is rejected; `reason` names a Reason of the wire.

    A notice answers nothing: its worker may be about to request something, or has just left.
    """

    worker: int
    incarnation: int
    reason: str
    message: str
    step: int
    epoch: int
    retry_after_seconds: float = 0.0  # of a Hello: when to send it again
    is_notice: bool = False


@dataclasses.dataclass(frozen=True)
class Reply:
    """The worker may proceed, with this."""

    worker: int
    step: int  # 0 answers a pull
    operation: Operation
    # Or blocks, already divided and coded, or rounds to be repeated.
    update: Update | tuple[Block, ...] | RelayedRounds
    version: int
    epoch: int
    learning_rate: float
    samples: int
    stop_reason: str | None  # why no more updates are wanted
    held_seconds: float = 0.0  # since the request, while the rule held it back
    staleness: int = 0  # of the worker's newest push
    aux: Float32 | None = None  # [m] means over workers; not to be changed
    loss_scale: float = 0.0  # the factor of the loss from now on; 0: none
    # For each optimizer of a script: the count that its schedule is read at.
    schedule_counts: tuple[int, ...] = ()

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
    """Answers EvaluationPull."""

    observer: int
    reply: Reply


@dataclasses.dataclass(frozen=True)
class NewEpoch:
    """Membership changed; to be sent to the other shards."""

    epoch: MembershipEpoch


@dataclasses.dataclass(frozen=True)
class WorkersUnreachable:
    """Live workers were silent on this shard for a whole lease; to be sent to shard 0."""

    members: tuple[WorkerIncarnation, ...]


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
