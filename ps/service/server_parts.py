"""The objects and functions that a shard's network server is given when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from thinwire.ops.sync.base import Draw
from thinwire.ops.types import State
from thinwire.proto.security.connection_guard import ConnectionGuard
from thinwire.ps.core import events
from thinwire.ps.programs import Programs
from thinwire.ps.scripts.ended_models import EndedModels

if TYPE_CHECKING:
    from thinwire.ps.service.admission import AdmissionWatch
    from thinwire.ps.service.shard_admission import PhaseGate
    from thinwire.runtime.run.spill import Spill


@dataclasses.dataclass(frozen=True)
class ServerHooks:
    """Functions that a shard's server calls on its writer thread; none may block.

    Attributes:
        save: Function called with (version, state) of a snapshot that must be saved.
        status: Function that returns the status document for supervisors; None to send no status.
        on_groups: Function called with the worker groups that shard 0 has formed by speed.
        on_draws: Function called with the newest draws (workers that take part in a round).
        on_unreachable: Function called with the workers from which a shard with id 1 or higher
            receives no messages.
        on_journal_failed: Function called once, when the journal cannot be written.
    """

    save: Callable[[int, State], None] = lambda version, state: None
    status: Callable[[], str] | None = None
    on_groups: Callable[[events.GroupsChanged], None] = lambda action: None
    on_draws: Callable[[Sequence[Draw]], None] = lambda draws: None
    on_unreachable: Callable[[events.WorkersUnreachable], None] = lambda action: None
    on_journal_failed: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True)
class ServerParts:
    """Objects that a shard's server uses and does not make.

    Attributes:
        guard: Object that authenticates clients and limits their streams and messages.
        programs: Program (script and versions) of each worker of the run.
        ended_models: Final models of the run's earlier phases.
        reports: (role, id) of a node -> newest JSON document that the node sent before a restart.
        watch: Object that detects that the shard refuses all workers; None to wait without limit.
        phases: Object that accepts the script's next model from workers; None if the model cannot
            change.
        spill: Allocator that keeps received payloads, and copies of weights for slow clients, in
            files to save memory; None to keep all in memory.
    """

    guard: ConnectionGuard = dataclasses.field(default_factory=ConnectionGuard)
    programs: Programs = dataclasses.field(default_factory=Programs)
    ended_models: EndedModels = dataclasses.field(default_factory=EndedModels)
    reports: dict[tuple[int, int], str] = dataclasses.field(default_factory=dict)
    watch: AdmissionWatch | None = None
    phases: PhaseGate | None = None
    spill: Spill | None = None
