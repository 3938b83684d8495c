"""What a run directory holds about its run: processes, flags, summary, newest status.

Only files are read, and no lock is taken, so a run is never disturbed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

from thinwire.runtime.run.directory import LAUNCH_FILE, METRICS_FILE, SUMMARY_FILE, lock_files
from thinwire.runtime.run.lock import LockOwner, is_held, owner_of
from thinwire.runtime.run.script_target import module_words
from thinwire.runtime.telemetry.evaluation import ranges_in
from thinwire.runtime.telemetry.run_status import RunStatus

#: Of the end of metrics.jsonl; a status has some kilobytes for every worker.
_FIRST_TAIL_BYTES, _MOST_TAIL_BYTES = 1 << 16, 1 << 26
#: Flags files in the order in which they are trusted to know shard 0's address.
_FLAGS_FILES = ("flags-supervisor-0", "flags-worker-*", "flags-ps-0", "flags-*")
_ANY_HOST = ("0.0.0.0", "[::]", "::", "")


@dataclasses.dataclass(frozen=True)
class NodeProcess:
    """A process that holds a lock of the run directory, or held it last."""

    node: str  # of the lock, such as ps-0; records: whoever writes the records
    owner: LockOwner | None  # None: the lock names nobody
    alive: bool | None  # None: the file system has no locks

    @property
    def is_here(self) -> bool:
        """Whether it runs on this host and can be signalled."""
        return self.owner is not None and self.owner.host == os.uname().nodename

    @property
    def is_launcher(self) -> bool:
        """Whether it starts and ends others."""
        return not self.node.startswith(("records", "ps-", "worker-"))

    def __str__(self) -> str:
        """Return what messages call it."""
        return self.node if self.owner is None else str(self.owner)


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A run directory."""

    directory: pathlib.Path

    @functools.cached_property
    def processes(self) -> list[NodeProcess]:
        """Everything that has ever written there, launchers first."""
        found = [
            NodeProcess(path.stem, owner_of(path), is_held(path))
            for path in lock_files(self.directory)
        ]
        return sorted(found, key=lambda each: (not each.is_launcher, each.node))

    @property
    def alive(self) -> list[NodeProcess]:
        """Those that live; where there are no locks, none is known to."""
        return [each for each in self.processes if each.alive]

    @functools.cached_property
    def flags(self) -> dict[str, str]:
        """Flag -> value of the node that knows most of the run's addresses; empty: none."""
        for pattern in _FLAGS_FILES:
            for path in sorted(self.directory.glob(f"{pattern}.txt")):
                if found := _flags_in(path):
                    return found
        return {}

    @functools.cached_property
    def script(self) -> list[str]:
        """The script that `thinwire run` runs, and its arguments; empty: it runs none."""
        try:
            found = json.loads((self.directory / LAUNCH_FILE).read_text())["script"]
            module, path = str(found.get("module", "")), str(found["path"])
            return module_words(module, path, [*map(str, found["arguments"])])
        except (OSError, ValueError, KeyError, TypeError):
            return []

    @functools.cached_property
    def summary(self) -> dict[str, Any] | None:
        """summary.json; None where there is none that can be read."""
        try:
            found = json.loads((self.directory / SUMMARY_FILE).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and "stop_reason" in found else None

    @property
    def metrics(self) -> dict[str, dict[str, float | None]]:
        """Last, least and largest value of each metric in the summary."""
        return ranges_in(self.summary or {})

    @functools.cached_property
    def status(self) -> RunStatus | None:
        """The newest status in metrics.jsonl; None where there is none that can be read."""
        return newest_status(self.directory / METRICS_FILE)

    @property
    def is_run(self) -> bool:
        """Whether this is a run directory at all."""
        return bool(self.processes or self.flags or self.summary or self.status)

    @property
    def address(self) -> str | None:
        """Where shard 0 listens, as far as files know; None: they do not.

        The lock of a shard that runs is newer than any flags file.
        """
        for each in self.processes:
            known = each.owner is not None and each.owner.address
            if each.node == "ps-0" and each.alive is not False and each.owner and known:
                return _dialled(each.owner)
        shards = self.flags.get("ps_hosts", "")
        if shards:
            return shards.split(",")[0]
        port, host = self.flags.get("port", "0"), self.flags.get("ip_PS", "")
        return None if port == "0" else f"{_loopback_for(host)}:{port}"


def newest_status(path: pathlib.Path) -> RunStatus | None:
    """Return the newest status in a metrics file, reading from its end; None: there is none."""
    tail_bytes = _FIRST_TAIL_BYTES
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            while True:
                file.seek(max(0, size - tail_bytes))
                for line in reversed(file.read(tail_bytes).splitlines()):
                    if status := _status_in(line):
                        return status
                if tail_bytes >= min(size, _MOST_TAIL_BYTES):
                    return None
                tail_bytes *= 4
    except OSError:
        return None


def _status_in(line: bytes) -> RunStatus | None:
    if b'"kind":"status"' not in line[:32]:
        return None
    try:
        fields = json.loads(line)
        fields.pop("kind")
        return RunStatus.from_dict(fields)
    except (ValueError, AttributeError):  # a torn line, or of another version
        return None


def _flags_in(path: pathlib.Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = (line[2:].partition("=") for line in lines if line.startswith("--"))
    return {name: value for name, _, value in pairs}


def _dialled(owner: LockOwner) -> str:
    """Return where a shard is dialled that listens at the address of its lock."""
    host, _, port = owner.address.rpartition(":")
    if host not in _ANY_HOST:
        return owner.address
    return f"127.0.0.1:{port}" if owner.host == os.uname().nodename else f"{owner.host}:{port}"


def _loopback_for(host: str) -> str:
    return "127.0.0.1" if host in _ANY_HOST else host
