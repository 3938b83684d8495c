"""Writes files with worker groups and fractions of the training data for a later run."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from thinwire.ops.sync.groups import Groups, format_shares, shares
from thinwire.runtime.run.files import replace_file

GROUPS_NAME = "groups.txt"
SHARES_NAME = "data_sharding.txt"


def write_groups(folder: pathlib.Path, groups: Groups, speeds: Mapping[int, float]) -> str:
    """Write a file of worker groups and a file of the workers' fractions of the data.

    Args:
        folder: Path of the run directory.
        groups: Groups of all workers, each a list of worker ids.
        speeds: Worker id -> samples per second; a worker without a measurement has no entry.

    Returns:
        The flags by which another run uses the two files.
    """
    measured = "".join(f"#   worker {w}: {speed:.4g}\n" for w, speed in sorted(speeds.items()))
    head = f"# Proposed from measured samples per second:\n{measured}"
    lines = "".join(",".join(map(str, group)) + "\n" for group in groups)
    parts = format_shares(shares(groups, speeds))
    replace_file(folder / GROUPS_NAME, f"{head}# One group a line.\n{lines}")
    replace_file(folder / SHARES_NAME, f"{head}# start and end of worker 1, 2, ...\n{parts}")
    return (
        f"--groups_file={folder / GROUPS_NAME} --partition=file "
        f"--data_sharding_file={folder / SHARES_NAME}"
    )
