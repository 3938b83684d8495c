"""Reads the hosts file of a cluster, and assigns PS shards and workers to hosts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.files import read_text

#: Matches [user@]host[:port]. A host name must not begin with "-": ssh would parse it as an option.
_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?"
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*))"
    r"(?::(?P<port>[0-9]{1,5}))?"
)
_MAX_SLOTS = 65_535  # largest number of slots (places for nodes) that one line may give a host
_EXAMPLE = "expected one host a line, for example `10.0.0.7`, `user@node7:2222` or `node7 slots=4`"


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine in the hosts file, which the launcher reaches over ssh."""

    name: str  # name of the host, its alias in ssh's configuration, or its address
    user: str | None = None  # user of the ssh login; None for the default of ssh's configuration
    port: int | None = None  # port of sshd on the host; None for the default of ssh's configuration
    # Line number of the host in the hosts file, from 1
    line: int = dataclasses.field(default=0, compare=False)

    @property
    def target(self) -> str:
        """The host in the form of ssh's argument: ``user@name``, or the name alone."""
        return f"{self.user}@{self.name}" if self.user else self.name

    def __str__(self) -> str:
        """Return the host as `[user@]host[:port]`, the format of the hosts file, for messages."""
        name = f"[{self.name}]" if ":" in self.name else self.name
        user = f"{self.user}@" if self.user else ""
        return f"{user}{name}" + (f":{self.port}" if self.port else "")


@dataclasses.dataclass(frozen=True)
class HostAssignment:
    """The host of every PS shard and worker of a run."""

    shards: tuple[Host, ...]  # [nb_ps], the host of every PS shard, by shard id from 0
    workers: tuple[Host, ...]  # [nb_workers], the host of every worker, by worker id from 1

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Hosts that run one or more nodes of the training run, without duplicates."""
        return tuple(dict.fromkeys(self.shards + self.workers))


def read_hosts(path: str) -> tuple[Host, ...]:
    """Read the file of --hosts_file; return one host per slot (place for a node).

    Raises:
        ConfigurationError: The hosts file cannot be read, or a line of the file is invalid.
    """
    return parse_hosts(read_text("hosts_file", path), f"--hosts_file={path}")


def parse_hosts(text: str, source: str) -> tuple[Host, ...]:
    """Parse a hosts file, which lists the hosts of a cluster.

    A line of the hosts file names one host, ``[user@]host[:port]``. ``slots=q`` after the host
    gives the host q slots (places for nodes), like q equal lines. A line of the hosts file may be
    repeated, to give its host more slots (places for nodes). The character ``#`` begins a comment
    in the hosts file.

    Args:
        text: Content of the hosts file.
        source: Name of the hosts file, for error messages.

    Returns:
        One host per slot, in the order of the file's lines.

    Raises:
        ConfigurationError: A line of the hosts file has another format, or the file names no host.
    """
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            where = f"{source}, line {number}"
            hosts += [_host(words[0], number, where)] * _slots(words[1:], where)
    if not hosts:
        raise ConfigurationError(f"the hosts file {source} names no host; {_EXAMPLE}.")
    return tuple(hosts)


def _host(word: str, number: int, where: str) -> Host:
    match = _HOST.fullmatch(word)
    if match is None:
        hint = "; put an IPv6 address into brackets" if word.count(":") > 1 else ""
        raise ConfigurationError(f"{where}: the word {word!r} names no host; {_EXAMPLE}{hint}.")
    port = int(match["port"]) if match["port"] else None
    if port is not None and not 1 <= port <= 65_535:
        raise ConfigurationError(f"{where}: {word!r} has ssh port {port}; expected 1 to 65535.")
    return Host(match["ipv6"] or match["name"], match["user"], port, number)


def _slots(words: Sequence[str], where: str) -> int:
    if not words:
        return 1
    name, _, value = words[0].partition("=")
    if len(words) > 1 or name != "slots" or not re.fullmatch(r"[0-9]+", value):
        raise ConfigurationError(f"{where}: text {' '.join(words)!r} is not slots=q; {_EXAMPLE}.")
    if not 1 <= int(value) <= _MAX_SLOTS:
        raise ConfigurationError(f"{where}: slots={value}; expected 1 to {_MAX_SLOTS} nodes.")
    return int(value)


def place(hosts: Sequence[Host], nb_ps: int, nb_workers: int) -> HostAssignment:
    """Assign PS shards, then workers, to the hosts' slots (places for one node) round robin.

    The fastest hosts, which the hosts file names first, run the first PS shards and receive workers
    last. If a run has more nodes than slots, the assignment continues at the first slot.

    Args:
        hosts: Host of every slot (place for one node), ordered from fast to slow.
        nb_ps: Number of PS shards.
        nb_workers: Number of workers.

    Source:
        The ssh launcher of MXNet-G, which assigns servers, then workers, to the lines of the file
        round robin.
    """
    turn = [hosts[number % len(hosts)] for number in range(nb_ps + nb_workers)]
    return HostAssignment(tuple(turn[:nb_ps]), tuple(turn[nb_ps:]))
