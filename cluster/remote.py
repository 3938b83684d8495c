"""What is done on hosts through ssh before a cluster starts: look, and copy the code.

ssh never asks anything (``BatchMode``) and checks host keys as the user's configuration says.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pathlib
import shlex
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from absl import flags, logging

from cluster.hosts import Host
from proto.channel_grpc import Unreachable

FLAGS = flags.FLAGS
Result = TypeVar("Result")
_PROBE = pathlib.Path(__file__).resolve().parent / "host_probe.py"
_PROBE_MARK = "thinwire-probe "
#: After the user's own options: the first value of an option counts.
_OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5",
            "-o", "SendEnv=THINWIRE_TOKEN",  # for hosts that accept it
            "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3")  # fmt: skip
_PROBE_SECONDS = 30.0
_COPY_SECONDS = 600.0
_AT_ONCE = 16  # hosts
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)  # what shells say of a program they cannot run


@dataclasses.dataclass(frozen=True)
class Probed:
    """What a host has."""

    num_cpus: int
    address: str | None  # of --interface


class HostFailed(Exception):
    """One host cannot be used; the text says why."""


class Ssh:
    """How hosts are reached."""

    def __init__(self, options: Sequence[str]) -> None:
        self._options = tuple(options)

    def command(self, host: Host, remote: str) -> list[str]:
        """Return the command line that runs a shell's line on a host."""
        return ["ssh", *self._arguments(host), "--", host.target, remote]

    def run(self, host: Host, remote: str, given: bytes, seconds: float) -> str:
        """Run a line on a host to its end; return what it writes.

        Args:
            host: Where.
            remote: A line for the host's shell.
            given: Its standard input.
            seconds: Patience.

        Raises:
            HostFailed: It did not end well, or in time.
        """
        try:
            done = subprocess.run(
                self.command(host, remote),
                input=given,
                capture_output=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise HostFailed(f"no answer within {seconds:g} s") from error
        if done.returncode != 0:
            words = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
            what = "ssh" if done.returncode == _SSH_FAILED else f"exit code {done.returncode}"
            hint = "; is --remote_python right?" if done.returncode in _NOT_FOUND else ""
            raise HostFailed(f"{what}: {words[-1].strip()}{hint}")
        return done.stdout.decode(errors="replace")

    def host_name(self, host: Host) -> str:
        """Return the name that stands behind an alias of ssh's configuration."""
        asked = subprocess.run(
            ["ssh", "-G", *self._arguments(host), "--", host.target],
            capture_output=True, text=True, check=False, timeout=_PROBE_SECONDS,
        )  # fmt: skip
        found = [line.split(" ", 1)[1] for line in asked.stdout.splitlines()
                 if line.startswith("hostname ")]  # fmt: skip
        return found[0] if found else host.name

    def probe(self, host: Host, python: str, interface: str) -> Probed:
        """Ask a host what it has.

        Args:
            host: Which.
            python: Its Python.
            interface: Name of the one whose address is wanted; empty for none.

        Raises:
            HostFailed: It cannot be reached, or lacks Python, packages or that interface.
        """
        line = f"exec {shlex.join([python, '-I', '-', interface])}"
        found = _answer(self.run(host, line, _PROBE.read_bytes(), _PROBE_SECONDS))
        if found["missing"]:
            raise HostFailed(
                f"{python} lacks {', '.join(found['missing'])} there; install the requirements, "
                "or set --remote_python"
            )
        if interface and found["address"] is None:
            raise HostFailed(
                f"--interface={interface} has no IPv4 address there; it has "
                f"{', '.join(found['interfaces'])}"
            )
        return Probed(found["cpus"], found["address"])

    def unpack(self, host: Host, archive: bytes, folder: str) -> None:
        """Unpack a .tar.gz into a folder of a host, which is made; raises HostFailed."""
        logging.info("copying the code to %s:%s", host, folder)
        line = (
            f"mkdir -p -- {shlex.quote(folder)} && exec tar -x -z -o -f - -C {shlex.quote(folder)}"
        )
        self.run(host, line, archive, _COPY_SECONDS)

    def _arguments(self, host: Host) -> list[str]:
        port = ["-p", str(host.port)] if host.port is not None else []
        return [*self._options, *port, *_OPTIONS]


def on_all(hosts: Sequence[Host], do: Callable[[Host], Result]) -> dict[Host, Result]:
    """Do something on every host, several at once.

    Raises:
        Unreachable: On some hosts it failed; all of these are named.
    """
    results: dict[Host, Result] = {}
    failures: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        pending = {host: pool.submit(do, host) for host in hosts}
        for host, future in pending.items():
            try:
                results[host] = future.result()
            except HostFailed as error:
                failures.append(f"line {host.line}, {host}: {error}")
    if failures:
        raise Unreachable(
            f"--hosts_file={FLAGS.hosts_file}: {len(failures)} of {len(hosts)} hosts cannot be "
            f"used, and nothing was started: {'; '.join(failures)}. Try `ssh HOST true` by hand."
        )
    return results


def _answer(written: str) -> dict[str, Any]:
    """Return what the probe found; a shell's greetings may stand around it."""
    for line in written.splitlines():
        if line.startswith(_PROBE_MARK):
            return dict(json.loads(line.removeprefix(_PROBE_MARK)))
    raise HostFailed("its shell or Python gave no answer; is --remote_python right?")
