"""The files of a node's checkpoints in a run directory, for tests that read or damage them."""

import json
import pathlib

from thinwire.ops.types import State
from thinwire.runtime.persistence.checkpoint import Checkpoints


def entries(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the log entries of the checkpoints in a folder, oldest first."""
    return sorted((folder / "log").glob("*.json"))


def arrays_of(entry: pathlib.Path) -> pathlib.Path:
    """Return the only part of a checkpoint: the file with the bytes of its arrays."""
    (part,) = json.loads(entry.read_bytes())["content"]["parts"]
    return entry.parent.parent / part["name"]


def load(entry: pathlib.Path) -> tuple[int, State]:
    """Return training step and state of the checkpoint of a log entry."""
    checkpoints = Checkpoints.in_folder(entry.parent.parent)
    checkpoints.log.read()
    (found,) = [each for each in checkpoints.log.entries if each.number == int(entry.stem)]
    return checkpoints.load(found)
