"""The log of a node's checkpoints: entries in an object store, with claims of the only writer.

The object ``log/NUMBER.json`` is an entry of the log. A *snapshot* entry is the manifest of one
checkpoint, and names the objects below ``parts/`` with the bytes of the checkpoint's arrays
(`thinwire.runtime.persistence.checkpoint`). A *claim* entry names the process that becomes the only
writer, with a generation number above all earlier generations.

A process that writes to a log is in one of two states. Before `CheckpointLog.claim`, it relies on a
lock that excludes other writers, as in a run directory. It reads what is new in the log, and writes
its entry under the next number. After `CheckpointLog.claim`, other hosts may try to write, too:

Entries of the log have consecutive numbers, and a process creates an entry only if no entry has the
number. Before a process writes an entry, it has read every earlier entry. If two processes write
entries, the storage rejects the entry of one process, and a suspended process that was replaced
finds the claim of its successor under the number that its own next entry needs. One request to the
storage checks that an entry's number is free and writes the entry, so no other process can write in
between.

The removal of old entries frees their numbers, under which a suspended process could then create
entries. A process that writes checkpoints lists the log after each write, and stops if an entry has
a higher number than its own newest entry. Parts that no entry names are leftovers of interrupted
saves. The process that writes checkpoints removes leftover parts at its claim and after each write.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import secrets
from collections.abc import Iterable
from typing import Any

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.object_store import (
    ObjectExistsError,
    ObjectMissingError,
    ObjectStore,
    StorageError,
)
from thinwire.runtime.persistence.state_format import manifest_bytes, read_manifest

#: Number of the format of log and parts. In format 1 a run directory had one directory for each
#: checkpoint, and a log at --checkpoint_dir had a CRC-32 of each part.
FORMAT_VERSION = 2
_ENTRY = re.compile(r"log/(\d{9,})\.json")
_FOLDERS = ("log/", "parts/")
_CHECKPOINT_OF_FORMAT_1 = re.compile(r"(\d{6,}-step-\d+)/.*")
_SNAPSHOT, _CLAIM = "snapshot", "claim"
_UNCLAIMED = -1

_log = logging.getLogger(__name__)


class Fenced(ConfigurationError):
    """A newer process has claimed this process's storage; the message names the newer process."""


class _OtherFormat(ConfigurationError):
    """Another version of Thinwire wrote the checkpoints."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Entry of a checkpoint log.

    Attributes:
        number: Number of the entry in the log.
        content: Content of the entry; None if it cannot be read, which counts as a damaged
            checkpoint.
        damage: Reason why the entry cannot be read; "" if it was read.
    """

    number: int
    content: dict[str, Any] | None
    damage: str = ""

    @property
    def parts(self) -> list[str]:
        """Names of the objects with the checkpoint's array bytes; none for a claim entry."""
        records = self.content.get("parts", []) if self.content else []
        return [str(part["name"]) for part in records]

    @property
    def is_snapshot(self) -> bool:
        """True for the entry of a checkpoint, which may be damaged."""
        return self.content is None or self.content["kind"] == _SNAPSHOT


class CheckpointLog:
    """Log of one node's checkpoints in an object store.

    Attributes:
        keep: Number of newest checkpoints to keep, at least 1.
        token: Random text that marks the entries and parts of this process.
        entries: Entries of checkpoints that this process has read or written, oldest first.
        generation_before: Highest generation (number of a process that has claimed this storage)
            so far; -1 if no process has claimed the storage.

    Args:
        store: Object store in which only this log uses names below ``log/`` and ``parts/``.
        keep: Number of newest checkpoints to keep, at least 1.
    """

    def __init__(self, store: ObjectStore, keep: int = 1) -> None:
        self.keep, self.token = keep, secrets.token_hex(4)
        self.entries: list[Entry] = []
        self.generation_before = -1
        self._store = store
        self._number = 0  # number of the newest log entry that this process has read or written
        self._generation, self._owner = _UNCLAIMED, ""

    @property
    def is_claimed(self) -> bool:
        """True if this process has claimed the log; False if a lock excludes other writers."""
        return self._generation != _UNCLAIMED

    @property
    def next_number(self) -> int:
        """Number of the entry that this process writes next."""
        return self._number + 1

    def place_of(self, entry: Entry) -> str:
        """Return the address of an entry, for messages."""
        return f"{self._store.address}/{_name(entry.number)}"

    # -- reading ----------------------------------------------------------------------------

    def read(self, ignores_others: bool = False) -> None:
        """Read all log entries; keep the checkpoints after the newest claim that discards others.

        Args:
            ignores_others: True to pass over entries that other versions of Thinwire wrote.

        Raises:
            ConfigurationError: The checkpoints' storage failed, or another version of Thinwire
                wrote its log.
        """
        try:
            self._read_all(ignores_others)
        except StorageError as error:
            raise ConfigurationError(f"{error}.") from error

    def _read_all(self, ignores_others: bool = False) -> None:
        numbers, entries = self._listed(), []
        for number in numbers:
            try:
                entries.append(self._read(number))
            except _OtherFormat:
                if not ignores_others:
                    raise
        self._number = numbers[-1] if numbers else 0
        known = [entry.content for entry in entries if entry.content is not None]
        self.generation_before = max((content["generation"] for content in known), default=-1)
        self.entries = []
        for entry in entries:
            if entry.content is not None and entry.content.get("begins_anew"):
                self.entries = []
            elif entry.is_snapshot:
                self.entries.append(entry)

    def _listed(self) -> list[int]:
        """Return the numbers of all log entries; reject a folder with checkpoints of format 1."""
        names = self._store.names()
        former = next(filter(None, map(_CHECKPOINT_OF_FORMAT_1.fullmatch, names)), None)
        if former is not None:
            raise self._other_format(1, f" (for example {former[1]})")
        return _numbers(names)

    def _read(self, number: int) -> Entry:
        """Return the log entry with a given number.

        Raises:
            _OtherFormat: Another version of Thinwire wrote the log entry.
            StorageError: The checkpoints' storage failed.
        """
        name = _name(number)
        try:
            with self._store.open(name) as file:
                content = read_manifest(file.read(), name)
            version = content["format"]
            if version == FORMAT_VERSION:
                _check_entry(content)
        except ObjectMissingError:
            return Entry(number, None, "the log entry has been removed")
        except StorageError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return Entry(number, None, f"{type(error).__name__}: {error}")
        # Another format version is no damage, because the checkpoint is whole, and a return to an
        # older checkpoint would lose training progress.
        if version != FORMAT_VERSION:
            raise self._other_format(version)
        return Entry(number, content)

    def _other_format(self, version: object, example: str = "") -> _OtherFormat:
        return _OtherFormat(
            f"the storage {self._store.address} holds checkpoints of format {version!r}{example}, "
            f"but this version of Thinwire reads format {FORMAT_VERSION}; continue with the "
            "version that wrote the checkpoints, or start again with --overwrite."
        )

    # -- writing ----------------------------------------------------------------------------

    def follow(self) -> None:
        """Prepare the next entry: check the claim, or read what is new without a claim.

        Raises:
            Fenced: A newer process has claimed the log.
            StorageError: The checkpoints' storage failed.
            ConfigurationError: Another version of Thinwire wrote the log.
        """
        if self.is_claimed:
            self.check_owner()
        elif self._listed() != [entry.number for entry in self.entries]:
            self._read_all()

    def append(self, content: dict[str, Any]) -> None:
        """Write the entry of a checkpoint whose parts are written; remove old checkpoints.

        Args:
            content: Content of the checkpoint's manifest.

        Raises:
            Fenced: A newer process has claimed the log.
            StorageError: The checkpoints' storage failed.
        """
        content = {"kind": _SNAPSHOT, "generation": self._generation, **content}
        number = self.next_number
        if self.is_claimed:
            while not self._create(number, content):
                if not self._is_own(number):
                    raise self._fenced()
                # The existing entry is from an earlier save of this process, which failed because
                # the storage's reply was lost. So no other process has claimed the storage, and the
                # save continues with the next number.
                number = self._number = number + 1
        else:
            # The lock excludes other writers. `create` needs hard links, which some disks lack.
            self._store.put(_name(number), self._entry_bytes(content))
            self._number = number
        self.entries.append(Entry(number, content))
        self._collect()

    def _create(self, number: int, content: dict[str, Any]) -> bool:
        """Write a log entry; return False if another process has written an entry of its number."""
        data, name = self._entry_bytes(content), _name(number)
        try:
            self._store.create(name, data)
        except ObjectExistsError:
            try:
                # If the existing log entry has equal bytes, this call wrote the entry, but the
                # storage's reply was lost, and the storage client repeated the request.
                if self._store.get(name) != data:
                    return False
            except ObjectMissingError:
                return False
        self._number = number
        return True

    def _entry_bytes(self, content: dict[str, Any]) -> bytes:
        return manifest_bytes({"format": FORMAT_VERSION, "token": self.token, **content})

    def remove_unnamed(self, number: int, prefix: str) -> None:
        """Remove the parts of a save that failed, because other processes need the disk space.

        Args:
            number: Number of the log entry that names the parts if the save has written it.
            prefix: First characters of the names of all parts of the save.

        Raises:
            StorageError: The checkpoints' storage failed.
        """
        # A remote request that failed may still be carried out later. If it creates the entry, the
        # entry's parts must exist. With a claim, the next save removes the parts.
        if self.is_claimed:
            return
        names = self._store.names()
        if _name(number) not in names:
            self._store.remove(name for name in names if name.startswith(prefix))

    def _collect(self) -> None:
        """Remove old checkpoints, and parts that no log entry names; log storage failures."""
        try:
            names = self._store.names()
            if self.is_claimed:
                # A suspended process may have created an entry under a number that its successor
                # has freed. A higher entry number in the log stops the process, whose cleanup would
                # otherwise remove the successor's parts, which no entry of the process names.
                self._check_owner(_numbers(names))
            snapshots = self.entries[-self.keep :]
            first = snapshots[0].number if snapshots else self._number
            needed = {part for entry in snapshots for part in entry.parts}
            for name in names:
                match = _ENTRY.fullmatch(name)
                if match is not None and int(match[1]) >= first:
                    needed.add(name)
            # The folder of a PS also holds journals and the checkpoints of ended models.
            doomed = {name for name in names if name.startswith(_FOLDERS)} - needed
            # Remove log entries before parts, because a log entry must never name a missing part.
            self._store.remove(sorted(doomed, key=lambda name: not name.startswith("log/")))
            self.entries = snapshots
        except StorageError as error:
            _log.warning("old checkpoint objects could not be deleted yet: %s", error)

    # -- claims -----------------------------------------------------------------------------

    def claim(self, generation: int, owner: str, discards: bool = False) -> bool:
        """Make this process the only writer of the log; fence (end) earlier writers.

        Args:
            generation: Number of this process among the writers, above `generation_before`.
            owner: Description of this process, for the error message of a writer that this process
                replaces.
            discards: True to remove all checkpoints. The numbers of entries and generations do not
                restart, so the storage rejects a process that still writes.

        Returns:
            True if the claim succeeded. False if another process has written to the log since this
            process read it, so that the caller must load the checkpoints again.

        Raises:
            ConfigurationError: The checkpoints' storage failed.
        """
        about = {"generation": generation, "owner": owner, "begins_anew": discards}
        try:
            if not self._create(self.next_number, {"kind": _CLAIM, **about}):
                return False
        except StorageError as error:
            raise ConfigurationError(f"{error}.") from error
        self._generation, self._owner = generation, owner
        if discards:
            self.entries = []
        self._collect()
        return True

    def take_over(self, owner: str, discards: bool = False) -> None:
        """Make this process the log's only writer, even if another process has just written.

        Args:
            owner: Description of this process, as for `claim`.
            discards: True to remove all checkpoints, also those of other versions of Thinwire.

        Raises:
            ConfigurationError: The checkpoints' storage failed, or another version of Thinwire
                wrote the log.
        """
        self.read(ignores_others=discards)
        while not self.claim(self.generation_before + 1, owner, discards):
            self.read(ignores_others=discards)

    def check_owner(self) -> None:
        """Raise Fenced if another process has written a log entry, StorageError on failure."""
        self._check_owner(_numbers(self._store.names()))

    def _check_owner(self, numbers: list[int]) -> None:
        """Raise Fenced if another process has written an entry that this process has not read."""
        if numbers and numbers[-1] > self._number and not self._is_own(numbers[-1]):
            raise self._fenced()

    def _is_own(self, number: int) -> bool:
        content = self._read(number).content
        return content is not None and content["token"] == self.token

    def _fenced(self) -> Fenced:
        """Return the error that names the process which has claimed the storage of this process."""
        by, generation = "another process", "higher"
        try:
            for number in reversed(_numbers(self._store.names())):
                content = self._read(number).content
                if content is not None and content["kind"] == _CLAIM:
                    by, generation = content["owner"], str(content["generation"])
                    break
        except (StorageError, ConfigurationError) as error:
            _log.warning(
                "the name of the process that has taken over the checkpoints cannot be read: %s",
                error,
            )
        return Fenced(
            f"{self._store.address} has been taken over by {by}, as generation {generation}; this "
            f"process ({self._owner}) is generation {self._generation}, and writes nothing to it "
            "any more. The run continues with the other process. If that is a mistake, stop the "
            "other process first, or give this process another address."
        )


def _name(number: int) -> str:
    return f"log/{number:09d}.json"


def _numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of the log entries among the names of objects, in ascending order."""
    return sorted(int(match[1]) for name in names if (match := _ENTRY.fullmatch(name)))


def _check_entry(content: dict[str, Any]) -> None:
    """Check the fields of every log entry; raise ValueError, KeyError or TypeError if wrong."""
    if content["kind"] not in (_SNAPSHOT, _CLAIM) or type(content["generation"]) is not int:
        raise ValueError("the stored object is not an entry of the checkpoint log")
    if content["kind"] == _SNAPSHOT:
        for part in content["parts"]:
            part["name"]
    str(content["token"])
