"""Reader of text: the source files of Python's standard library, as sequences of bytes.

Python's standard library is part of every Python, so its text needs no download. The source files
of Python's standard library differ between versions of Python. Because texts differ between
versions of Python, the reader logs a digest of the text; runs with equal digests train on equal
data.
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

#: Every tenth of the sorted text files belongs to the test part.
_EACH_TEST_FILE = 10
#: Largest number of sequences in the test part, evenly spaced in the text.
NUM_TEST = 1024
#: Folders of the standard library that some installations do not have, and folders of added
#: packages.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_ENDINGS = frozenset({".py", ".txt", ".md"})
_FEWEST = 2  # smallest number of text files: one for the train part, one for the test part


def read(part: str, data_dir: str | None) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return sequences of bytes of a text, and the byte that follows each byte in the text.

    Args:
        part: Part of the text, "train" or "test". Of ten files in the order of their paths, nine
            are in the train part and one is in the test part.
        data_dir: Folder of .py, .txt and .md files to read; None for the standard library.

    Returns:
        Bytes int32 [N, CONTEXT], and the next bytes int32 [N, CONTEXT].

    Raises:
        ConfigurationError: There are fewer than two text files, or the files contain too little
            text.
    """
    folder = Path(data_dir or sysconfig.get_path("stdlib"))
    paths = _files(folder, frozenset({".py"}) if data_dir is None else _ENDINGS)
    if len(paths) < _FEWEST:
        expected = "the standard library's *.py" if data_dir is None else "*.py, *.txt or *.md"
        raise ConfigurationError(
            f"the folder {folder} contains {len(paths)} files of text; expected {expected}, at "
            f"least {_FEWEST} files. Name another folder with --data_dir."
        )
    place = _EACH_TEST_FILE - 1 if len(paths) >= _EACH_TEST_FILE else len(paths) - 1
    numbered = enumerate(paths)
    wants_test = part == "test"
    chosen = [path for n, path in numbered if (n % _EACH_TEST_FILE == place) == wants_test]
    texts = [path.read_bytes() for path in chosen]
    text = np.frombuffer(b"".join(texts), np.uint8)
    starts = np.arange(0, len(text) - CONTEXT, CONTEXT)
    if not len(starts):
        raise ConfigurationError(
            f"the folder {folder} contains {len(text)} bytes of text for the {part} part; "
            f"expected more than {CONTEXT} bytes. Name another folder with --data_dir."
        )
    if part == "test" and len(starts) > NUM_TEST:
        starts = starts[np.arange(NUM_TEST) * len(starts) // NUM_TEST]
    digest = hashlib.sha256()
    for path, content in zip(chosen, texts, strict=True):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    logging.info(
        "data: read %d %s sequences of %d bytes from %d files in %s; the digest is %s",
        *(len(starts), part, CONTEXT, len(chosen), folder, digest.hexdigest()[:12]),
    )
    windows = np.lib.stride_tricks.sliding_window_view(text, CONTEXT + 1)[starts].astype(np.int32)
    return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])


def _files(folder: Path, endings: frozenset[str]) -> list[Path]:
    """Return the text files to read, sorted by path, independent of the file system's order."""
    paths = [
        path
        for path in folder.rglob("*")
        if path.suffix in endings
        and not _SKIPPED & set(path.relative_to(folder).parts[:-1])
        and path.is_file()
    ]
    return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())
