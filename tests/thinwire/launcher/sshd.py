"""An sshd for one test: loopback, any free port, keys and known hosts in the test's folder."""

from __future__ import annotations

import getpass
import os
import pathlib
import shutil
import socket
import subprocess

from tests.nodes import free_port
from tests.waiting import wait_until

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
MISSING = "no sshd: apt-get install openssh-server openssh-client"
_PRIVILEGE_SEPARATION = pathlib.Path("/run/sshd")  # an sshd of root insists on it


class Sshd:
    """A running sshd that lets in the key of this folder."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.port = folder, free_port()
        folder.mkdir()
        folder.chmod(0o700)
        for name in ("host_key", "key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        (folder / "authorized_keys").write_text((folder / "key.pub").read_text())
        public = " ".join((folder / "host_key.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {public}\n")
        (folder / "config").write_text(self._config())
        if os.geteuid() == 0:
            _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        with open(folder / "log", "wb") as log:
            command = [str(SSHD), "-D", "-e", "-f", str(folder / "config")]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self._wait()

    @property
    def host(self) -> str:
        """The line of a hosts file."""
        return f"{getpass.getuser()}@127.0.0.1:{self.port}"

    @property
    def options(self) -> str:
        """For --ssh_options: nothing of the user's own configuration counts."""
        return f"-F none -i {self.folder}/key -o UserKnownHostsFile={self.folder}/known_hosts"

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)

    def _config(self) -> str:
        return "\n".join(
            (
                f"Port {self.port}",
                "ListenAddress 127.0.0.1",
                f"HostKey {self.folder}/host_key",
                f"AuthorizedKeysFile {self.folder}/authorized_keys",
                f"PidFile {self.folder}/pid",
                "UsePAM no",
                "PasswordAuthentication no",
                "PermitRootLogin yes",
                "StrictModes no",
                "",
            )
        )

    def _wait(self) -> None:
        log = self.folder / "log"
        wait_until(self._listens, 10, lambda: f"sshd listens: {log.read_text()}", 0.05)

    def _listens(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True
