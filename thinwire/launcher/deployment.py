"""Packs the Python code and the files that the ssh and Ray launchers send to hosts.

Every host of a run unpacks the same .tar.gz archive into a folder. The archive holds:

    thinwire/         the package; symbolic links of a checkout are replaced by their folders
    sent/FLAG/FILE    each file that a flag names and every node reads, for example --model
    sent/policy/FILE  also the modules beside the file of --policy that the file imports
    sent/script/      the folder of the script

The archive has only the top-level entries `thinwire` and `sent`: a folder named `data` or `ops`
would hide a module of the user's. The launchers do not send these parts of the script's folder:
hidden files, `__pycache__`, the folder `runs/`, and the token and key files that flags name.
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
from thinwire.launcher.program import HostPrograms
from thinwire.launcher.role import Node
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run import own_policies
from thinwire.runtime.run.script_settings import IN_SCRIPT_FOLDER, SENT_SCRIPT
from thinwire.runtime.run.script_target import MODULE_OPTION

FLAGS = flags.FLAGS
#: Flags whose files the launcher does not send to hosts, because no node reads the hosts file, and
#: the token file holds a secret.
_NOT_SENT = ("hosts_file", "token_file")
#: Flags that name files with secrets. The files may be in the script's folder, and `{node}` in the
#: values of these flags is a placeholder for a node's name.
_SECRETS = ("token_file", "tls_key")
_SENT = "sent"
_LARGEST_ARCHIVE_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class CodeDeployment:
    """Location of the Python code on a host, and the archive that the host unpacks."""

    # Working directory of nodes on the host; a relative path starts at the home directory
    folder: str
    programs: HostPrograms  # Python's arguments that run a node, script or watchdog on the host
    flags: tuple[str, ...]  # flags that name files, with the paths of the copied files on the host
    # .tar.gz that the host unpacks in `folder`; None if the host has the code already
    archive: bytes | None

    def words(self, node: Node, own_flags: Sequence[str]) -> list[str]:
        """Return the arguments of the Python interpreter that start a node on the host.

        Args:
            node: PS shard or worker to start.
            own_flags: Flags that the launcher adds to the node's command line for the node's host.
        """
        if node.script and self.archive is not None:
            if node.script[0] != MODULE_OPTION:
                copy = f"{SENT_SCRIPT}/{pathlib.Path(node.script[0]).resolve().name}"
                node = dataclasses.replace(node, script=(copy, *node.script[1:]))
            own_flags = [*own_flags, IN_SCRIPT_FOLDER]
        return node.words(self.programs, [*self.flags, *own_flags])


def code_deployment(script_folder: pathlib.Path | None = None) -> CodeDeployment:
    """Return where hosts have Thinwire's code: in the current folder, or in --sync_dst_dir.

    Args:
        script_folder: Folder of the user's script, which is copied with Thinwire's code; None if
            the run has no script.

    Raises:
        ConfigurationError: --sync_dst_dir is not a folder below / or the home directory, or a file
            that a flag names is missing on the launching host.
    """
    if FLAGS.sync_dst_dir is None:
        return CodeDeployment(os.getcwd(), program.ELSEWHERE, (), None)
    folder = FLAGS.sync_dst_dir.removeprefix("~/").rstrip("/")
    if not folder or folder.startswith(("~", "-")):
        raise ConfigurationError(
            f"--sync_dst_dir={FLAGS.sync_dst_dir}: expected a folder only for the copied code, "
            "absolute or relative to the home directory, for example /tmp/thinwire or ~/thinwire."
        )
    return copied_code(folder, script_folder)


def copied_code(folder: str, script_folder: pathlib.Path | None = None) -> CodeDeployment:
    """Pack Thinwire's code and the files that flags name; return where each host unpacks them.

    Args:
        folder: Path of the folder in which each host unpacks the archive.
        script_folder: Folder of the user's script, which is copied with Thinwire's code; None if
            the run has no script.

    Raises:
        ConfigurationError: A file that a flag names is missing on the launching host, or the
            archive is too large.
    """
    files = _named_files()
    return CodeDeployment(
        folder,
        program.COPIED,
        tuple(f"--{name}={_place(name, path)}" for name, path in files.items()),
        pack(files, script_folder),
    )


def pack(files: dict[str, pathlib.Path], script_folder: pathlib.Path | None = None) -> bytes:
    """Return the archive of code and files that hosts unpack, as the content of a .tar.gz file.

    Args:
        files: Name of a flag -> path of the file that the flag names.
        script_folder: Folder of the user's script; None if the run has no script.

    Raises:
        ConfigurationError: The archive of code and files exceeds `_LARGEST_ARCHIVE_BYTES`.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:

        def add(path: pathlib.Path, name: str, keeps: Callable[[str], bool]) -> None:
            def keep(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
                _check_size(buffer, path)
                # The archive must not show the name of the files' owner to the hosts.
                info.uid = info.gid = 0
                info.uname = info.gname = ""
                return info if keeps(info.name) else None

            archive.add(path.resolve(), name, filter=keep)
            _check_size(buffer, path)

        for path in sorted(program.PACKAGE.iterdir()):
            add(path, f"{program.PACKAGE.name}/{path.name}", _is_visible)
        for name, path in files.items():
            add(path, _place(name, path), lambda _: True)
        # A file of policies may import modules beside it, which every host needs too.
        own = own_policies.loaded() if "policy" in files else None
        for name, path in own.beside.items() if own is not None else ():
            add(path, f"{_SENT}/policy/{name}", lambda _: True)
        if script_folder is not None:
            add(script_folder, SENT_SCRIPT, _rule_of_script(script_folder.resolve()))
    return buffer.getvalue()


def unpack(archive: bytes, folder: pathlib.Path) -> None:
    """Unpack an archive that `pack` has returned into a folder of this host.

    `unpack` skips symbolic links that lead out of the folder, with a warning. Ray, which sends the
    unpacked folder to its nodes, would follow a symbolic link out of the folder and send the link's
    target.
    """

    def keep(info: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        try:
            return tarfile.data_filter(info, path)
        except tarfile.FilterError as error:
            logging.warning("unsafe copied file %s is not unpacked: %s", info.name, error)
            return None

    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(folder, filter=keep)


def _named_files() -> dict[str, pathlib.Path]:
    """Return name of a flag -> path, for the flags that name a file which every node reads."""
    named = {
        name: pathlib.Path(str(FLAGS[name].value))
        for name in FLAGS
        if (name in ("model", "policy") or name.endswith("_file"))
        and name not in _NOT_SENT
        and FLAGS[name].present
        and FLAGS[name].value is not None
    }
    for name, path in named.items():
        if not path.is_file():
            raise ConfigurationError(
                f"--{name}={path} is not a file; expected a file to copy to every host."
            )
    return named


def _place(name: str, path: pathlib.Path) -> str:
    return f"{_SENT}/{name}/{path.name}"


def _check_size(buffer: io.BytesIO, path: pathlib.Path) -> None:
    if buffer.getbuffer().nbytes > _LARGEST_ARCHIVE_BYTES:
        raise ConfigurationError(
            f"the folder {path} is too large to be copied to every host; expected at most "
            f"{_LARGEST_ARCHIVE_BYTES >> 20} MiB when packed. Put the script into a folder "
            "without data; over ssh you can also leave --sync_dst_dir out and use a shared disk."
        )


def _is_visible(name: str) -> bool:
    """Return False for hidden files and compiled Python files, which are not sent to hosts."""
    return not any(part == "__pycache__" or part.startswith(".") for part in name.split("/"))


def _rule_of_script(folder: pathlib.Path) -> Callable[[str], bool]:
    """Return a predicate: True if a file of the script's folder, by archive name, is sent to hosts.

    The launcher does not send the run's token and key files, and the folder `runs/`.
    """
    paths = [str(FLAGS[name].value) for name in _SECRETS if name in FLAGS and FLAGS[name].value]
    matches = (glob.glob(glob.escape(path).replace("{node}", "*")) for path in paths)
    secrets = {os.path.realpath(file) for file in itertools.chain(*matches)}

    def keeps(name: str) -> bool:
        is_secret = os.path.realpath(folder / name.removeprefix(f"{SENT_SCRIPT}/")) in secrets
        return _is_visible(name) and name != f"{SENT_SCRIPT}/runs" and not is_secret

    return keeps
