"""The code and the files that ssh and Ray send to hosts.

One archive holds, for a folder of a host:

    thinwire/         the package; folders take the place of the links that a checkout has there
    sent/FLAG/FILE    each file that a flag names and every node reads, such as --model
    sent/script/      the folder of the script

Nothing else lies at the top, where a folder named `data` or `ops` would hide a module of the
user's. These parts of the script's folder are not sent: hidden files, `__pycache__`, its `runs/`,
and the token and the keys that flags name.
"""

from __future__ import annotations

import dataclasses
import glob
import io
import itertools
import os
import pathlib
import tarfile
from collections.abc import Callable, Sequence

from absl import flags, logging

from thinwire.launcher import program
from thinwire.launcher.role import Node
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.script_settings import IN_SCRIPT_FOLDER, SENT_SCRIPT
from thinwire.runtime.run.script_target import MODULE_OPTION

FLAGS = flags.FLAGS
#: Flags that name files which stay here: no node reads the one, the other holds a secret.
_NOT_SENT = ("hosts_file", "token_file")
#: Flags that name secrets, which may lie in the script's folder; `{node}` stands for any node.
_SECRETS = ("token_file", "tls_key")
_SENT = "sent"
_LARGEST_ARCHIVE_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class CodeDeployment:
    """Where the code lies on a host, and the archive that puts it there."""

    folder: str  # where nodes run; relative: to the home directory
    node: tuple[str, ...]  # the arguments of Python that run a node there
    script: tuple[str, ...]  # ... a script
    watchdog: tuple[str, ...]  # ... and the watchdog
    flags: tuple[str, ...]  # that name files, with their paths there
    archive: bytes | None  # .tar.gz to unpack in `folder`; None: it is there already

    def words(self, node: Node, own_flags: Sequence[str]) -> list[str]:
        """Return what follows Python on a node's command line there.

        Args:
            node: Which.
            own_flags: What the host adds.
        """
        if node.script and self.archive is not None:
            if node.script[0] != MODULE_OPTION:
                there = f"{SENT_SCRIPT}/{pathlib.Path(node.script[0]).resolve().name}"
                node = dataclasses.replace(node, script=(there, *node.script[1:]))
            own_flags = [*own_flags, IN_SCRIPT_FOLDER]
        return node.words(self.node, self.script, [*self.flags, *own_flags])


def code_deployment(script_folder: pathlib.Path | None = None) -> CodeDeployment:
    """Return where hosts have the code: this folder, or that of --sync_dst_dir.

    Args:
        script_folder: That of the script, which is copied with the code; None: there is none.

    Raises:
        ConfigurationError: A folder that a host would not find, or a file that is missing here.
    """
    if FLAGS.sync_dst_dir is None:
        return CodeDeployment(
            os.getcwd(), program.NODE, program.SCRIPT, program.REMOTE_WATCHDOG, (), None
        )
    folder = FLAGS.sync_dst_dir.removeprefix("~/").rstrip("/")
    if not folder or folder.startswith(("~", "-")):
        raise ConfigurationError(
            f"--sync_dst_dir={FLAGS.sync_dst_dir}: expected a folder of its own, absolute or from "
            "the home directory, such as /tmp/thinwire or ~/thinwire."
        )
    return copied_code(folder, script_folder)


def copied_code(folder: str, script_folder: pathlib.Path | None = None) -> CodeDeployment:
    """Return what is copied into a folder of each host.

    Args:
        folder: There.
        script_folder: That of the script, which is copied with the code; None: there is none.

    Raises:
        ConfigurationError: A file that is missing here, or too large.
    """
    files = _named_files()
    return CodeDeployment(
        folder,
        program.COPIED_NODE,
        program.COPIED_SCRIPT,
        program.COPIED_WATCHDOG,
        tuple(f"--{name}={_place(name, path)}" for name, path in files.items()),
        pack(files, script_folder),
    )


def pack(files: dict[str, pathlib.Path], script_folder: pathlib.Path | None = None) -> bytes:
    """Return the archive, a .tar.gz.

    Args:
        files: Flag -> file.
        script_folder: That of the script; None: there is none.

    Raises:
        ConfigurationError: It is too large.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:

        def add(path: pathlib.Path, name: str, keeps: Callable[[str], bool]) -> None:
            def keep(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
                _check_size(buffer, path)
                info.uid = info.gid = 0  # a host does not learn who owns a file here
                info.uname = info.gname = ""
                return info if keeps(info.name) else None

            archive.add(path.resolve(), name, filter=keep)
            _check_size(buffer, path)

        for path in sorted(program.PACKAGE.iterdir()):
            add(path, f"{program.PACKAGE.name}/{path.name}", _is_visible)
        for name, path in files.items():
            add(path, _place(name, path), lambda _: True)
        if script_folder is not None:
            add(script_folder, SENT_SCRIPT, _rule_of_script(script_folder.resolve()))
    return buffer.getvalue()


def unpack(archive: bytes, folder: pathlib.Path) -> None:
    """Unpack an archive into a folder of this host.

    Links that lead out of the folder are left out, with a warning: Ray, which sends the folder to
    its nodes, would follow them and send the files behind them.
    """

    def keep(info: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        try:
            return tarfile.data_filter(info, path)
        except tarfile.FilterError as error:
            logging.warning("%s is not sent: %s", info.name, error)
            return None

    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter=keep)


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


def _check_size(buffer: io.BytesIO, path: pathlib.Path) -> None:
    if buffer.getbuffer().nbytes > _LARGEST_ARCHIVE_BYTES:
        raise ConfigurationError(
            f"{path} is too large to be copied to every host (more than "
            f"{_LARGEST_ARCHIVE_BYTES >> 20} MiB packed); put the script into a folder without "
            "data; over ssh you can also leave --sync_dst_dir out and use a shared disk."
        )


def _is_visible(name: str) -> bool:
    """Return whether a file may be needed there: no hidden one is, and no compiled one."""
    return not any(part == "__pycache__" or part.startswith(".") for part in name.split("/"))


def _rule_of_script(folder: pathlib.Path) -> Callable[[str], bool]:
    """Return a rule: whether the file of a script's folder with this name in the archive is sent.

    Secrets of this run and records of earlier runs are not.
    """
    given = [str(FLAGS[name].value) for name in _SECRETS if name in FLAGS and FLAGS[name].value]
    found = (glob.glob(glob.escape(each).replace("{node}", "*")) for each in given)
    secrets = {os.path.realpath(each) for each in itertools.chain(*found)}

    def keeps(name: str) -> bool:
        is_secret = os.path.realpath(folder / name.removeprefix(f"{SENT_SCRIPT}/")) in secrets
        return _is_visible(name) and name != f"{SENT_SCRIPT}/runs" and not is_secret

    return keeps
