"""Where the code lies on the hosts of a cluster, and what is sent there."""

from __future__ import annotations

import dataclasses
import io
import os
import pathlib
import tarfile

from absl import flags

from cluster.kept import KEEPER
from cluster.launch import MAIN
from ops.types import ConfigurationError

FLAGS = flags.FLAGS
#: What a node needs; its packages are the host's own.
ROOMS = ("cluster", "data", "models", "ops", "proto", "ps", "supervisor", "thinwire", "worker")
#: Flags that name files which stay here: no node reads the one, the other holds a secret.
_NOT_SENT = ("hosts_file", "token_file")
#: Folder of the files that flags name, beside the code.
_SENT = "sent"


@dataclasses.dataclass(frozen=True)
class CodePlace:
    """The code on a host."""

    folder: str  # where nodes run; relative: to the home directory
    main: str  # main.py, from there
    keeper: str  # cluster/keeper.py, from there
    flags: tuple[str, ...]  # that name files, as they lie there
    archive: bytes | None  # .tar.gz to unpack in `folder`; None: it is there already


def code_place() -> CodePlace:
    """Return where hosts have the code, as --sync_dst_dir says.

    Raises:
        ConfigurationError: A folder that a host would not find, or a file that is missing here.
    """
    if FLAGS.sync_dst_dir is None:
        return CodePlace(os.getcwd(), str(MAIN), str(KEEPER), (), None)
    folder = FLAGS.sync_dst_dir.removeprefix("~/").rstrip("/")
    if not folder or folder.startswith(("~", "-")):
        raise ConfigurationError(
            f"--sync_dst_dir={FLAGS.sync_dst_dir}: expected a folder of its own, absolute or from "
            "the home directory, such as /tmp/thinwire or ~/thinwire."
        )
    files = _named_files()
    flags_there = tuple(f"--{name}={_place(name, path)}" for name, path in files.items())
    return CodePlace(folder, MAIN.name, f"cluster/{KEEPER.name}", flags_there, pack(files))


def _named_files() -> dict[str, pathlib.Path]:
    """Return flag -> file of the flags that name one each node reads."""
    named = {
        name: pathlib.Path(str(FLAGS[name].value))
        for name in FLAGS
        if (name == "model" or name.endswith("_file"))
        and name not in _NOT_SENT
        and FLAGS[name].present
        and FLAGS[name].value is not None
    }
    for name, path in named.items():
        if not path.is_file():
            raise ConfigurationError(f"--{name}={path} is no file; every host gets a copy of it.")
    return named


def _place(name: str, path: pathlib.Path) -> str:
    return f"{_SENT}/{name}/{path.name}"


def pack(files: dict[str, pathlib.Path]) -> bytes:
    """Return the code, and the files that flags name, as a .tar.gz."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        archive.add(MAIN, MAIN.name, filter=_member)
        for room in ROOMS:
            archive.add(MAIN.parent / room, room, filter=_member)
        for name, path in files.items():
            archive.add(path, _place(name, path), filter=_nobodys)
    return buffer.getvalue()


def _member(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out what a run does not need."""
    parts = pathlib.PurePosixPath(info.name).parts
    if "__pycache__" in parts or any(part.startswith(".") for part in parts):
        return None
    return _nobodys(info)


def _nobodys(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Forget who owns a file here."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
