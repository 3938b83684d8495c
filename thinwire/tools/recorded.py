"""Reads a run directory: the run's processes, flags, summary and newest status.

`RecordedRun` only reads files and acquires no lock, so it does not disturb the run.
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

#: Number of bytes to read from the end of metrics.jsonl, at the first attempt and at most. A status
#: has some kilobytes per worker.
_FIRST_TAIL_BYTES, _MOST_TAIL_BYTES = 1 << 16, 1 << 26
#: Names of the nodes' flags files, with the most reliable source of PS shard 0's address first.
_FLAGS_FILES = ("flags-supervisor-0", "flags-worker-*", "flags-ps-0", "flags-*")
_ANY_HOST = ("0.0.0.0", "[::]", "::", "")


@dataclasses.dataclass(frozen=True)
class NodeProcess:
    """A process that holds a lock of the run directory, or was the last holder of the lock.

    Attributes:
        node: Name of the lock: a node's name, for example ps-0, or "records" for the process that
            writes the run's records.
        owner: Owner (process and host) that the lock file names. None if the lock file names no
            owner.
        alive: True if the process runs. None if the file system has no locks.
    """

    node: str
    owner: LockOwner | None
    alive: bool | None

    @property
    def is_here(self) -> bool:
        """True if the process is on this host, so that it can receive a signal."""
        return self.owner is not None and self.owner.host == os.uname().nodename

    @property
    def is_launcher(self) -> bool:
        """True if the process is a launcher, which starts and ends other processes."""
        return not self.node.startswith(("records", "ps-", "worker-"))

    def __str__(self) -> str:
        """Return the description of a run's process for messages."""
        return self.node if self.owner is None else str(self.owner)


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """Content of the files in a run directory, read at first use.

    Attributes:
        directory: Path of the run directory.
    """

    directory: pathlib.Path

    @functools.cached_property
    def processes(self) -> list[NodeProcess]:
        """All processes that have written to the run directory, launchers first."""
        processes = [
            NodeProcess(path.stem, owner_of(path), is_held(path))
            for path in lock_files(self.directory)
        ]
        return sorted(processes, key=lambda each: (not each.is_launcher, each.node))

    @property
    def alive(self) -> list[NodeProcess]:
        """Processes of the run that are running; empty if the file system has no locks."""
        return [process for process in self.processes if process.alive]

    @functools.cached_property
    def flags(self) -> dict[str, str]:
        """Flags (name -> value) of the node that knows most addresses of the run, or empty."""
        for pattern in _FLAGS_FILES:
            for path in sorted(self.directory.glob(f"{pattern}.txt")):
                if flags := _flags_in(path):
                    return flags
        return {}

    @functools.cached_property
    def script(self) -> list[str]:
        """The script of `thinwire run`, with its arguments; empty if workers run no script."""
        try:
            script = json.loads((self.directory / LAUNCH_FILE).read_text())["script"]
            module, path = str(script.get("module", "")), str(script["path"])
            return module_words(module, path, [*map(str, script["arguments"])])
        except (OSError, ValueError, KeyError, TypeError):
            return []

    @functools.cached_property
    def summary(self) -> dict[str, Any] | None:
        """Content of summary.json, or None if the file is missing or unreadable."""
        try:
            summary = json.loads((self.directory / SUMMARY_FILE).read_text())
        except (OSError, ValueError):
            return None
        return summary if isinstance(summary, dict) and "stop_reason" in summary else None

    @property
    def metrics(self) -> dict[str, dict[str, float | None]]:
        """Last, smallest and largest value of each metric in summary.json."""
        return ranges_in(self.summary or {})

    @functools.cached_property
    def status(self) -> RunStatus | None:
        """The run's newest status in metrics.jsonl, or None if the file has no readable status."""
        return newest_status(self.directory / METRICS_FILE)

    @property
    def is_run(self) -> bool:
        """True if the directory holds files of a training run."""
        return bool(self.processes or self.flags or self.summary or self.status)

    @property
    def address(self) -> str | None:
        """Address of PS shard 0 from its lock or from flags files, or None if it is unknown.

        The lock of a running PS shard is newer than any flags file, so the lock has priority.
        """
        for process in self.processes:
            known = process.owner is not None and process.owner.address
            if process.node == "ps-0" and process.alive is not False and process.owner and known:
                return _dialled(process.owner)
        shards = self.flags.get("ps_hosts", "")
        if shards:
            return shards.split(",")[0]
        port, host = self.flags.get("port", "0"), self.flags.get("ip_PS", "")
        return None if port == "0" else f"{_loopback_for(host)}:{port}"


def newest_status(path: pathlib.Path) -> RunStatus | None:
    """Return the last status in a metrics.jsonl, read from its end; None without a status."""
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
    # The line is incomplete, or another version of Thinwire wrote the line.
    except (ValueError, AttributeError):
        return None


def _flags_in(path: pathlib.Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = (line[2:].partition("=") for line in lines if line.startswith("--"))
    return {name: value for name, _, value in pairs}


def _dialled(owner: LockOwner) -> str:
    """Return the address at which a PS shard can be reached, from the owner of its lock."""
    host, _, port = owner.address.rpartition(":")
    if host not in _ANY_HOST:
        return owner.address
    return f"127.0.0.1:{port}" if owner.host == os.uname().nodename else f"{owner.host}:{port}"


def _loopback_for(host: str) -> str:
    return "127.0.0.1" if host in _ANY_HOST else host
