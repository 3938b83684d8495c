"""Reads a node's role, number and PS addresses from ``TF_CONFIG``, unless flags give them.

Cluster managers set the environment variable TF_CONFIG for TensorFlow's strategies, as JSON::

    {"cluster": {"ps": ["host:port", ...], "worker": [...], "chief": [...], "evaluator": [...]},
     "task": {"type": "worker", "index": 0}}

The address ``ps`` i belongs to PS shard i. The ``chief`` of TF_CONFIG is worker 1, and then the
list ``worker`` begins with worker 2. If TF_CONFIG has no chief, its ``worker`` i is Thinwire's
worker i + 1. The task type ``evaluator`` of TF_CONFIG means Thinwire's Supervisor. Workers of
Thinwire accept no connections, so their addresses in TF_CONFIG are only counted.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
from collections.abc import Mapping
from typing import Any

from absl import flags, logging

from thinwire.ops.types import ConfigurationError

#: Task type in TF_CONFIG -> value of --type_node.
_ROLES = {
    "ps": "PS",
    "worker": "Worker",
    "chief": "Worker",
    "master": "Worker",  # older name of TF_CONFIG's task type "chief"
    "evaluator": "Supervisor",
}
#: Value of --type_node -> name of the flag with the node's number.
_NUMBERED = {"PS": "id_ps", "Worker": "id_worker"}
_FIRST = ("chief", "master")  # task types in TF_CONFIG that mean worker 1


@dataclasses.dataclass(frozen=True)
class ClusterPosition:
    """Role and number of a node, and the addresses of the PS in its cluster."""

    role: str | None  # value of --type_node; None if TF_CONFIG names no task
    # Shard id from 0, worker id from 1, 0 for the Supervisor; None if TF_CONFIG names no task
    number: int | None
    shards: tuple[str, ...]  # host:port of every PS shard, by shard id
    nb_workers: int  # number of workers in the cluster


def parse(text: str) -> ClusterPosition | None:
    """Parse the value of ``TF_CONFIG``.

    Args:
        text: Value of ``TF_CONFIG``, a JSON text. An empty text or ``{}`` means that there is no
            configuration.

    Returns:
        The node's role, number and PS addresses; None for an empty configuration.

    Raises:
        ConfigurationError: ``TF_CONFIG`` is not JSON of the expected form, or its task is not in
            its cluster.
    """
    if not text.strip():
        return None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(f"it is no JSON ({error})") from error
    if config == {}:
        return None
    if not isinstance(config, dict):
        raise _bad(f"it is {config!r}, not an object")
    if config.get("rpc_layer", "grpc") != "grpc":
        raise _bad(f"its rpc_layer is {config['rpc_layer']!r}; Thinwire supports only grpc")
    cluster = _cluster(config.get("cluster"))
    first = sum(len(cluster.get(kind, ())) for kind in _FIRST)
    if first > 1:
        raise _bad(f"it names {first} chiefs; expected at most one")
    role, number = _task(config.get("task"), cluster, first)
    workers = first + len(cluster.get("worker", ()))
    return ClusterPosition(role, number, cluster.get("ps", ()), workers)


def _bad(what: str) -> ConfigurationError:
    return ConfigurationError(
        f'environment variable TF_CONFIG: {what}. Expected {{"cluster": {{"ps": ["host:port"], '
        '"worker": ["host:port"]}, "task": {"type": "worker", "index": 0}}; correct TF_CONFIG, or '
        "unset it and give --type_node, --id_worker or --id_ps, and --ps_hosts."
    )


def _cluster(given: Any) -> dict[str, tuple[str, ...]]:
    """Return task type -> addresses (host:port) from the ``cluster`` of TF_CONFIG."""
    if not isinstance(given, dict):
        raise _bad(f"its cluster is {given!r}, not an object of lists")
    for kind, addresses in given.items():
        if kind not in _ROLES:
            raise _bad(f"its cluster has {kind!r}, which is none of {', '.join(_ROLES)}")
        is_valid = isinstance(addresses, list) and all(isinstance(text, str) for text in addresses)
        if not is_valid:
            raise _bad(f"its {kind} is {addresses!r}, not a list of addresses")
    return {kind: tuple(addresses) for kind, addresses in given.items()}


def _task(
    given: Any, cluster: Mapping[str, tuple[str, ...]], first: int
) -> tuple[str | None, int | None]:
    """Return this node's role and number from TF_CONFIG; (None, None) without a task."""
    if given is None:
        return None, None
    if not isinstance(given, dict):
        raise _bad(f"its task is {given!r}, not an object of type and index")
    kind, index = given.get("type"), given.get("index", 0)
    if not isinstance(kind, str) or kind not in _ROLES:
        raise _bad(f"its task type is {kind!r}, which is none of {', '.join(_ROLES)}")
    # Some cluster managers write the index of the task as a text.
    if isinstance(index, str) and index.isdecimal():
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise _bad(f"its task index is {index!r}, not a number from 0")
    known = len(cluster.get(kind, ()))
    if kind == "evaluator":  # TensorFlow leaves evaluators out of the cluster
        return _ROLES[kind], 0
    if index >= known:
        raise _bad(f"its task is {kind} {index}, but its cluster has {known} of type {kind}")
    if kind == "worker":
        return _ROLES[kind], 1 + first + index
    return _ROLES[kind], 1 if kind in _FIRST else index


def fill(values: flags.FlagValues, text: str) -> None:
    """Set the flags that were not given on the command line to the values in ``TF_CONFIG``.

    A flag of the command line overrides ``TF_CONFIG``. Roles without a task type in TF_CONFIG, for
    example Cluster or Standalone, ignore ``TF_CONFIG``.

    Args:
        values: Parsed flags of this process. This function changes them.
        text: Value of ``TF_CONFIG``; empty if the environment variable is not set.

    Raises:
        ConfigurationError: ``TF_CONFIG`` is invalid, or names no PS although the node needs a PS.
    """
    if values["type_node"].present and values["type_node"].value not in _ROLES.values():
        if text.strip():
            logging.info("a --type_node=%s node does not read TF_CONFIG", values["type_node"].value)
        return
    place = parse(text)
    if place is not None:
        fill_position(values, place, "TF_CONFIG")


def fill_position(values: flags.FlagValues, place: ClusterPosition, source: str) -> None:
    """Set a node's omitted flags of role, number and PS addresses from its cluster position.

    Args:
        values: Parsed flags of this process. This function changes them.
        place: Role, number and PS addresses of this node in its cluster.
        source: Name of the variable or scheduler that gives the position, for messages.

    Raises:
        ConfigurationError: The position has no PS addresses although the node needs a PS.
    """
    for name, value in _settings(values, place, source).items():
        if values[name].present:
            logging.info("--%s=%s overrides %s's value %s", name, values[name].value, source, value)
        else:
            values.set_default(name, value)
            logging.info("--%s=%s, from %s", name, value, source)


def _settings(values: flags.FlagValues, place: ClusterPosition, source: str) -> dict[str, Any]:
    """Return flag -> value for a node's role, number and, if no flag gives them, PS addresses."""
    settings: dict[str, Any] = {}
    if place.role is not None:
        settings["type_node"] = place.role
    role = values["type_node"].value if values["type_node"].present else place.role
    if role == place.role and role in _NUMBERED:
        settings[_NUMBERED[role]] = place.number
    if place.nb_workers:
        settings["nb_workers"] = place.nb_workers
    # On a PS, --ip_PS is the address on which this PS listens, and gives no address of another
    # shard.
    dialed = ("port",) if role == "PS" else ("ip_PS", "port")
    if any(values[name].present for name in dialed) or values["ps_hosts"].present:
        logging.info("the addresses in flags take precedence over the addresses in %s", source)
        return settings
    if not place.shards:
        raise _bad("its cluster has no ps, and no flag gives the address of one")
    settings["ps_hosts"] = list(place.shards)
    if role == "PS" and place.role == "PS" and place.number is not None:
        settings["ip_PS"] = _bind(place.shards[place.number])
    return settings


def _bind(address: str) -> str:
    """Return the IP address on which a PS must listen, given the PS's address in TF_CONFIG.

    If TF_CONFIG gives an IP address, the PS listens on this address. If TF_CONFIG gives a host
    name, the PS listens on all addresses, as TensorFlow does, because the name may belong to a
    service, whose address is not an address of this machine.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host if host == "localhost" else "0.0.0.0"
