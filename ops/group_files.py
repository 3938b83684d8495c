"""Proposed groups and shares as files that the next run takes as they are."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

from ops import grouping

GROUPS_NAME = "groups.txt"
SHARES_NAME = "data_sharding.txt"


def write(folder: pathlib.Path, groups: grouping.Groups, speeds: Mapping[int, float]) -> str:
    """Write a groups file and a data-sharding file.

    Args:
        folder: The run directory.
        groups: Of all workers.
        speeds: Worker -> samples per second; may lack some.

    Returns:
        The flags that make another run use them.
    """
    measured = "".join(f"#   worker {w}: {speed:.4g}\n" for w, speed in sorted(speeds.items()))
    head = f"# Proposed from measured samples per second:\n{measured}"
    lines = "".join(",".join(map(str, group)) + "\n" for group in groups)
    parts = grouping.format_shares(grouping.shares(groups, speeds))
    _replace(folder / GROUPS_NAME, f"{head}# One group a line.\n{lines}")
    _replace(folder / SHARES_NAME, f"{head}# start and end of worker 1, 2, ...\n{parts}")
    return (
        f"--groups_file={folder / GROUPS_NAME} --partition=file "
        f"--data_sharding_file={folder / SHARES_NAME}"
    )


def _replace(path: pathlib.Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
