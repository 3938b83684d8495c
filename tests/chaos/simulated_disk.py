"""A simulated shard's disk that tears records, cuts snapshots short, or is full."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from thinwire.ops.types import State
from thinwire.runtime.persistence import checkpoint_log
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.persistence.checkpoint_log import CheckpointLog
from thinwire.runtime.persistence.object_store import LocalObjects
from thinwire.simulator.storage import SimulatedDisk, SimulatedKill

#: How far a snapshot may have come when the process dies.
STAGES = ("empty", "arrays", "manifest", "unnamed", "unpruned", "saved")


class FaultyDisk(SimulatedDisk):
    """Works until a fault is set.

    Attributes:
        tear_after: The process dies after this many more bytes in the journal; None: never.
        dies_at: The process dies at this stage of the next snapshot.
        is_full: True if every write is rejected.
        on_saved: Called with each state that is complete on disk.
    """

    def __init__(self) -> None:
        self.tear_after: int | None = None
        self.dies_at: str | None = None
        self.is_full = False
        self.on_saved: Callable[[State], None] = lambda state: None

    def create(self, path):
        self.check()
        return FaultyFile(super().create(path), self)

    def save(self, checkpoints: Checkpoints, version: int, state: State) -> None:
        self.check()
        stage, self.dies_at = self.dies_at, None
        with _dying_at(stage) if stage else contextlib.nullcontext():
            try:
                super().save(checkpoints, version, state)
            except SimulatedKill:
                if stage == "unpruned":  # it has its name
                    self.on_saved(state)
                raise
        self.on_saved(state)
        if stage == "saved":
            raise SimulatedKill

    def check(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FaultyFile:
    """A journal's file."""

    def __init__(self, file: Any, disk: FaultyDisk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: memoryview) -> int:
        disk = self._disk
        disk.check()
        if disk.tear_after is not None:
            if disk.tear_after < len(data):
                self._file.write(data[: disk.tear_after])
                disk.tear_after = None
                raise SimulatedKill
            disk.tear_after -= len(data)
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextlib.contextmanager
def _dying_at(stage: str) -> Iterator[None]:
    """Let the process die while a snapshot is written, without a chance to clean up."""

    def arrays(store, name, pieces, num_bytes):
        if stage == "arrays":
            store.put(f"{name}.half", b"\x5a" * 100)
        raise SimulatedKill

    def unnamed(store, name, data):
        store.put_pieces("log/.tmp-killed", [memoryview(data)], len(data))
        raise SimulatedKill

    def die(*arguments):
        raise SimulatedKill

    where = {
        "empty": (LocalObjects, "put_pieces", arrays),
        "arrays": (LocalObjects, "put_pieces", arrays),
        "manifest": (checkpoint_log, "manifest_bytes", die),
        "unnamed": (LocalObjects, "put", unnamed),
        "unpruned": (CheckpointLog, "_collect", die),
    }.get(stage)
    patches = [where, (CheckpointLog, "remove_unnamed", die)] if where else []
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield
