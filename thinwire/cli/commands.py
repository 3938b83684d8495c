"""Defines the command ``thinwire`` by a table of its subcommands and their modules.

In a checkout, ``thinwire ps --flag=value`` equals ``python main.py --type_node=PS --flag=value``:
both commands run one node (`thinwire.cli.node`) in the given role. A subcommand's modules are
imported only when the subcommand runs. Because modules are imported late, ``--help`` is instant,
and the subcommands ``report`` and ``certificates`` work without TensorFlow.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import NoReturn

from thinwire.runtime.run.quiet import configure_libraries
from thinwire.runtime.run.signals import handle_first_signals
from thinwire.runtime.run.streams import standard_streams

#: Subcommand -> role of the node (a value of --type_node) that the subcommand runs, and the
#: subcommand's line of help.
ROLES = {
    "ps": ("PS", "run a parameter server (PS), which serves one shard of the model to workers"),
    "worker": ("Worker", "run a worker, which computes gradients and exchanges them with the PS"),
    "supervisor": ("Supervisor", "evaluate a run, show its progress and write its report"),
    "cluster": ("Cluster", "start all nodes of a run on this machine, over ssh or on Ray"),
    "standalone": ("Standalone", "train on this device alone, as reference for distributed runs"),
    "simulate": ("Simulator", "simulate a whole run on a virtual clock"),
    "advise": ("Advisor", "measure the network links and propose a training method"),
}
#: Subcommand of a tool -> module whose `main(arguments)` runs the tool, and the subcommand's line
#: of help.
TOOLS = {
    "report": ("thinwire.supervisor.report.__main__", "write a page that compares finished runs"),
    "certificates": ("thinwire.proto.security.certificates", "write the TLS certificates of a run"),
    "status": ("thinwire.tools.status", "show the progress of a run, and its live nodes"),
    "stop": ("thinwire.tools.stop", "end a run gracefully"),
    "doctor": ("thinwire.tools.doctor", "check this machine, hosts and links before a run"),
    "health": ("thinwire.tools.health", "show whether a PS accepts requests"),
    "manifests": ("thinwire.tools.manifests", "write the Kubernetes objects of a run"),
    "version": ("thinwire.tools.versions", "show the versions of Thinwire and its libraries"),
}
#: Subcommand that runs a user's script -> role of the node that it runs, and its line of help.
RUN = {"run": ("Cluster", "run a Keras script on workers on this machine, over ssh or on Ray")}
COMMANDS = RUN | ROLES | TOOLS
_EXIT_DONE, _EXIT_BAD_FLAG = 0, 1


def run_command() -> NoReturn:
    """Run the subcommand that the command line names, and exit with its code."""
    handle_first_signals()
    with standard_streams():
        command, *arguments = sys.argv[1:] or ["help"]
        _run(command, arguments)


def run_role() -> NoReturn:
    """Run the role that --type_node names, or a user's script with `run`; exit with its code."""
    if sys.argv[1:2] == [*RUN]:
        run_command()
    handle_first_signals()
    with standard_streams():
        _play(sys.argv[0], sys.argv[1:])


def _run(command: str, rest: list[str]) -> NoReturn:
    if command in ("help", "-h", "--help") and not rest:
        sys.stdout.write(overview())
        sys.exit(_EXIT_DONE)
    if command == "help":
        command, rest = rest[0], ["--help"]
    if command == "--version":
        command = "version"
    if command in RUN:
        _play(f"thinwire {command}", rest, RUN[command][0], runs_script=True)
    # A Cluster starts its nodes with --type_node instead of a subcommand.
    if command.startswith("-"):
        _play(sys.argv[0], [command, *rest])
    if command in ROLES:
        _play(f"thinwire {command}", rest, ROLES[command][0])
    if command in TOOLS:
        # By default, gRPC would log each failed call.
        configure_libraries(tensorflow_log_level=3)
        sys.exit(importlib.import_module(TOOLS[command][0]).main(rest))
    sys.stderr.write(f"{_unknown(command)}\n")
    sys.exit(_EXIT_BAD_FLAG)


def overview() -> str:
    """Return the help text of ``thinwire`` with the list of all subcommands."""
    rows = "".join(f"  {name:14}{summary}\n" for name, (_, summary) in COMMANDS.items())
    return (
        "Thinwire trains Keras models over thin, slow, uneven networks.\n\n"
        f"thinwire COMMAND [--flag=value ...]\n\n{rows}\n"
        "thinwire COMMAND --help shows the flags of a command.\n"
    )


def _play(
    program: str, arguments: list[str], role: str | None = None, runs_script: bool = False
) -> NoReturn:
    from thinwire.cli import node

    node.run(program, arguments, role, runs_script)


def _unknown(command: str) -> str:
    names = {name.lower(): name for name in COMMANDS}
    names |= {role.lower(): name for name, (role, _) in ROLES.items()}
    close = difflib.get_close_matches(command.lower(), names, n=1)
    hint = f" Did you mean {names[close[0]]}?" if close else ""
    return f"thinwire has no command {command!r}.{hint} Commands: {', '.join(COMMANDS)}."
