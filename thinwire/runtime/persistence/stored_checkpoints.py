"""Checkpoints in an object store, which has no rename and which several hosts can write.

A node has two kinds of objects in the object store:

- ``parts/TOKEN-UPLOAD-I.bin``: a part, which is a piece of the bytes of a checkpoint's arrays;
- ``log/NUMBER.json``: an entry of the node's log. A *snapshot* entry is the manifest of one
  checkpoint, with the size and CRC-32 of every part. A snapshot entry is written after its parts,
  so a checkpoint is whole as soon as its snapshot entry exists. A *claim* entry of the log names
  the process that becomes the only writer, with a generation number above all earlier generations.

Entries of the checkpoint log have consecutive numbers, and a process creates an entry only if no
entry has the number. Before a process writes a checkpoint log entry, it has read every earlier
entry. If two processes write log entries, the storage rejects the entry of one process, and a
suspended process that was replaced finds the claim of its successor under the number that its own
next entry needs. One request to the storage checks that an entry's number is free and writes the
entry, so no other process can write in between.

The removal of old log entries frees their numbers, under which a suspended process could then
create entries. A process that writes checkpoints lists the log after each write, and stops if an
entry has a higher number than its own newest entry. Parts (objects with array bytes) that no log
entry names are leftovers of interrupted uploads. The process that writes checkpoints removes
leftover parts at its start and after each write.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from thinwire.ops.types import ConfigurationError, State
from thinwire.runtime.persistence.checkpoint import CheckpointStore, DamagedCheckpointError, Fenced
from thinwire.runtime.persistence.object_store import (
    ObjectExistsError,
    ObjectMissingError,
    ObjectStore,
    StorageError,
)
from thinwire.runtime.persistence.state_format import (
    ArrayBytes,
    StateEncoder,
    decode_state,
    decode_values,
    manifest_bytes,
    read_arrays,
    read_manifest,
)

FORMAT_VERSION = 1
#: Largest size of a part of a checkpoint, in bytes. Parts are small, so that an upload needs little
#: memory.
PART_BYTES = 16 << 20
_ENTRY = re.compile(r"log/(\d{9,})\.json")
_SNAPSHOT, _CLAIM = "snapshot", "claim"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Entry of the checkpoint log; an unreadable entry counts as a damaged checkpoint."""

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
        return self.content is None or self.content["kind"] == _SNAPSHOT


class StoredCheckpoints(CheckpointStore):
    """Checkpoints of one node in an object store.

    Args:
        store: Object store that only this node uses.
        keep: Number of newest checkpoints to keep, at least 1.
        part_bytes: Largest size of a part (an object with array bytes of a checkpoint), in bytes.
    """

    def __init__(self, store: ObjectStore, keep: int = 3, part_bytes: int = PART_BYTES) -> None:
        if keep < 1:
            raise ValueError(f"the number of checkpoints to keep is {keep}; expected 1 or more")
        self.keep = keep
        self._store, self._part_bytes = store, part_bytes
        self._token = secrets.token_hex(4)  # marks this process's log entries and parts
        self._num_uploads = 0
        self._number = 0  # number of the newest log entry that this process has read or written
        self._generation, self._owner = -1, ""
        self._entries: list[_Entry] = []  # log entries of checkpoints, oldest first

    @property
    def address(self) -> str:
        """Path or URL of the checkpoints' storage, for messages."""
        return self._store.address

    def load_latest(self) -> tuple[int, State] | None:
        """Return training step and state of the newest whole checkpoint; None if none exists.

        Raises:
            ConfigurationError: The checkpoints' storage failed, or another version of Thinwire
                wrote its log.
        """
        self._read_log()
        self.num_skipped = 0
        for entry in reversed(self._entries):
            try:
                return self._load(entry)
            except DamagedCheckpointError as error:
                self.num_skipped += 1
                _log.warning("Skipping an unreadable checkpoint: %s. Trying an older one.", error)
        return None

    def load_values(self) -> State | None:
        """Return the newest checkpoint's state, with zeros for arrays; None if there is none.

        Raises:
            ConfigurationError: The checkpoints' storage failed, or another version of Thinwire
                wrote its log.
        """
        self._read_log()
        for entry in reversed(self._entries):
            try:
                return decode_values(entry.content["tree"]) if entry.content else None
            except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
                _log.debug("entry %d of the checkpoint log cannot be read: %s", entry.number, error)
        return None

    def load_all(self) -> list[State]:
        """Return the states of all whole checkpoints, oldest first; log damaged checkpoints.

        Raises:
            ConfigurationError: The checkpoints' storage failed, or another version of Thinwire
                wrote its log.
        """
        self._read_log()
        states = []
        for entry in self._entries:
            try:
                states.append(self._load(entry)[1])
            except DamagedCheckpointError as error:
                _log.warning("Skipping a checkpoint that cannot be read: %s.", error)
        return states

    def claim(self, generation: int, owner: str) -> bool:
        """Claim the storage by a log entry; return False if another process has written an entry.

        Raises:
            ConfigurationError: The checkpoints' storage failed.
        """
        return self._claim(generation, owner, begins_anew=False)

    def take_over(self, owner: str) -> None:
        """Claim the storage by a log entry, even if other processes are writing log entries.

        Raises:
            ConfigurationError: The checkpoints' storage failed, or another version of Thinwire
                wrote its log.
        """
        self._take_over(owner, begins_anew=False)

    def discard(self, owner: str) -> None:
        """Remove all checkpoints of this node from the object store.

        The numbers of log entries and generations do not restart, so the storage rejects a process
        that still writes.

        Raises:
            ConfigurationError: The checkpoints' storage failed, or another version of Thinwire
                wrote its log.
        """
        self._take_over(owner, begins_anew=True)

    def _take_over(self, owner: str, begins_anew: bool) -> None:
        self._read_log()
        while not self._claim(self.generation_before + 1, owner, begins_anew):
            self._read_log()

    def _claim(self, generation: int, owner: str, begins_anew: bool) -> bool:
        about = {"generation": generation, "owner": owner, "begins_anew": begins_anew}
        try:
            if not self._create(self._number + 1, {"kind": _CLAIM, **about}):
                return False
        except StorageError as error:
            raise ConfigurationError(f"{error}.") from error
        self._generation, self._owner = generation, owner
        if begins_anew:
            self._entries = []
        self._collect()
        return True

    def save(self, step: int, state: State) -> None:
        """Upload the array bytes of a state in parts, then write the log entry of its checkpoint.

        The next save of a checkpoint removes the parts that an interrupted save has uploaded.
        """
        if step < 0:
            raise ValueError(f"the training step of the checkpoint is {step}; expected 0 or more")
        self.check_owner()
        encoder = StateEncoder()
        tree = encoder.encode(state, "state")
        number = self._number + 1
        written = ArrayBytes(encoder.arrays)
        parts = list(self._upload(written))
        content = {
            "kind": _SNAPSHOT,
            "generation": self._generation,
            "step": step,
            "parts": parts,
            "arrays": written.records,
            "tree": tree,
        }
        while not self._create(number, content):
            if not self._is_own(number):
                raise self._fenced()
            # The existing entry is from an earlier save of this process, which failed because the
            # storage's reply was lost. So no other process has claimed the storage, and the save
            # continues with the next number.
            number = self._number = number + 1
        self._entries.append(_Entry(number, content))
        self._collect()

    def _upload(self, written: ArrayBytes) -> Iterator[dict[str, Any]]:
        """Upload a checkpoint's array bytes in parts with new names; yield each part's record."""
        self._num_uploads += 1
        for index, data in enumerate(_joined(written, self._part_bytes)):
            name = f"parts/{self._token}-{self._num_uploads}-{index}.bin"
            self._store.put(name, data)
            yield {"name": name, "bytes": len(data), "crc32": zlib.crc32(data)}

    def _create(self, number: int, content: dict[str, Any]) -> bool:
        """Write a log entry; return False if another process has written an entry of its number."""
        about = {"format": FORMAT_VERSION, "token": self._token}
        data = manifest_bytes({**about, **content})
        name = _name(number)
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

    def _is_own(self, number: int) -> bool:
        content = self._read(number).content
        return content is not None and content["token"] == self._token

    # -- reading ----------------------------------------------------------------------------

    def _read_log(self) -> None:
        """Read all log entries; keep the checkpoints after the newest claim that discards others.

        Raises:
            ConfigurationError: The checkpoints' storage failed, or another version of Thinwire
                wrote its log.
        """
        try:
            numbers = self._numbers(self._store.names())
            entries = [self._read(number) for number in numbers]
        except StorageError as error:
            raise ConfigurationError(f"{error}.") from error
        self._number = numbers[-1] if numbers else 0
        known = [entry.content for entry in entries if entry.content is not None]
        self.generation_before = max((content["generation"] for content in known), default=-1)
        self._entries = []
        for entry in entries:
            if entry.content is not None and entry.content.get("begins_anew"):
                self._entries = []
            elif entry.is_snapshot:
                self._entries.append(entry)

    def _read(self, number: int) -> _Entry:
        """Return the checkpoint log entry with a given number.

        Raises:
            ConfigurationError: Another version of Thinwire wrote the checkpoint log entry.
            StorageError: The checkpoints' storage failed.
        """
        name = _name(number)
        try:
            content = read_manifest(self._store.get(name), name)
            version = content["format"]
            if version == FORMAT_VERSION:
                _check_entry(content)
        except ObjectMissingError:
            return _Entry(number, None, "the log entry has been removed")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return _Entry(number, None, f"{type(error).__name__}: {error}")
        if version != FORMAT_VERSION:
            raise ConfigurationError(
                f"the storage {self.address} holds checkpoints of format {version!r}, but this "
                f"version of Thinwire reads format {FORMAT_VERSION}; continue with the version "
                "that wrote the checkpoints, or start again with --overwrite."
            )
        return _Entry(number, content)

    def _load(self, entry: _Entry) -> tuple[int, State]:
        """Read a checkpoint, and verify the checksums of its parts and arrays.

        Raises:
            DamagedCheckpointError: The checkpoint is damaged; the message names the defect.
            ConfigurationError: The checkpoints' storage failed.
        """
        where = f"{self.address}/{_name(entry.number)}"
        if entry.content is None:
            raise DamagedCheckpointError(f"{where}: {entry.damage}")
        content = entry.content
        try:
            data = bytearray()
            for part in content["parts"]:
                data += self._part(part)
            arrays = read_arrays(io.BytesIO(data), len(data), "parts", content["arrays"])
            state, step = decode_state(content["tree"], arrays), content["step"]
            if type(step) is not int or not isinstance(state, dict):
                raise ValueError("the checkpoint's step or state is of the wrong type")
        except StorageError as error:
            raise ConfigurationError(f"{error}.") from error
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise DamagedCheckpointError(f"{where}: {type(error).__name__}: {error}") from error
        return step, state

    def _part(self, part: dict[str, Any]) -> bytes:
        name = str(part["name"])
        try:
            data = self._store.get(name)
        except ObjectMissingError as error:
            raise ValueError(f"{name} is missing") from error
        if len(data) != part["bytes"]:
            raise ValueError(f"object {name} has {len(data)} bytes; expected {part['bytes']}")
        if zlib.crc32(data) != part["crc32"]:
            raise ValueError(f"the checksum of object {name} does not match the object's bytes")
        return data

    # -- fencing and cleanup -----------------------------------------------------------------

    def _numbers(self, names: Iterable[str]) -> list[int]:
        return sorted(int(match[1]) for name in names if (match := _ENTRY.fullmatch(name)))

    def _check_owner(self, numbers: list[int]) -> None:
        """Raise Fenced if another process has written an entry that this process has not read."""
        if numbers and numbers[-1] > self._number and not self._is_own(numbers[-1]):
            raise self._fenced()

    def check_owner(self) -> None:
        """Raise Fenced if another process has written a log entry, StorageError on failure."""
        self._check_owner(self._numbers(self._store.names()))

    def _fenced(self) -> Fenced:
        """Return the error that names the process which has claimed the storage of this process."""
        by, generation = "another process", "higher"
        try:
            for number in reversed(self._numbers(self._store.names())):
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
            f"{self.address} has been taken over by {by}, as generation {generation}; this "
            f"process ({self._owner}) is generation {self._generation}, and writes nothing to it "
            "any more. The run continues with the other process. If that is a mistake, stop the "
            "other process first, or give this process another address."
        )

    def _collect(self) -> None:
        """Remove old checkpoints, and parts that no log entry names; log storage failures."""
        try:
            names = self._store.names()
            # A suspended process may have created an entry under a number that its successor has
            # freed. A higher entry number in the log stops the process, whose cleanup would
            # otherwise remove the successor's parts, which no entry of the process names.
            self._check_owner(self._numbers(names))
            snapshots = self._entries[-self.keep :]
            first = snapshots[0].number if snapshots else self._number
            needed = {part for entry in snapshots for part in entry.parts}
            for name in names:
                match = _ENTRY.fullmatch(name)
                if match is not None and int(match[1]) >= first:
                    needed.add(name)
            # Remove log entries before parts, because a log entry must never name a missing part.
            doomed = sorted(set(names) - needed, key=lambda name: not name.startswith("log/"))
            self._store.remove(doomed)
            self._entries = snapshots
        except StorageError as error:
            _log.warning("old checkpoint objects could not be deleted yet: %s", error)


def _name(number: int) -> str:
    return f"log/{number:09d}.json"


def _check_entry(content: dict[str, Any]) -> None:
    """Check the fields of every log entry; raise ValueError, KeyError or TypeError if wrong."""
    if content["kind"] not in (_SNAPSHOT, _CLAIM) or type(content["generation"]) is not int:
        raise ValueError("the stored object is not an entry of the checkpoint log")
    if content["kind"] == _SNAPSHOT:
        for part in content["parts"]:
            part["name"]
    str(content["token"])


def _joined(pieces: Iterable[memoryview], most_bytes: int) -> Iterator[bytes]:
    """Yield the joined array bytes in parts of ``most_bytes``; the last part may be shorter."""
    part = bytearray()
    for piece in pieces:
        remaining = piece.cast("B")
        while len(remaining):
            taken = remaining[: most_bytes - len(part)]
            part += taken
            remaining = remaining[len(taken) :]
            if len(part) == most_bytes:
                yield bytes(part)
                part.clear()
    if part:
        yield bytes(part)
