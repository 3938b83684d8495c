"""Text that every Python brings along: the sources of its standard library, byte by byte.

No files need to be fetched. Another Python brings other sources, so a digest of what was read is
logged: runs of the same digest have the same data.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import numpy as np
from absl import logging
from numpy.typing import NDArray

from thinwire.data.choices import CONTEXT
from thinwire.ops.types import ConfigurationError

#: Of the sorted files, every one of this number is the test part's.
_EACH_TEST_FILE = 10
#: Sequences of the test part, evenly from all of its text.
NUM_TEST = 1024
#: Folders of the standard library that an installation may have or leave out.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_ENDINGS = frozenset({".py", ".txt", ".md"})
_FEWEST = 2  # files: one of each part


def read(part: str, data_dir: str | None) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return sequences of bytes, and at each place the byte that follows.

    Args:
        part: "train" or "test": nine and one of ten files, in the order of their paths.
        data_dir: Folder whose .py, .txt and .md files are read instead of the standard library.

    Returns:
        Bytes int32 [N, CONTEXT] and the next ones int32 [N, CONTEXT].

    Raises:
        ConfigurationError: There are no files, or too little text in them.
    """
    folder = Path(data_dir or sysconfig.get_path("stdlib"))
    paths = _files(folder, frozenset({".py"}) if data_dir is None else _ENDINGS)
    if len(paths) < _FEWEST:
        expected = "the standard library's *.py" if data_dir is None else "*.py, *.txt or *.md"
        raise ConfigurationError(
            f"{folder} holds {len(paths)} files of text; expected {expected}, at least {_FEWEST}. "
            "Name another folder by --data_dir."
        )
    place = _EACH_TEST_FILE - 1 if len(paths) >= _EACH_TEST_FILE else len(paths) - 1
    is_test = [number % _EACH_TEST_FILE == place for number in range(len(paths))]
    chosen = [
        path for path, of_test in zip(paths, is_test, strict=True) if of_test == (part == "test")
    ]
    texts = [path.read_bytes() for path in chosen]
    text = np.frombuffer(b"".join(texts), np.uint8)
    starts = np.arange(0, len(text) - CONTEXT, CONTEXT)
    if not len(starts):
        raise ConfigurationError(
            f"{folder} holds {len(text)} bytes of text for the {part} part; expected more than "
            f"{CONTEXT}. Name another folder by --data_dir."
        )
    if part == "test" and len(starts) > NUM_TEST:
        starts = starts[np.arange(NUM_TEST) * len(starts) // NUM_TEST]
    digest = hashlib.sha256()
    for path, content in zip(chosen, texts, strict=True):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    logging.info(
        "data: %d %s sequences of %d bytes from %d files in %s, digest %s",
        *(len(starts), part, CONTEXT, len(chosen), folder, digest.hexdigest()[:12]),
    )
    windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)[starts].astype(np.int32)
    return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


def _files(folder: Path, endings: frozenset[str]) -> list[Path]:
    """Return the files to read, in an order that no file system decides."""
    found = [
        path
        for path in folder.rglob("*")
        if path.suffix in endings
        and not _SKIPPED & set(path.relative_to(folder).parts[:-1])
        and path.is_file()
    ]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())
