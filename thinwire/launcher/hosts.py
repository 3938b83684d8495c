"""The hosts file of a cluster, and which host plays which role."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from thinwire.ops.types import ConfigurationError

#: A name may not begin with "-": ssh would take it for an option.
_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?"
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*))"
    r"(?::(?P<port>[0-9]{1,5}))?"
)
_MAX_SLOTS = 65_535
_EXAMPLE = "expected one host a line, such as `10.0.0.7`, `user@node7:2222` or `node7 slots=4`"


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine that ssh reaches."""

    name: str  # as ssh takes it: a name, an alias of ssh's own configuration, an address
    user: str | None = None
    port: int | None = None  # of sshd; None: from ssh's configuration
    line: int = dataclasses.field(default=0, compare=False)  # of the hosts file, from 1

    @property
    def target(self) -> str:
        """The host as an argument of ssh."""
        return f"{self.user}@{self.name}" if self.user else self.name

    def __str__(self) -> str:
        """Return the host as the file has it, for messages."""
        name = f"[{self.name}]" if ":" in self.name else self.name
        user = f"{self.user}@" if self.user else ""
        return f"{user}{name}" + (f":{self.port}" if self.port else "")


@dataclasses.dataclass(frozen=True)
class HostAssignment:
    """The host of every node."""

    shards: tuple[Host, ...]  # [nb_ps], in order of id, from 0
    workers: tuple[Host, ...]  # [nb_workers], in order of id, from 1

    @property
    def hosts(self) -> tuple[Host, ...]:
        """Every host that has something to do, once."""
        return tuple(dict.fromkeys(self.shards + self.workers))


def parse_hosts(text: str, source: str) -> tuple[Host, ...]:
    """Read a hosts file.

    A line names one host, ``[user@]host[:port]``, and may add ``slots=q``, which stands for q
    such lines. A line may be repeated. ``#`` begins a comment.

    Args:
        text: What the file holds.
        source: Its name, for messages.

    Returns:
        A host per slot, in the file's order.

    Raises:
        ConfigurationError: A line that is none of this, or no host at all.
    """
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            where = f"{source}, line {number}"
            hosts += [_host(words[0], number, where)] * _slots(words[1:], where)
    if not hosts:
        raise ConfigurationError(f"{source} names no host; {_EXAMPLE}.")
    return tuple(hosts)


def _host(word: str, number: int, where: str) -> Host:
    found = _HOST.fullmatch(word)
    if found is None:
        hint = "; put an IPv6 address into brackets" if word.count(":") > 1 else ""
        raise ConfigurationError(f"{where}: {word!r} names no host; {_EXAMPLE}{hint}.")
    port = int(found["port"]) if found["port"] else None
    if port is not None and not 1 <= port <= 65_535:
        raise ConfigurationError(f"{where}: {word!r} has port {port}; expected 1 to 65535.")
    return Host(found["ipv6"] or found["name"], found["user"], port, number)


def _slots(words: Sequence[str], where: str) -> int:
    if not words:
        return 1
    name, _, value = words[0].partition("=")
    if len(words) > 1 or name != "slots" or not re.fullmatch(r"[0-9]+", value):
        raise ConfigurationError(f"{where}: {' '.join(words)!r} is not slots=q; {_EXAMPLE}.")
    if not 1 <= int(value) <= _MAX_SLOTS:
        raise ConfigurationError(f"{where}: slots={value}; expected 1 to {_MAX_SLOTS}.")
    return int(value)


def place(hosts: Sequence[Host], nb_ps: int, nb_workers: int) -> HostAssignment:
    """Deal the roles round robin over the slots: shards from the top, then workers.

    So the fastest hosts, named first, hold the first shards, and workers come to them last. More
    nodes than slots begin again at the top.

    Args:
        hosts: One per slot, fast to slow.
        nb_ps: Number of PS shards.
        nb_workers: Number of workers.

    Source:
        The ssh launcher of MXNet-G: servers, then workers, over the file in turn.
    """
    turn = [hosts[number % len(hosts)] for number in range(nb_ps + nb_workers)]
    return HostAssignment(tuple(turn[:nb_ps]), tuple(turn[nb_ps:]))
