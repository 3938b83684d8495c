"""Slurm's daemons for one test: two nodes on this machine, all files in the test's folder."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess

from tests.nodes import free_ports
from tests.waiting import wait_until

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "scancel")
_FOUND = {name: shutil.which(name, path=_PATH) for name in _PROGRAMS}
MISSING = (
    "no Slurm to start here: as root, apt-get install slurmctld slurmd slurm-client munge"
    if None in _FOUND.values() or os.geteuid() != 0
    else ""
)
#: Names of the nodes, which are dialed by name: all names lead to this machine.
HOSTS = ("127.0.0.1", "127.0.0.2")
_SECONDS = 20.0


class Slurm:
    """A running cluster; `srun` and the like find it by `environment`.

    Nothing is limited or bound to cores: a container forbids that.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._commands: list[subprocess.Popen[str]] = []
        folder.mkdir(mode=0o755)
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(self._config(free_ports(3)))
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        try:
            self._start_munge()
            self._start("slurmctld", "-D", "-c", "-i")
            for host in HOSTS:
                self._start("slurmd", "-D", "-N", host)
            self._wait()
        except BaseException:
            self.stop()
            raise

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start one of Slurm's commands in a separate process session; both outputs are merged."""
        started = subprocess.Popen(
            words,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._commands.append(started)
        return started

    def stop(self) -> None:
        """End the jobs and the daemons."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(["scancel", "--user=root"], env=self.environment, timeout=3, check=False)
        for command in self._commands:
            with contextlib.suppress(subprocess.TimeoutExpired):
                command.communicate(timeout=30)
            if command.poll() is None:
                command.kill()
                command.communicate()
        for process in reversed(self._daemons):
            process.terminate()
        for process in reversed(self._daemons):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start_munge(self) -> None:
        key, socket_file = self.folder / "munge.key", self.folder / "munge.socket"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {
            "key-file": key,
            "socket": socket_file,
            "pid-file": self.folder / "munged.pid",
            "log-file": self.folder / "munged.log",
            "seed-file": self.folder / "munge.seed",
        }
        self._start(
            "munged", "--foreground", "--force", *(f"--{k}={path}" for k, path in files.items())
        )
        self._until(socket_file.exists, "munged.out")

    def _start(self, name: str, *words: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as log:
            command = [str(_FOUND[name]), *words]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)
        self._daemons.append(process)

    def _wait(self) -> None:
        """Wait until both nodes take jobs."""

        def is_ready() -> bool:
            command = ["sinfo", "-h", "-o", "%T %D"]
            done = subprocess.run(
                command, env=self.environment, capture_output=True, text=True, check=False
            )
            return done.stdout.split() == ["idle", str(len(HOSTS))]

        self._until(is_ready, "slurmctld.out")

    def _until(self, is_so, log: str) -> None:
        written = self.folder / log
        wait_until(
            is_so, _SECONDS, lambda: f"a start of Slurm: {written.read_text()[-2000:]}", 0.05
        )

    def _config(self, ports: list[int]) -> str:
        folder, own = self.folder, socket.gethostname()
        control, *of_nodes = ports
        nodes = (
            f"NodeName={host} NodeHostname={own} NodeAddr={host} Port={port} CPUs=8"
            for host, port in zip(HOSTS, of_nodes, strict=True)
        )
        lines = (
            "ClusterName=thinwire",
            f"SlurmctldHost={own}(127.0.0.1)",
            f"SlurmctldPort={control}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            "CryptoType=crypto/munge",
            f"AuthInfo=socket={folder}/munge.socket",
            f"StateSaveLocation={folder}/state",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdSpoolDir={folder}/spool.%n",
            f"SlurmdPidFile={folder}/slurmd.%n.pid",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SlurmdParameters=config_overrides",
            "ReturnToService=2",
            "KillWait=20",
            *nodes,
            "PartitionName=all Nodes=ALL Default=YES State=UP",
            "",
        )
        return "\n".join(lines)
