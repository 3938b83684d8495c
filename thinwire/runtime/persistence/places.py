"""Opens the storage of a PS's checkpoints: in the run directory, or at --checkpoint_dir."""

from __future__ import annotations

import pathlib
import re

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.persistence.checkpoint_log import CheckpointLog
from thinwire.runtime.persistence.fsspec_objects import open_objects
from thinwire.runtime.persistence.object_store import StorageError
from thinwire.runtime.persistence.published_files import CLAIMS, PublishedFiles

CHECKPOINTS, REPORTS = "checkpoint_dir", "report_dir"  # flags that hold storage addresses
_NODE = re.compile(r"(ps-\d+(?:-ended)?)/.*")


def checkpoints_at(address: str | None, node: str, folder: pathlib.Path, keep: int) -> Checkpoints:
    """Return the storage of a node's checkpoints.

    Args:
        address: Value of the flag --checkpoint_dir. None: store the checkpoints in ``folder``.
        node: Name of the node, for example ``ps-0``.
        folder: The node's checkpoint folder in the run directory.
        keep: Number of newest checkpoints that the storage keeps.

    Raises:
        ConfigurationError: The storage address is malformed, or its storage cannot hold
            checkpoints.
    """
    if address is None:
        return Checkpoints.in_folder(folder, keep)
    return Checkpoints(open_objects(address, CHECKPOINTS).below(node), keep)


def discard_checkpoints(address: str, node: str | None, owner: str) -> None:
    """Remove the checkpoints at a storage address; fence (end) a process that still writes there.

    Args:
        address: Value of the flag --checkpoint_dir.
        node: Name of the node whose checkpoints to remove, for example ``ps-0``. None: all nodes.
        owner: Description of this process, for the error message of a writer that this process
            replaces.

    Raises:
        ConfigurationError: The object storage at the address failed.
    """
    store = open_objects(address, CHECKPOINTS)
    try:
        matches = (_NODE.fullmatch(name) for name in store.names())
        nodes = sorted({match[1] for match in matches if match})
    except StorageError as error:
        raise ConfigurationError(f"{error}.") from error
    for name in nodes:
        if node in (None, name, name.removesuffix("-ended")):
            CheckpointLog(store.below(name)).take_over(owner, discards=True)


def discard_records(address: str, owner: str) -> None:
    """Remove the copies of a run's records at a storage address; fence (end) a copying Supervisor.

    Args:
        address: Value of the flag --report_dir.
        owner: Description of this process, for the error message of a writer that this process
            replaces.

    Raises:
        ConfigurationError: The object storage at the address failed.
    """
    PublishedFiles(open_objects(address, REPORTS), owner).discard()


def check_place(address: str, flag: str) -> None:
    """Test a storage address before a run starts, so that an unusable address fails early.

    Args:
        address: Value of --checkpoint_dir or --report_dir.
        flag: Name of the flag that gave the address: "checkpoint_dir" or "report_dir".

    Raises:
        ConfigurationError: The storage address is malformed, or its storage cannot be reached,
            written or read.
    """
    store = open_objects(address, flag, is_start=True)
    probed = store.below("ps-0" if flag == CHECKPOINTS else CLAIMS)
    try:
        probed.check()
    except StorageError as error:
        raise ConfigurationError(
            f"--{flag}={address} is not usable: {error}. Expected an existing bucket or folder "
            "that this host can reach, and that its credentials may list and write."
        ) from error
