"""Nodes on the hosts of a file, reached through ssh; the Supervisor stays on the launching node.

First every host is probed (`Ssh.probe`): one that cannot be reached is named and nothing is
started. Then the code is copied, if --sync_dst_dir is given (`thinwire.launcher.deployment`). Then
each node runs at the far end of an ssh of its own, under a watchdog that ends it when this end is
gone.

ssh never prompts (``BatchMode``) and checks host keys according to the user's configuration.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import ipaddress
import json
import pathlib
import shlex
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import IO, Any, TypeVar

from absl import flags, logging

from thinwire.flags import launch, security
from thinwire.launcher import deployment, program
from thinwire.launcher.hosts import Host, parse_hosts, place
from thinwire.launcher.local import SupervisedProcess, start_here, watchdog_command
from thinwire.launcher.output import NamedLines, Screen, report_losses
from thinwire.launcher.role import Node, threads_of, whole_input
from thinwire.ops.types import ConfigurationError
from thinwire.proto.grpc import Unreachable, check_bind
from thinwire.proto.grpc.common import host_and_port, is_loopback
from thinwire.runtime.run.files import read_bounded
from thinwire.runtime.run.script_settings import INPUT_COPY, SETTINGS_FOLDER
from thinwire.runtime.run.settings import Run

FLAGS = flags.FLAGS
Result = TypeVar("Result")
_PROBE = pathlib.Path(__file__).resolve().parent / "host_probe.py"
_PROBE_MARK = "thinwire-probe "
#: After the user's own options: the first value of an option counts.
_OPTIONS = (
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=5",
    "-o",
    "SendEnv=THINWIRE_TOKEN",  # for hosts that accept it
    "-o",
    "ServerAliveInterval=15",
    "-o",
    "ServerAliveCountMax=3",
)
_PROBE_SECONDS = 30.0
_COPY_SECONDS = 600.0
_BEAT_SECONDS = 1.0
_MOST_CONNECTIONS = 16  # hosts at a time
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)  # a shell's exit codes for a program that it cannot run
_START_SECONDS = 30.0
_ANY = ("0.0.0.0", "::")


@dataclasses.dataclass(frozen=True)
class ProbedHost:
    """The probe's result of one host."""

    num_cpus: int
    address: str | None  # of --interface


class HostFailed(Exception):
    """One host cannot be used, for the reason in the text."""


class Ssh:
    """How hosts are reached."""

    def __init__(self, options: Sequence[str]) -> None:
        self._options = tuple(options)

    def command(self, host: Host, remote: str) -> list[str]:
        """Return the command line that runs a shell's line on a host."""
        return ["ssh", *self._arguments(host), "--", host.target, remote]

    def run(self, host: Host, remote: str, given: bytes | IO[bytes], seconds: float) -> str:
        """Run a line on a host to its end; return its output.

        Args:
            host: Where.
            remote: A line for the host's shell.
            given: Its standard input; a file is read from its position, and not into memory.
            seconds: Patience.

        Raises:
            HostFailed: It did not end well, or in time.
        """
        sent, read = (given, None) if isinstance(given, bytes) else (None, given)
        try:
            done = subprocess.run(
                self.command(host, remote),
                input=sent,
                stdin=read,
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
        done = subprocess.run(
            ["ssh", "-G", *self._arguments(host), "--", host.target],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PROBE_SECONDS,
        )
        found = [
            line.split(" ", 1)[1]
            for line in done.stdout.splitlines()
            if line.startswith("hostname ")
        ]
        return found[0] if found else host.name

    def probe(
        self, host: Host, python: str, interface: str, needed: Sequence[str] = ()
    ) -> ProbedHost:
        """Probe a host's CPUs, packages and interfaces; see `host_probe`.

        Args:
            host: Which.
            python: Its Python.
            interface: Name of the one whose address is wanted; empty for none.
            needed: Packages that it must have beside the requirements.

        Raises:
            HostFailed: It cannot be reached, or lacks Python, packages or that interface.
        """
        found = self.run_probe(host, python, _PROBE, [interface, *needed], _PROBE_SECONDS)
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
        return ProbedHost(found["cpus"], found["address"])

    def run_probe(
        self,
        host: Host,
        python: str,
        program: pathlib.Path,
        arguments: Sequence[str],
        seconds: float,
    ) -> dict[str, Any]:
        """Run a program of the standard library alone on a host; return what it reports.

        Args:
            host: Where.
            python: Its Python.
            program: A file of this host, which writes a line of `_PROBE_MARK` and a JSON object.
            arguments: Of the program.
            seconds: Patience.

        Raises:
            HostFailed: The host cannot be reached, or the program does not end well.
        """
        line = f"exec {shlex.join([python, '-I', '-', *arguments])}"
        return probe_answer(self.run(host, line, program.read_bytes(), seconds))

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
    """Do something on every host, several in parallel.

    Raises:
        Unreachable: On some hosts it failed; all of these are named.
    """
    results: dict[Host, Result] = {}
    failures: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(_MOST_CONNECTIONS) as pool:
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


def probe_answer(written: str) -> dict[str, Any]:
    """Return what a probe reports; a shell's greetings may stand around it."""
    for line in written.splitlines():
        if line.startswith(_PROBE_MARK):
            return dict(json.loads(line.removeprefix(_PROBE_MARK)))
    raise HostFailed("its shell or Python gave no answer; is --remote_python right?")


class SshLauncher:
    """Starts nodes on the hosts of a file."""

    def __init__(self, run: Run, script_folder: pathlib.Path | None = None) -> None:
        """Probe every host and copy the code.

        Args:
            run: The run's settings.
            script_folder: That of the workers' script; None: they play their role.

        Raises:
            ConfigurationError: Flags or a hosts file that cannot be used.
            Unreachable: Hosts that cannot be used, by name; nothing was started.
        """
        launch.refuse_chosen_addresses()
        self._overwrite = ["--overwrite"] if run.overwrite else []
        self._run_dir = run.run_dir
        self._input: IO[bytes] | None = None
        self._is_input_known = False
        self._has_input: set[Host] = set()
        self._screen = Screen()  # of nodes whose output nobody else takes
        self._ssh = Ssh(_ssh_options())
        self._placement = place(read_hosts(), run.nb_ps, run.nb_workers)
        self._code = deployment.code_deployment(script_folder)
        self._python = launch.remote_python()
        interface = "" if _is_address(FLAGS.interface) else FLAGS.interface or ""
        hosts = self._placement.hosts
        # A wheel is installed on every host, unless this one's package is copied there.
        is_installed = program.CHECKOUT is None and self._code.archive is None
        needed = [program.PACKAGE.name] if is_installed else []
        self._probed = on_all(
            hosts, lambda host: self._ssh.probe(host, self._python, interface, needed)
        )
        self._binds = [self._bind(host) for host in self._placement.shards]
        self.addresses = self._choose_addresses(run.addresses)
        self._check_binds()
        if self._code.archive is not None:
            archive, folder = self._code.archive, self._code.folder
            on_all(hosts, lambda host: self._ssh.unpack(host, archive, folder))
        self._started: list[tuple[Host, SupervisedProcess]] = []
        self._supervisor: SupervisedProcess | None = None

    def start(self, node: Node) -> SupervisedProcess:
        """Start a node.

        Raises:
            Unreachable: The node before it, on the same host, could not be started.
        """
        if node.role == "Supervisor":
            self._supervisor = start_here(node)
            return self._supervisor
        host = self._host_of(node)
        self._started = [
            (at, each) for at, each in self._started if each.poll() is None or not node.num_restarts
        ]
        for earlier, process in self._started:  # sshd drops connections that come all together
            if earlier == host:
                _demand_start(earlier, process)
        output = node.output or NamedLines(f"{node.name}@{host}", self._screen)
        given_input = self._send_input(node, host)
        line = self._line(node, host, given_input)
        process = SupervisedProcess(self._ssh.command(host, line), output)
        self._started.append((host, process))
        return process

    def settle(self) -> None:
        """Wait until every node has been started; raises Unreachable, naming the host."""
        for host, process in self._started:
            _demand_start(host, process)

    def tend(self) -> None:
        """Show the watchdogs that the launcher is alive."""
        for _, process in self._started:
            process.beat()
        if self._supervisor is not None:
            self._supervisor.beat()

    def close(self) -> None:
        """Finish the nodes' output. The copied code stays for the next time."""
        if self._input is not None:
            self._input.close()
        self._screen.close()
        report_losses(self._screen.copies)

    # -- where ------------------------------------------------------------------------------

    def _host_of(self, node: Node) -> Host:
        if node.role == "PS":
            return self._placement.shards[node.number]
        return self._placement.workers[node.number - 1]

    def _send_input(self, node: Node, host: Host) -> str:
        """Copy the standard input to a host, once; return it as the watchdog takes it.

        Each host has a copy of its own, because hosts may share the folder. A node that is started
        again gets another copy: the last node of a host removes the copy. Nodes that run already
        get their heartbeats meanwhile.

        Raises:
            Unreachable: The host does not take it.
        """
        if node.input is not None and not self._is_input_known:
            self._input, self._is_input_known = whole_input(node.input), True
        if node.input is None or self._input is None:
            return ""
        number = self._placement.hosts.index(host)
        folder = f"{self._run_dir}/{SETTINGS_FOLDER}"
        path = f"{folder}/{INPUT_COPY}{number}"
        if host not in self._has_input or node.num_restarts:
            self._input.seek(0)
            words = [shlex.quote(each) for each in (self._code.folder, folder, f"{path}.new", path)]
            line = "cd {0} && umask 077 && mkdir -p -- {1} && cat > {2} && exec mv -- {2} {3}"
            remote = line.format(*words)
            try:
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    copied = pool.submit(self._ssh.run, host, remote, self._input, _COPY_SECONDS)
                    while not concurrent.futures.wait([copied], _BEAT_SECONDS).done:
                        self.tend()
                    copied.result()
            except HostFailed as error:
                raise Unreachable(
                    f"{_where(host)}: stdin cannot be copied there: {error}"
                ) from error
            self._has_input.add(host)
        return f"file:{path}"

    def _line(self, node: Node, host: Host, given_input: str = "") -> str:
        """Return the line for the host's shell that runs a node there."""
        workers = sum(each == host for each in self._placement.workers)
        threads = threads_of(self._probed[host].num_cpus, workers)
        own = [f"--ip_PS={self._binds[node.number]}"] if node.role == "PS" else []
        own.append(f"--worker_threads={threads}")
        if not node.num_restarts:  # a restarted worker resumes
            own += self._overwrite
        command = [self._python, *self._code.words(node, own)]
        supervised = watchdog_command(
            self._python, self._code.watchdog, command, given_input=given_input
        )
        return f"cd {shlex.quote(self._code.folder)} && exec {shlex.join(supervised)}"

    def _bind(self, host: Host) -> str:
        """Return the address at which a host's PS listens."""
        if FLAGS.interface is None:
            return self._resolve(host)
        if _is_address(FLAGS.interface):
            return str(FLAGS.interface)
        return self._probed[host].address or ""

    def _resolve(self, host: Host) -> str:
        name = host.name if _is_address(host.name) else self._ssh.host_name(host)
        if _is_address(name):
            return name
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigurationError(
                f"{_where(host)}: no address is known for {name!r} ({error}); write the address "
                "into the file, or give the --interface of that host that a PS shall use."
            ) from error
        ordered = sorted(found, key=lambda each: each[0] != socket.AF_INET)  # IPv4 first
        return str(ordered[0][4][0])

    def _choose_addresses(self, given: tuple[str, ...]) -> tuple[str, ...]:
        """Return the addresses that workers dial: those given, else those where the PS listen."""
        if FLAGS.ps_hosts:
            return given
        dialled = [
            self._resolve(host) if bind in _ANY else bind
            for host, bind in zip(self._placement.shards, self._binds, strict=True)
        ]
        return tuple(host_and_port(each, FLAGS.port + shard) for shard, each in enumerate(dialled))

    def _check_binds(self) -> None:
        """Refuse addresses that cannot serve every host.

        Raises:
            ConfigurationError: One address for several hosts, loopback where others have to dial,
                or an address beyond one machine without --insecure.
        """
        shards = self._placement.shards
        for host, bind in zip(shards, self._binds, strict=True):
            if bind not in _ANY and _is_address(FLAGS.interface) and len(set(shards)) > 1:
                raise ConfigurationError(
                    f"--interface={bind} is the address of one host, and {len(set(shards))} hosts "
                    "have a PS; give the interface's name, or 0.0.0.0 for all addresses."
                )
            strangers = [
                each
                for each in self._placement.hosts
                if each.name != host.name and not is_loopback(each.name)
            ]
            if is_loopback(bind) and strangers:
                raise ConfigurationError(
                    f"{_where(host)}: its PS would listen on {bind}, where {strangers[0]} cannot "
                    "reach it; write an address that all hosts reach, or set --interface."
                )
        for bind in dict.fromkeys(self._binds):
            check_bind(bind, FLAGS.insecure, security.protection(FLAGS))


def prepare(run: Run, script_folder: pathlib.Path | None = None) -> SshLauncher:
    """Return the launcher of a run; raises as `SshLauncher` does."""
    return SshLauncher(run, script_folder)


def read_hosts() -> tuple[Host, ...]:
    """Return a host per slot of --hosts_file; raises ConfigurationError."""
    try:
        text = read_bounded(FLAGS.hosts_file).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--hosts_file={FLAGS.hosts_file}: {error}.") from error
    return parse_hosts(text, f"--hosts_file={FLAGS.hosts_file}")


def _ssh_options() -> list[str]:
    try:
        return shlex.split(FLAGS.ssh_options)
    except ValueError as error:
        raise ConfigurationError(
            f"--ssh_options={FLAGS.ssh_options!r}: {error}; quote it as for a shell."
        ) from error


def _demand_start(host: Host, process: SupervisedProcess) -> None:
    """Wait until a node runs.

    Raises:
        Unreachable: It does not.
    """
    if not process.wait_until_started(_START_SECONDS):
        why = process.last_output or f"no answer within {_START_SECONDS:g} s"
        raise Unreachable(f"{_where(host)}: a node could not be started there: {why}")


def _where(host: Host) -> str:
    return f"--hosts_file={FLAGS.hosts_file}, line {host.line}, {host}"


def _is_address(text: str | None) -> bool:
    try:
        return text is not None and bool(ipaddress.ip_address(text))
    except ValueError:
        return False
