"""``TF_CONFIG``: role, number and addresses of a node, where its flags do not give them.

Cluster managers set this variable for TensorFlow's own strategies, as JSON::

    {"cluster": {"ps": ["host:port", ...], "worker": [...], "chief": [...], "evaluator": [...]},
     "task": {"type": "worker", "index": 0}}

``ps`` i is shard i; ``chief`` is worker 1 and the ``worker`` list follows it (without a chief,
``worker`` i is worker i + 1); ``evaluator`` is the Supervisor. Workers only dial out here: their
addresses are counted, not used.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
from collections.abc import Mapping
from typing import Any

from absl import flags, logging

from thinwire.ops.types import ConfigurationError

#: Task type -> --type_node.
_ROLES = {
    "ps": "PS",
    "worker": "Worker",
    "chief": "Worker",
    "master": "Worker",  # the chief's older name
    "evaluator": "Supervisor",
}
#: --type_node -> the flag of its number.
_NUMBERED = {"PS": "id_ps", "Worker": "id_worker"}
_FIRST = ("chief", "master")  # the worker before all others


@dataclasses.dataclass(frozen=True)
class ClusterPosition:
    """A node's place in the cluster; None: the variable does not give it."""

    role: str | None  # --type_node
    number: int | None  # shard from 0, worker from 1, 0 for the Supervisor
    shards: tuple[str, ...]  # host:port
    nb_workers: int


def parse(text: str) -> ClusterPosition | None:
    """Read the variable's value.

    Args:
        text: JSON; empty or ``{}`` is no configuration.

    Raises:
        ConfigurationError: It is no JSON, or names a node that is not in its own cluster.
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
        raise _bad(f"its rpc_layer is {config['rpc_layer']!r}; only grpc is spoken here")
    cluster = _cluster(config.get("cluster"))
    first = sum(len(cluster.get(kind, ())) for kind in _FIRST)
    if first > 1:
        raise _bad(f"it names {first} chiefs; expected at most one")
    role, number = _task(config.get("task"), cluster, first)
    workers = first + len(cluster.get("worker", ()))
    return ClusterPosition(role, number, cluster.get("ps", ()), workers)


def _bad(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"TF_CONFIG: {what}. Expected "
        '{"cluster": {"ps": ["host:port"], "worker": ["host:port"]}, '
        '"task": {"type": "worker", "index": 0}}; mend it, or unset it and give --type_node, '
        "--id_worker or --id_ps, and --ps_hosts."
    )


def _cluster(given: Any) -> dict[str, tuple[str, ...]]:
    """Return the addresses by task type."""
    if not isinstance(given, dict):
        raise _bad(f"its cluster is {given!r}, not an object of lists")
    for kind, addresses in given.items():
        if kind not in _ROLES:
            raise _bad(f"its cluster has {kind!r}, which is none of {', '.join(_ROLES)}")
        texts = isinstance(addresses, list) and all(isinstance(each, str) for each in addresses)
        if not texts:
            raise _bad(f"its {kind} is {addresses!r}, not a list of addresses")
    return {kind: tuple(addresses) for kind, addresses in given.items()}


def _task(
    given: Any, cluster: Mapping[str, tuple[str, ...]], first: int
) -> tuple[str | None, int | None]:
    """Return role and number of this node."""
    if given is None:
        return None, None
    if not isinstance(given, dict):
        raise _bad(f"its task is {given!r}, not an object of type and index")
    kind, index = given.get("type"), given.get("index", 0)
    if not isinstance(kind, str) or kind not in _ROLES:
        raise _bad(f"its task type is {kind!r}, which is none of {', '.join(_ROLES)}")
    if isinstance(index, str) and index.isdecimal():  # as some cluster managers write it
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
    """Set the flags that were not given to the values in ``TF_CONFIG``.

    Flags win. A role that TF_CONFIG does not know (Cluster, Standalone and such) leaves it alone.

    Args:
        values: The parsed flags.
        text: The variable's value; empty where it is not set.

    Raises:
        ConfigurationError: The value cannot be read, or names no PS where one must be dialled.
    """
    if values["type_node"].present and values["type_node"].value not in _ROLES.values():
        if text.strip():
            logging.info("--type_node=%s does not read TF_CONFIG", values["type_node"].value)
        return
    place = parse(text)
    if place is not None:
        fill_position(values, place, "TF_CONFIG")


def fill_position(values: flags.FlagValues, place: ClusterPosition, source: str) -> None:
    """Set the flags that were not given to a place in a cluster.

    Args:
        values: The parsed flags.
        place: This node's.
        source: Who gives it, for messages.

    Raises:
        ConfigurationError: No PS is named where one must be dialled.
    """
    for name, value in _settings(values, place, source).items():
        if values[name].present:
            logging.info("--%s=%s wins over %s's %s", name, values[name].value, source, value)
        else:
            values.set_default(name, value)
            logging.info("--%s=%s, from %s", name, value, source)


def _settings(values: flags.FlagValues, place: ClusterPosition, source: str) -> dict[str, Any]:
    """Return flag -> value as the place has it."""
    found: dict[str, Any] = {}
    if place.role is not None:
        found["type_node"] = place.role
    role = values["type_node"].value if values["type_node"].present else place.role
    if role == place.role and role in _NUMBERED:
        found[_NUMBERED[role]] = place.number
    if place.nb_workers:
        found["nb_workers"] = place.nb_workers
    dialled = ("port",) if role == "PS" else ("ip_PS", "port")  # on a PS --ip_PS is its own
    if any(values[name].present for name in dialled) or values["ps_hosts"].present:
        logging.info("the addresses of flags win over %s's", source)
        return found
    if not place.shards:
        raise _bad("its cluster has no ps, and no flag gives the address of one")
    found["ps_hosts"] = list(place.shards)
    if role == "PS" and place.role == "PS" and place.number is not None:
        found["ip_PS"] = _bind(place.shards[place.number])
    return found


def _bind(address: str) -> str:
    """Return the address that a PS binds: an address itself; for a name all, as TensorFlow does.

    A name may be that of a service, which is no address of this machine.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host if host == "localhost" else "0.0.0.0"
