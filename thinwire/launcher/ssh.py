"""Starts nodes over ssh on the hosts of a hosts file; the Supervisor runs on the launching host.

Before the launcher starts nodes, it probes every host (`Ssh.probe`). If a host is not usable, the
launcher starts no node and raises an error that names the host. If --sync_dst_dir is given, the
launcher then copies Thinwire's code to every host (`thinwire.launcher.deployment`). The launcher
starts each node through a separate ssh connection, under a watchdog that ends the node when the
connection closes.

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
from thinwire.launcher.gpus import GpuShares
from thinwire.launcher.hosts import Host, place, read_hosts
from thinwire.launcher.local import SupervisedProcess, start_here, watchdog_command
from thinwire.launcher.output import NodeOutput, Screen, report_losses
from thinwire.launcher.role import Launcher, Node, threads_of, whole_input
from thinwire.ops.types import ConfigurationError
from thinwire.proto.grpc import Unreachable, check_bind
from thinwire.proto.grpc.common import host_and_port, is_loopback
from thinwire.runtime.run.script_settings import INPUT_COPY, SETTINGS_FOLDER
from thinwire.runtime.run.settings import Run

FLAGS = flags.FLAGS
Result = TypeVar("Result")
_PROBE = pathlib.Path(__file__).resolve().parent / "host_probe.py"
_PROBE_MARK = "thinwire-probe "
#: Options of ssh that follow the user's options. The user's options win, because ssh uses the first
#: value of an option.
_OPTIONS = (
    "-T",
    "-oBatchMode=yes",
    "-oConnectTimeout=5",
    "-oSendEnv=THINWIRE_TOKEN",  # sends the token to hosts whose sshd accepts it
    "-oServerAliveInterval=15",
    "-oServerAliveCountMax=3",
)
_PROBE_SECONDS = 30.0  # time limit of one probe of a host, in seconds
_COPY_SECONDS = 600.0  # seconds that a copy of code or stdin to one host may take
_BEAT_SECONDS = 1.0  # seconds between two calls of `tend` while stdin is copied
_MOST_CONNECTIONS = 16  # number of hosts that are probed, or receive the code, in parallel
_SSH_FAILED = 255  # exit code of the ssh client for a failed connection
_NOT_FOUND = (126, 127)  # exit codes of a shell that cannot run a program
_START_SECONDS = 30.0  # time limit for a node's start, in seconds
_ANY = ("0.0.0.0", "::")


@dataclasses.dataclass(frozen=True)
class ProbedHost:
    """CPUs, GPUs and IP address of a host, as the probe of the host reports them."""

    num_cpus: int  # number of the host's CPUs that a process may use
    address: str | None  # IPv4 address of --interface; None if no interface is named
    gpus: tuple[str, ...] = ()  # host's GPUs that a process may use, as CUDA_VISIBLE_DEVICES


class HostFailed(Exception):
    """A host of the hosts file cannot be used; the exception's text has the reason."""


class Ssh:
    """Runs shell commands on hosts over ssh.

    Args:
        options: Options that the user gives to ssh (--ssh_options).
    """

    def __init__(self, options: Sequence[str]) -> None:
        self._options = tuple(options)

    def command(self, host: Host, remote: str) -> list[str]:
        """Return the command line of the ssh client that runs a shell command line on a host.

        Args:
            host: Host on which the shell command line runs.
            remote: Shell command line that the host runs.
        """
        return ["ssh", *self._arguments(host), "--", host.target, remote]

    def run(self, host: Host, remote: str, given: bytes | IO[bytes], seconds: float) -> str:
        """Run a shell command line on a host, wait for its end, and return its standard output.

        Args:
            host: Host on which the shell command line runs.
            remote: Shell command line that the host runs.
            given: Standard input of the shell command line. A file is streamed from its current
                position.
            seconds: Time limit of the shell command line, in seconds.

        Raises:
            HostFailed: The shell command line failed, or did not end in time.
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
        """Return the host name to which ssh's configuration resolves a host's name or alias."""
        done = subprocess.run(
            ["ssh", "-G", *self._arguments(host), "--", host.target],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PROBE_SECONDS,
        )
        names = [
            line.split(" ", 1)[1]
            for line in done.stdout.splitlines()
            if line.startswith("hostname ")
        ]
        return names[0] if names else host.name

    def probe(
        self, host: Host, python: str, interface: str, needed: Sequence[str] = ()
    ) -> ProbedHost:
        """Probe a host's CPUs, GPUs, Python packages and network interfaces with `host_probe`.

        Args:
            host: Host whose CPUs, GPUs, packages and network interfaces are probed.
            python: Path of the Python interpreter on the host.
            interface: Name of the host's network interface whose address is looked up; empty for no
                interface.
            needed: Python packages that the host must have in addition to Thinwire's requirements.

        Raises:
            HostFailed: The host cannot be reached, or lacks Python, a required package or the
                network interface.
        """
        report = self.run_probe(host, python, _PROBE, [interface, *needed], _PROBE_SECONDS)
        if report["missing"]:
            raise HostFailed(
                f"{python} on that host lacks {', '.join(report['missing'])}; install the "
                "requirements, or set --remote_python"
            )
        if not report["backends"]:
            raise HostFailed(
                f"{python} on that host has no Keras backend; install tensorflow, jax or torch, or "
                "set --remote_python"
            )
        if interface and report["address"] is None:
            raise HostFailed(
                f"--interface={interface} has no IPv4 address on that host; its interfaces are "
                f"{', '.join(report['interfaces'])}"
            )
        return ProbedHost(report["cpus"], report["address"], tuple(report["gpus"]))

    def run_probe(
        self,
        host: Host,
        python: str,
        program: pathlib.Path,
        arguments: Sequence[str],
        seconds: float,
    ) -> dict[str, Any]:
        """Run a probe program on a host; return the JSON object that the program reports.

        Args:
            host: Host on which the probe program runs.
            python: Path of the Python interpreter on the host.
            program: Local path of the probe program, which imports only the standard library, and
                writes a line of `_PROBE_MARK` and a JSON object.
            arguments: Command-line arguments of the probe program.
            seconds: Time limit of the probe program, in seconds.

        Raises:
            HostFailed: The host cannot be reached, or the probe program failed.
        """
        line = f"exec {shlex.join([python, '-I', '-', *arguments])}"
        return probe_answer(self.run(host, line, program.read_bytes(), seconds))

    def unpack(self, host: Host, archive: bytes, folder: str) -> None:
        """Unpack the archive of Thinwire's code on a host.

        Args:
            host: Host on which the archive is unpacked.
            archive: Content of the archive as a .tar.gz file.
            folder: Path of the folder on the host in which the archive is unpacked; created if
                missing.

        Raises:
            HostFailed: The host cannot be reached, or it failed to unpack the archive.
        """
        logging.info("copying the code to host %s, folder %s", host, folder)
        line = (
            f"mkdir -p -- {shlex.quote(folder)} && exec tar -x -z -o -f - -C {shlex.quote(folder)}"
        )
        self.run(host, line, archive, _COPY_SECONDS)

    def _arguments(self, host: Host) -> list[str]:
        port = ["-p", str(host.port)] if host.port is not None else []
        return [*self._options, *port, *_OPTIONS]


def on_all(hosts: Sequence[Host], do: Callable[[Host], Result]) -> dict[Host, Result]:
    """Call a function for every host, up to `_MOST_CONNECTIONS` hosts in parallel.

    Args:
        hosts: Hosts for which the function `do` is called.
        do: Function of one host, which raises HostFailed if the host is not usable.

    Returns:
        Host -> result of the function.

    Raises:
        Unreachable: The function `do` failed for one or more hosts. The message names all of these
            hosts.
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
    """Return the JSON object in a probe's output; skip other lines, for example shell greetings."""
    for line in written.splitlines():
        if line.startswith(_PROBE_MARK):
            return dict(json.loads(line.removeprefix(_PROBE_MARK)))
    raise HostFailed("its shell or Python gave no answer; check --remote_python")


class SshLauncher(Launcher):
    """Starts PS and workers over ssh on the hosts of --hosts_file, and the Supervisor locally."""

    def __init__(self, run: Run, script_folder: pathlib.Path | None = None) -> None:
        """Probe every host of --hosts_file and copy the code to each host.

        Args:
            run: Settings of the run, from the flags.
            script_folder: Folder of the user's script that workers run; None if they run no script.

        Raises:
            ConfigurationError: A flag of the ssh launcher or the hosts file is invalid.
            Unreachable: One or more hosts are not usable. The message names the unusable hosts.
        """
        launch.refuse_chosen_addresses()
        self._overwrite = ["--overwrite"] if run.overwrite else []
        self._run_dir = run.run_dir
        self._input: IO[bytes] | None = None
        self._is_input_known = False
        self._has_input: set[Host] = set()
        self._screen = Screen()  # shows the output of nodes whose `output` is None
        self._ssh = Ssh(_ssh_options())
        self._placement = place(read_hosts(FLAGS.hosts_file), run.nb_ps, run.nb_workers)
        self._code = deployment.code_deployment(script_folder)
        self._python = launch.remote_python()
        interface = "" if _is_address(FLAGS.interface) else FLAGS.interface or ""
        hosts = self._placement.hosts
        # If this host has Thinwire from a wheel, and no code is copied to the hosts, every host
        # must have the wheel too.
        is_installed = program.CHECKOUT is None and self._code.archive is None
        needed = [program.PACKAGE.name] if is_installed else []
        if not run.model_is_offered:  # the built-in networks are TensorFlow's
            needed.append("tensorflow")
        self._probed = on_all(
            hosts, lambda host: self._ssh.probe(host, self._python, interface, needed)
        )
        self._gpus = GpuShares(
            dict(enumerate(self._placement.workers, 1)),
            lambda host: self._probed[host].gpus,
            run.device,
            FLAGS.gpus_per_worker,
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
        """Start a node over ssh on its host, or the Supervisor on the launching host.

        Raises:
            Unreachable: An earlier node on the host of this node has not started.
        """
        if node.role == "Supervisor":
            self._supervisor = start_here(node)
            return self._supervisor
        host = self._host_of(node)
        self._started = [
            (at, started)
            for at, started in self._started
            if started.poll() is None or not node.num_restarts
        ]
        # sshd drops connections when too many arrive together (its setting MaxStartups), so
        # connections to one host are opened one after another.
        for earlier, process in self._started:
            if earlier == host:
                _demand_start(earlier, process)
        output = node.output or NodeOutput(f"{node.name}@{host}", self._screen, only_stderr=True)
        given_input = self._send_input(node, host)
        line = self._line(node, host, given_input)
        process = SupervisedProcess(self._ssh.command(host, line), output, announced=True)
        self._started.append((host, process))
        return process

    def settle(self) -> None:
        """Wait until every node that the launcher started over ssh runs.

        Raises:
            Unreachable: A node has not started. The message names the node's host.
        """
        for host, process in self._started:
            _demand_start(host, process)

    def tend(self) -> None:
        """Send heartbeats to the watchdogs of all nodes."""
        for _, process in self._started:
            process.beat()
        if self._supervisor is not None:
            self._supervisor.beat()

    def close(self) -> None:
        """Close the nodes' output; the copied code stays on the hosts for the next run."""
        if self._input is not None:
            self._input.close()
        self._screen.close()
        report_losses(self._screen.copies)

    # -- hosts, standard inputs and addresses of nodes --------------------------------------

    def _host_of(self, node: Node) -> Host:
        if node.role == "PS":
            return self._placement.shards[node.number]
        return self._placement.workers[node.number - 1]

    def _send_input(self, node: Node, host: Host) -> str:
        """Copy the launcher's standard input to a node's host, unless the host has a copy.

        The copies of the standard input on different hosts have different names, because hosts may
        share the folder. The last node that opens the host's copy of the standard input deletes it,
        so a restarted node gets a new copy. The launcher sends heartbeats to running nodes while it
        copies the standard input.

        Returns:
            The watchdog's argument for the copy, ``file:PATH``; empty if the node has no input.

        Raises:
            Unreachable: The standard input could not be copied to the host.
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
            words = [shlex.quote(word) for word in (self._code.folder, folder, f"{path}.new", path)]
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
                    f"{_where(host)}: stdin cannot be copied to this host: {error}"
                ) from error
            self._has_input.add(host)
        return f"file:{path}"

    def _line(self, node: Node, host: Host, given_input: str = "") -> str:
        """Return the shell line that runs a node under a watchdog on a host.

        Args:
            node: PS shard or worker to start.
            host: Host on which the node runs.
            given_input: The watchdog's argument for the node's standard input; empty for /dev/null.
        """
        workers = sum(worker_host == host for worker_host in self._placement.workers)
        threads = threads_of(self._probed[host].num_cpus, workers)
        more_flags = [f"--ip_PS={self._binds[node.number]}"] if node.role == "PS" else []
        more_flags.append(f"--worker_threads={threads}")
        # A restarted node resumes its run, so it must not delete its checkpoints because of
        # --overwrite.
        if not node.num_restarts:
            more_flags += self._overwrite
        command = [self._python, *self._code.words(node, more_flags)]
        supervised = watchdog_command(
            self._python, self._code.programs.watchdog, command, True, given_input=given_input
        )
        variables = {**node.variables, **self._gpus.variables(node.role, node.number)}
        pairs = [f"{name}={value}" for name, value in variables.items()]
        line = shlex.join(["env", *pairs, *supervised])
        return f"cd {shlex.quote(self._code.folder)} && exec {line}"

    def _bind(self, host: Host) -> str:
        """Return the IP address on which a host's PS listens (--interface or hosts file)."""
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
            infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConfigurationError(
                f"{_where(host)}: no address is known for {name!r} ({error}); write the address "
                "into the hosts file, or give --interface, the interface of that host for its PS."
            ) from error
        ordered = sorted(infos, key=lambda each: each[0] != socket.AF_INET)  # IPv4 addresses first
        return str(ordered[0][4][0])

    def _choose_addresses(self, given: tuple[str, ...]) -> tuple[str, ...]:
        """Return host:port of every PS shard, from --ps_hosts or from the PS's host."""
        if FLAGS.ps_hosts:
            return given
        dialed = [
            self._resolve(host) if bind in _ANY else bind
            for host, bind in zip(self._placement.shards, self._binds, strict=True)
        ]
        return tuple(
            host_and_port(address, FLAGS.port + shard) for shard, address in enumerate(dialed)
        )

    def _check_binds(self) -> None:
        """Reject addresses on which a PS would be unreachable from other hosts, or unprotected.

        Raises:
            ConfigurationError: --interface is one address for several hosts, a PS listens on
                loopback although other hosts must reach it, or a PS without protection (token or
                TLS) and without --insecure would listen on an address that other machines reach.
        """
        shards = self._placement.shards
        for host, bind in zip(shards, self._binds, strict=True):
            if bind not in _ANY and _is_address(FLAGS.interface) and len(set(shards)) > 1:
                raise ConfigurationError(
                    f"--interface={bind} is the address of one host, but {len(set(shards))} hosts "
                    "run a PS; give the name of a network interface, or 0.0.0.0 for all addresses."
                )
            remote_hosts = [
                other
                for other in self._placement.hosts
                if other.name != host.name and not is_loopback(other.name)
            ]
            if is_loopback(bind) and remote_hosts:
                raise ConfigurationError(
                    f"{_where(host)}: the PS of this host would listen on {bind}, which the host "
                    f"{remote_hosts[0]} cannot reach; write an address that all hosts can reach, "
                    "or set --interface."
                )
        for bind in dict.fromkeys(self._binds):
            check_bind(bind, FLAGS.insecure, security.protection(FLAGS))


def _ssh_options() -> list[str]:
    try:
        return shlex.split(FLAGS.ssh_options)
    except ValueError as error:
        raise ConfigurationError(
            f"--ssh_options={FLAGS.ssh_options!r}: {error}; quote the options as for a shell."
        ) from error


def _demand_start(host: Host, process: SupervisedProcess) -> None:
    """Wait until a node that was started over ssh runs on its host.

    Raises:
        Unreachable: The node has ended early, or has not started within `_START_SECONDS` seconds.
    """
    if not process.wait_until_started(_START_SECONDS):
        why = process.last_output or f"no answer within {_START_SECONDS:g} s"
        raise Unreachable(f"{_where(host)}: a node could not be started on this host: {why}")


def _where(host: Host) -> str:
    return f"--hosts_file={FLAGS.hosts_file}, line {host.line}, {host}"


def _is_address(text: str | None) -> bool:
    try:
        return text is not None and bool(ipaddress.ip_address(text))
    except ValueError:
        return False
