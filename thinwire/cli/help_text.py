"""The text of ``--help`` and ``--helpfull``: the command-line flags, grouped by topic.

``--help`` lists the command-line flags that a role uses, without the advanced flags. ``--helpfull``
lists every command-line flag of every role.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import textwrap
from collections.abc import Iterator

from thinwire.advisor import flags as advisor_flags
from thinwire.flags import launch, observability, security
from thinwire.flags import run as run_flags
from thinwire.flags import script as script_flags
from thinwire.ops.options import Topic, choice
from thinwire.ps import flags as ps_flags
from thinwire.simulator import flags as simulator_flags
from thinwire.supervisor import flags as supervisor_flags
from thinwire.worker import flags as worker_flags

#: Names of the roles of nodes, which are the values of --type_node.
ROLES = ("PS", "Worker", "Supervisor", "Cluster", "Standalone", "Simulator", "Advisor")
_ROLE = Topic("Role", (choice("type_node", "Worker", "Role of this process in the run.", ROLES),))
_NODE = (*run_flags.TOPICS, *observability.TOPICS, *security.TOPICS)
_ROLES_OF_NODES = (*ps_flags.TOPICS, *worker_flags.TOPICS, *supervisor_flags.TOPICS)
_CLUSTER = (*launch.TOPICS, *_NODE, *_ROLES_OF_NODES)
#: Topics (groups of flags) that together hold every flag of every role.
TOPICS = (
    _ROLE,
    *_NODE,
    *_ROLES_OF_NODES,
    *launch.TOPICS,
    *simulator_flags.TOPICS,
    *advisor_flags.TOPICS,
)
_ADDRESSES = ("nb_ps", "ip_PS", "port", "ps_hosts", "lease_seconds")
#: Names of the flags that only nodes of a distributed run need.
_EXCHANGE = (
    *("nb_workers", *_ADDRESSES, "method", "compression_rate", "value_dtype", "groups"),
    *("staleness_bound", "local_steps", "collective", "overlap", "error_feedback", "partition"),
    *("pacer", "codec", "down_codec", "router", "sync", "weighting"),
)


@dataclasses.dataclass(frozen=True)
class RoleHelp:
    """Selection of the flags that --help lists for one role.

    Attributes:
        topics: Topics (groups of command-line flags) that the role uses.
        without: Names of the flags that are in the role's `topics` but that the role does not use.
        then: Text of the usage line after the flags, for example a script; may be empty.
    """

    topics: tuple[Topic, ...]
    without: tuple[str, ...] = ()
    then: str = ""


ROLE_HELP = {
    "PS": RoleHelp((*ps_flags.TOPICS, *_NODE)),
    "Worker": RoleHelp((*worker_flags.TOPICS, *_NODE), ("target", "target_accuracy")),
    "Supervisor": RoleHelp((*supervisor_flags.TOPICS, *_NODE)),
    "Cluster": RoleHelp(_CLUSTER, ("id_ps", "id_worker")),
    "Standalone": RoleHelp(
        (
            *(topic for topic in run_flags.TOPICS if topic not in run_flags.OF_EXCHANGES),
            *supervisor_flags.TOPICS,
            worker_flags.WORKER,
            *observability.TOPICS,
        ),
        (*_EXCHANGE, "id_worker"),
    ),
    "Simulator": RoleHelp(
        (
            *simulator_flags.TOPICS,
            *run_flags.TOPICS,
            *worker_flags.TOPICS,
            *supervisor_flags.TOPICS,
            *observability.TOPICS,
        ),
        ("ip_PS", "port", "ps_hosts", "collective", "id_worker", "metrics_port"),
    ),
    "Advisor": RoleHelp(
        (*advisor_flags.TOPICS, *launch.TOPICS, *_NODE, *worker_flags.TOPICS),
        ("collective", "id_worker"),
    ),
}
#: Key in `ROLE_HELP` of the help for `thinwire run`, which runs a user's script.
SCRIPTS = "scripts"
_HELP = ROLE_HELP | {
    SCRIPTS: RoleHelp(
        _CLUSTER,
        (*script_flags.NEVER, *itertools.chain(*script_flags.OPTIMIZER.values()), "model_from"),
        " SCRIPT.py [ARGUMENT ...]",
    ),
}
_FLAG_WIDTH = 31
_LEAST_WIDTH = 60


def text_of(program: str, role: str | None, full: bool = False) -> str:
    """Return the text of --help, which lists the flags of one role or of all roles.

    Args:
        program: Program and subcommand for the usage line, for example ``thinwire ps``.
        role: Role whose flags are listed, or SCRIPTS for `thinwire run`. None: list the flags of
            all roles except the advanced flags.
        full: True for the text of --helpfull, which lists every flag of every role.
    """
    chosen = RoleHelp(TOPICS) if full or role is None else _HELP[role]
    usage = f"{program} [--flag=value ...] [--flagfile=FILE]{chosen.then}\n"
    text = f"{usage}{''.join(_lines(chosen, full))}"
    if full:
        return text
    total = sum(len(topic.options) for topic in TOPICS)
    return f"{text}\n{program} --helpfull shows all {total} flags.\n"


def _lines(chosen: RoleHelp, full: bool) -> Iterator[str]:
    width = max(_LEAST_WIDTH, shutil.get_terminal_size((100, 24)).columns)
    for topic in chosen.topics:
        options = [
            option
            for option in topic.options
            if full or not (option.is_advanced or option.name in chosen.without)
        ]
        if options:
            yield f"\n{topic.title}:\n"
        for option in options:
            text = f"{option.text} [{option.values_and_default}]"
            filled = textwrap.fill(
                text.replace("|", "| "),  # a line of the help may break between two choices
                width,
                initial_indent=f"  --{option.name:{_FLAG_WIDTH - 4}} ",
                subsequent_indent=" " * (_FLAG_WIDTH + 1),
                break_on_hyphens=False,
            )
            yield filled.replace("| ", "|") + "\n"
