"""Flags for authentication and encryption (TLS certificates, token), equal for all roles."""

from __future__ import annotations

import os

from absl import flags

from thinwire.ops.options import Topic, file
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials, Protection

TOPIC = Topic(
    "Authentication and encryption",
    (
        file(
            "tls_cert",
            "This node's TLS certificate in PEM form; {node} stands for the node's name, such as "
            "worker-3. `thinwire certificates` writes certificates.",
            unset="no TLS",
        ),
        file(
            "tls_key",
            "Private key of --tls_cert in PEM form; {node} stands for the node's name.",
            unset="no TLS",
        ),
        file(
            "tls_ca",
            "Certificate of the authority that signed the other nodes' certificates; a PS with "
            "this flag rejects clients without a certificate.",
            unset="other nodes are not authenticated by certificate",
        ),
        file(
            "token_file",
            "File with the run's secret token, which every node must have. The token itself is "
            "never a flag, because other users could read the flag in the list of processes.",
            unset="the environment variable THINWIRE_TOKEN",
        ),
    ),
)
TOPICS = (TOPIC,)
NAMES = tuple(option.name for option in TOPIC.options)

#: Role that connects to other nodes -> name of the flag with the node's number, or None if a run
#: has only one node of the role.
_NUMBERED = {"PS": "id_ps", "Worker": "id_worker", "Supervisor": None}
#: Roles that start nodes and pass their flags to the nodes.
_STARTING = ("Cluster", "Advisor")


def credentials(given: flags.FlagValues) -> Credentials:
    """Return the TLS certificates and token of this node, from the files that flags name.

    Raises:
        ConfigurationError: A credential file is missing or unusable, or a flag names a file
            although the node's role connects to no other node.
    """
    if NAMES[0] not in given or given.type_node in _STARTING:
        return NO_CREDENTIALS
    if given.type_node not in _NUMBERED:
        for name in NAMES:
            if given[name].value:
                raise ConfigurationError(
                    f"--{name}={given[name].value} is for nodes that connect to others, but "
                    f"--type_node={given.type_node} connects to no node; leave --{name} out."
                )
        return NO_CREDENTIALS
    flag = _NUMBERED[given.type_node]
    return _of_node(given, given.type_node, 0 if flag is None else getattr(given, flag))


def check_nodes(given: flags.FlagValues, nb_ps: int, nb_workers: int) -> None:
    """Reject unusable credential files of this host's nodes, before the first node starts.

    Args:
        given: Flags of the process that starts the nodes.
        nb_ps: Number of PS shards of the run.
        nb_workers: Number of workers of the run.

    Raises:
        ConfigurationError: The credentials of a node are missing or unusable.
    """
    has_own = any("{node}" in (given[name].value or "") for name in NAMES)
    for shard in range(nb_ps if has_own else 1):
        _of_node(given, "PS", shard)
    for worker in range(1, (nb_workers if has_own else 1) + 1):
        _of_node(given, "Worker", worker)
    _of_node(given, "Supervisor", 0)


def _of_node(given: flags.FlagValues, role: str, number: int) -> Credentials:
    """Read a node's credential files; raise ConfigurationError if a file is unusable."""
    in_environment = os.environ.get("THINWIRE_TOKEN", "")
    if not in_environment and not any(given[name].value for name in NAMES):
        return NO_CREDENTIALS
    from thinwire.proto.security import credentials as trust

    node = f"{role.lower()}-{number}"
    parts = {
        "PS": trust.part_of_shard(number),
        "Worker": trust.part_of_worker(number),
        "Supervisor": trust.PART_OF_SUPERVISOR,
    }
    values = (getattr(given, name) for name in NAMES)
    paths = [path and path.replace("{node}", node) for path in values]
    return trust.read(
        trust.CredentialFiles(*paths),
        in_environment,
        parts[role],
        serves=role == "PS",
    )


def protection(given: flags.FlagValues) -> Protection:
    """Return from flags whether nodes encrypt messages and authenticate each other.

    `protection` does not read the credential files, because they may be on other hosts.
    """
    encrypted = bool(given.tls_cert)
    token = given.token_file or os.environ.get("THINWIRE_TOKEN")
    return Protection(encrypted, bool(encrypted and given.tls_ca) or bool(token))
