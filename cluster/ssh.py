"""Nodes on the hosts of a file, reached through ssh; the Supervisor stays on the launching node.

First every host is asked what it has: one that cannot be reached is named and nothing is started.
Then the code is copied, if asked for. Then each node runs at the far end of an ssh of its own,
under a keeper that ends it when this end is gone.
"""

from __future__ import annotations

import ipaddress
import pathlib
import shlex
import socket

from absl import flags

from cluster import launch_flags, security_flags
from cluster.code_place import code_place
from cluster.hosts import Host, parse_hosts, place
from cluster.kept import KeptProcess, keeper_command, start_here
from cluster.launch import Node, threads_of
from cluster.remote import Ssh, on_all
from ops.run import Run
from ops.types import ConfigurationError
from proto.channel_grpc import Unreachable, check_bind
from proto.grpc_common import host_and_port, is_loopback

FLAGS = flags.FLAGS
_START_SECONDS = 30.0
_ANY = ("0.0.0.0", "::")


class SshLauncher:
    """Starts nodes on the hosts of a file."""

    def __init__(self, run: Run) -> None:
        """Look at every host and copy the code.

        Raises:
            ConfigurationError: Flags or a hosts file that cannot be used.
            Unreachable: Hosts that cannot be used, by name; nothing was started.
        """
        launch_flags.refuse_chosen_addresses()
        self._overwrite = ["--overwrite"] if run.overwrite else []
        self._ssh = Ssh(_ssh_options())
        self._placement = place(_read_hosts(), run.nb_ps, run.nb_workers)
        self._code = code_place()
        self._python = launch_flags.remote_python()
        interface = "" if _is_address(FLAGS.interface) else FLAGS.interface or ""
        hosts = self._placement.hosts
        self._probed = on_all(hosts, lambda host: self._ssh.probe(host, self._python, interface))
        self._binds = [self._bind(host) for host in self._placement.shards]
        self.addresses = self._choose_addresses(run.addresses)
        self._check_binds()
        if self._code.archive is not None:
            archive, folder = self._code.archive, self._code.folder
            on_all(hosts, lambda host: self._ssh.unpack(host, archive, folder))
        self._started: list[tuple[Host, KeptProcess]] = []
        self._supervisor: KeptProcess | None = None

    def start(self, node: Node) -> KeptProcess:
        """Start a node.

        Raises:
            Unreachable: The node before it, on the same host, could not be started.
        """
        if node.role == "Supervisor":
            self._supervisor = start_here(node)
            return self._supervisor
        host = self._host_of(node)
        self._started = [(at, each) for at, each in self._started if each.poll() is None or not
                         node.num_restarts]  # fmt: skip
        for earlier, process in self._started:  # sshd drops those that knock all at once
            if earlier == host:
                _demand_start(earlier, process)
        process = KeptProcess(
            self._ssh.command(host, self._line(node, host)), f"{node.name}@{host}"
        )
        self._started.append((host, process))
        return process

    def settle(self) -> None:
        """Wait until every node has been started; raises Unreachable, naming the host."""
        for host, process in self._started:
            _demand_start(host, process)

    def tend(self) -> None:
        """Tell the keepers that we are alive."""
        for _, process in self._started:
            process.beat()
        if self._supervisor is not None:
            self._supervisor.beat()

    def close(self) -> None:
        """Do nothing: what was copied stays for the next time."""

    # -- where ------------------------------------------------------------------------------

    def _host_of(self, node: Node) -> Host:
        if node.role == "PS":
            return self._placement.shards[node.number]
        return self._placement.workers[node.number - 1]

    def _line(self, node: Node, host: Host) -> str:
        """Return the line for the host's shell that runs a node there."""
        workers = sum(each == host for each in self._placement.workers)
        threads = threads_of(self._probed[host].num_cpus, workers)
        own = [f"--ip_PS={self._binds[node.number]}"] if node.role == "PS" else []
        command = [self._python, self._code.main, *node.flags, *self._code.flags, *own,
                   f"--worker_threads={threads}"]  # fmt: skip
        if not node.num_restarts:  # who comes back goes on
            command += self._overwrite
        kept = keeper_command(self._python, self._code.keeper, command)
        return f"cd {shlex.quote(self._code.folder)} && exec {shlex.join(kept)}"

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
                "into the file, or say which --interface of that host a PS shall use."
            ) from error
        ordered = sorted(found, key=lambda each: each[0] != socket.AF_INET)  # IPv4 first
        return str(ordered[0][4][0])

    def _choose_addresses(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        """Return what workers dial: what the user says, else where the PS listen."""
        if FLAGS.ps_hosts:
            return asked
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
            strangers = [each for each in self._placement.hosts if each.name != host.name
                         and not is_loopback(each.name)]  # fmt: skip
            if is_loopback(bind) and strangers:
                raise ConfigurationError(
                    f"{_where(host)}: its PS would listen on {bind}, where {strangers[0]} cannot "
                    "reach it; write an address that all hosts reach, or set --interface."
                )
        for bind in dict.fromkeys(self._binds):
            check_bind(bind, FLAGS.insecure, security_flags.protection(FLAGS))


def prepare(run: Run) -> SshLauncher:
    """Return the launcher of a run; raises as `SshLauncher` does."""
    return SshLauncher(run)


def _read_hosts() -> tuple[Host, ...]:
    try:
        text = pathlib.Path(FLAGS.hosts_file).read_text()
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


def _demand_start(host: Host, process: KeptProcess) -> None:
    """Wait until a node runs.

    Raises:
        Unreachable: It does not.
    """
    if not process.wait_until_started(_START_SECONDS):
        why = process.last_words or f"no answer within {_START_SECONDS:g} s"
        raise Unreachable(f"{_where(host)}: a node could not be started there: {why}")


def _where(host: Host) -> str:
    return f"--hosts_file={FLAGS.hosts_file}, line {host.line}, {host}"


def _is_address(text: str | None) -> bool:
    try:
        return text is not None and bool(ipaddress.ip_address(text))
    except ValueError:
        return False
