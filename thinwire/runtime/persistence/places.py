"""Where the checkpoints of a PS are kept: in the run directory, or at --checkpoint_dir."""

from __future__ import annotations

import pathlib
import re

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.checkpoint import Checkpoints, CheckpointStore
from thinwire.runtime.persistence.fsspec_objects import open_objects
from thinwire.runtime.persistence.object_store import StorageError
from thinwire.runtime.persistence.published_files import CLAIMS, PublishedFiles
from thinwire.runtime.persistence.stored_checkpoints import StoredCheckpoints

CHECKPOINTS, REPORTS = "checkpoint_dir", "report_dir"  # flags
_NODE = re.compile(r"(ps-\d+(?:-ended)?)/.*")


def checkpoints_at(
    address: str | None, node: str, folder: pathlib.Path, keep: int
) -> CheckpointStore:
    """Return where a node's checkpoints are kept.

    Args:
        address: --checkpoint_dir; None: in the run directory.
        node: Its name, such as ``ps-0``.
        folder: Of the node in the run directory.
        keep: How many checkpoints to keep.

    Raises:
        ConfigurationError: Nothing can be kept at the address.
    """
    if address is None:
        return Checkpoints(folder, keep=keep)
    return StoredCheckpoints(open_objects(address, CHECKPOINTS).below(node), keep)


def discard_checkpoints(address: str, node: str | None, owner: str) -> None:
    """Remove the checkpoints at an address; whoever writes them is fenced.

    Args:
        address: --checkpoint_dir.
        node: Whose; None: of all nodes.
        owner: Who removes them.

    Raises:
        ConfigurationError: The storage failed.
    """
    store = open_objects(address, CHECKPOINTS)
    try:
        matches = (_NODE.fullmatch(name) for name in store.names())
        nodes = sorted({match[1] for match in matches if match})
    except StorageError as error:
        raise ConfigurationError(f"{error}.") from error
    for each in nodes:
        if node in (None, each, each.removesuffix("-ended")):
            StoredCheckpoints(store.below(each)).discard(owner)


def discard_records(address: str, owner: str) -> None:
    """Remove the records at an address; a Supervisor that publishes there is fenced.

    Args:
        address: --report_dir.
        owner: Who removes them.

    Raises:
        ConfigurationError: The storage failed.
    """
    PublishedFiles(open_objects(address, REPORTS), owner).discard()


def check_place(address: str, flag: str) -> None:
    """Try an address out, so that a run does not learn late that it cannot write there.

    Args:
        address: Of --checkpoint_dir or --report_dir.
        flag: Which of the two.

    Raises:
        ConfigurationError: It names no storage, or one that cannot be reached, written or read.
    """
    store = open_objects(address, flag, is_start=True)
    probed = store.below("ps-0" if flag == CHECKPOINTS else CLAIMS)
    try:
        probed.check()
    except StorageError as error:
        raise ConfigurationError(
            f"--{flag}={address}: {error}. Expected a bucket or folder that is there, that these "
            "credentials may list and write, and that this machine reaches."
        ) from error
