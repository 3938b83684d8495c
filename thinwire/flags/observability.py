"""Flags for the log levels and the metrics ports of a run's nodes."""

from __future__ import annotations

from absl import flags

from thinwire.ops.options import (
    NOT_EMPTY,
    FlagRule,
    Topic,
    advanced,
    comma_list,
    file,
    integer,
    words,
)
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.settings import Run

LEVELS = ("debug", "info", "warning", "error")
_ROLES = ("ps", "worker", "supervisor", "cluster", "standalone", "simulator", "advisor")
_HIGHEST_PORT = 65535


def _parts(text: str) -> tuple[str, str]:
    """Split an entry of --log_level into (role or node, level); an empty role means all nodes."""
    who, equals, level = text.rpartition("=")
    return (who.strip().lower() if equals else "", level.strip().lower())


def _is_level(text: str) -> bool:
    who, level = _parts(text)
    role, _, number = who.partition("-")
    if who:
        return level in LEVELS and role in _ROLES and (who == role or number.isdecimal())
    return level in LEVELS and "=" not in text


TOPICS = (
    Topic(
        "Logs and metrics",
        (
            comma_list(
                "log_level",
                "info",
                "Lowest level of logged messages; a role or a node may have its own level: "
                "warning,ps=info,worker-3=debug.",
                "|".join(LEVELS),
                FlagRule(
                    lambda entries: all(_is_level(entry) for entry in entries),
                    f"takes levels ({', '.join(LEVELS)}), each for all nodes or, as in ps=debug "
                    "and worker-3=debug, for a role or a node",
                ),
            ),
            integer(
                "metrics_port",
                0,
                "Port at which Prometheus reads a node's metrics; 0: no metrics port. A Cluster "
                "gives its nodes consecutive ports from this port on: first the PS, then the "
                "workers, then the Supervisor.",
                "port",
                low=0,
                high=_HIGHEST_PORT,
            ),
            *advanced(
                words(
                    "metrics_host",
                    "127.0.0.1",
                    "Address on which --metrics_port listens; an address beyond this machine needs "
                    "--metrics_login.",
                    "address",
                    rule=NOT_EMPTY,
                ),
                file(
                    "metrics_login",
                    "File with name:password that readers of --metrics_port must send by HTTP "
                    "basic authentication.",
                    unset="no authentication",
                ),
            ),
        ),
    ),
)


def level_of(entries: list[str], role: str, node: str) -> str:
    """Return a node's log level from the entry for the node, its role or all nodes, in this order.

    Args:
        entries: Entries of --log_level, for example "worker=info".
        role: Name of the node's role in lower case, for example "worker".
        node: Name of the node, for example "worker-3".

    >>> level_of(["warning", "worker=info", "worker-3=debug"], "worker", "worker-3")
    'debug'
    """
    levels = dict(_parts(entry) for entry in entries)
    return levels.get(node) or levels.get(role) or levels.get("") or "info"


def check(run: Run, given: flags.FlagValues) -> None:
    """Reject flags for logs and metrics that cannot work in this run.

    Reject a metrics port for a role that opens no port, a port out of range, metrics that other
    machines can read without a login, and a log level for an unknown node.

    Raises:
        ConfigurationError: A flag for logs or metrics cannot work. The message names the flag.
    """
    _check_levels(run, given.log_level)
    port: int = given.metrics_port
    if port and run.type_node in ("Simulator", "Advisor"):
        raise ConfigurationError(
            f"--metrics_port={port} is for the nodes of a run, but this command has "
            f"--type_node={run.type_node}; leave --metrics_port out."
        )
    for name in ("metrics_host", "metrics_login"):
        if not port and given[name].value != given[name].default:
            raise ConfigurationError(
                f"--{name}={given[name].value} without --metrics_port has no effect; give both."
            )
    from thinwire.proto.grpc.common import is_loopback

    is_open = port and not is_loopback(given.metrics_host) and not given.metrics_login
    if is_open and not ("insecure" in given and given.insecure):
        raise ConfigurationError(
            f"--metrics_host={given.metrics_host} is reachable from other machines, which could "
            "read the metrics without a login; give --metrics_login, leave --metrics_host out, or "
            "add --insecure if every machine that can reach this address is trusted."
        )
    last = port + run.nb_ps + run.nb_workers
    if port and run.type_node == "Cluster" and last > _HIGHEST_PORT:
        raise ConfigurationError(
            f"--metrics_port={port}: the nodes of this Cluster need the ports up to {last}; "
            f"expected ports of at most {_HIGHEST_PORT}. Choose a lower --metrics_port."
        )


def _check_levels(run: Run, entries: list[str]) -> None:
    numbers = {"ps": (0, run.nb_ps - 1), "worker": (1, run.nb_workers)}
    for entry in entries:
        role, _, number = _parts(entry)[0].partition("-")
        first, last = numbers.get(role, (0, 0))
        if number and not first <= int(number) <= last:
            raise ConfigurationError(
                f"--log_level={entry}: this run has no node {role}-{number}; expected a {role} "
                f"number from {first} to {last}."
            )


def port_of(base: int, role: str, number: int, nb_ps: int, nb_workers: int) -> int:
    """Return the port at which a node of a Cluster serves its metrics, counted from `base`.

    >>> [port_of(9400, *node, 2, 4) for node in [("PS", 1), ("Worker", 1), ("Supervisor", 0)]]
    [9401, 9402, 9406]
    """
    first = {"PS": 0, "Worker": nb_ps - 1, "Supervisor": nb_ps + nb_workers}[role]
    return base + first + number
