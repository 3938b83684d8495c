"""Thinwire: ``python main.py --type_node PS|Worker|Supervisor|Cluster|Standalone|...``.

Chooses the role, keeps its log, turns what ends it into an exit code. TensorFlow is imported only
inside a role, so ``--help`` is instant.
"""

from __future__ import annotations

import errno
import importlib
import logging as standard_logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from absl import flags, logging

from thinwire.advisor import flags as advisor_flags
from thinwire.flags import launch, observability, security
from thinwire.flags import run as run_flags
from thinwire.launcher import tf_config
from thinwire.ops.run.directory import LogFile, lock_of
from thinwire.ops.run.lock import LockOwner
from thinwire.ops.run.settings import (
    EXIT_BAD_FLAG,
    EXIT_CONFIGURATION,
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    EXIT_UNREACHABLE,
    Diverged,
    Run,
)
from thinwire.ops.run.signals import END_SIGNALS
from thinwire.ops.types import ConfigurationError
from thinwire.ps import flags as ps_flags
from thinwire.simulator import flags as simulator_flags
from thinwire.supervisor import flags as supervisor_flags
from thinwire.worker import flags as worker_flags

FLAGS = flags.FLAGS

#: What ends a node that nothing is wrong with, and is mended from outside.
_DISK_REFUSES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
#: --type_node value -> module with `main(run) -> exit code`.
ROLES = {
    "PS": "thinwire.ps.role",
    "Worker": "thinwire.worker.role",
    "Supervisor": "thinwire.supervisor.role",
    "Cluster": "thinwire.launcher.role",
    "Standalone": "thinwire.standalone",
    "Simulator": "thinwire.simulator.role",
    "Advisor": "thinwire.advisor.role",
}
#: Name in --log_level -> absl's number.
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_CHATTY = ("matplotlib", "PIL", "h5py", "asyncio")
#: --type_node value -> its own settings, checked before TensorFlow is imported.
CHECKS = {
    "PS": ps_flags.check,
    "Worker": worker_flags.check,
    "Standalone": worker_flags.check,
    "Simulator": simulator_flags.check,
    "Advisor": advisor_flags.check,
}


def main(arguments: list[str]) -> int:
    """Play one role; return the exit code."""
    if FLAGS.help:
        sys.stdout.write("".join(_help_lines()))
        return EXIT_DONE
    if len(arguments) > 1:
        sys.stderr.write(f"unexpected argument {arguments[1]!r}: every setting is a --flag\n")
        return EXIT_BAD_FLAG
    _start_log()
    _quieten_libraries()  # before gRPC reads certificates
    try:
        tf_config.fill(FLAGS, os.environ.get("TF_CONFIG", ""))
        logging.get_absl_handler().setFormatter(_log_layout())  # the node's name may be new ...
        _set_level()  # ... and its level with it
        run = run_flags.read_run()
        if run.type_node not in ("Cluster", "Advisor"):
            launch.refuse_elsewhere(run)
        observability.check(run, FLAGS)
        if run.type_node in CHECKS:
            CHECKS[run.type_node](run)
        _lock(run)
        _keep_log(run)
        warnings = run.method.check()
        if run.type_node != "Supervisor" and not FLAGS.quiet:  # who starts the others tells it once
            for warning in warnings:
                logging.warning("%s", warning)
        _prepare_process(run)
        return int(importlib.import_module(ROLES[run.type_node]).main(run))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        logging.error("%s", error)
        return code


def _exit_code(error: Exception) -> int | None:
    """Return the documented exit code of an expected failure."""
    full = isinstance(error, OSError) and error.errno in _DISK_REFUSES
    if full or isinstance(error, ConfigurationError):
        return EXIT_CONFIGURATION
    if isinstance(error, Diverged):
        return EXIT_DIVERGED
    from thinwire.proto.framing import Malformed
    from thinwire.proto.grpc import Unreachable
    from thinwire.proto.grpc.session import RequestRejected

    refused = (RequestRejected, Malformed)  # the latter: what a PS has sent makes no sense here
    codes = ((Unreachable, EXIT_UNREACHABLE), (refused, EXIT_REFUSED))
    return next((code for kind, code in codes if isinstance(error, kind)), None)


def _quieten_libraries() -> None:
    """Say how much TensorFlow and gRPC may write; they look once, when they are imported.

    gRPC has a line for every handshake that fails, so whoever can connect could fill the disk.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def _prepare_process(run: Run) -> None:
    """Set what must be set before TensorFlow and gRPC start."""
    from thinwire.proto.grpc.server import keep_freed_memory

    keep_freed_memory()
    if run.device != "auto":
        os.environ["CUDA_VISIBLE_DEVICES"] = run.device.removeprefix("gpu:").replace("cpu", "-1")
    if run.type_node != "Cluster":
        _import_tensorflow_quietly()


def _import_tensorflow_quietly() -> None:
    """Import TensorFlow without the lines it writes to stderr before its log settings apply."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        importlib.import_module("tensorflow")
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _node_name() -> str:
    """Return for example ``worker-3``."""
    return f"{FLAGS.type_node.lower()}-{_node_number()}"


def _node_number() -> int:
    """Return this node's id; 0 for those that have none."""
    return int({"PS": FLAGS.id_ps, "Worker": FLAGS.id_worker}.get(FLAGS.type_node, 0))


def _log_layout() -> standard_logging.Formatter:
    """Put the node's name into each line."""
    return standard_logging.Formatter(f"%(asctime)s {_node_name()} %(levelname).1s %(message)s")


def _start_log() -> None:
    """Log to stderr."""
    logging.use_absl_handler()
    logging.get_absl_handler().setFormatter(_log_layout())
    _set_level()
    if FLAGS.quiet:
        logging.get_absl_handler().setLevel(standard_logging.WARNING)


def _set_level() -> None:
    """Log from the asked level on, wherever it goes; absl's own --verbosity wins where given."""
    level = observability.level_of(FLAGS.log_level, FLAGS.type_node.lower(), _node_name())
    asked = FLAGS["verbosity"].value if FLAGS["verbosity"].present else LEVELS[level]
    logging.set_verbosity(asked)
    for library in _CHATTY:  # what they say at these levels is of nobody's run
        standard_logging.getLogger(library).setLevel(standard_logging.WARNING)


def _lock(run: Run) -> None:
    """Hold what this node writes until the process ends; nothing may be written there before."""
    number = _node_number()
    address = run.addresses[number] if run.type_node == "PS" else ""
    lock_of(run.run_dir, run.type_node, number).take(LockOwner.here(run.type_node, number, address))


def _keep_log(run: Run) -> None:
    """Log to the run directory too, and keep all flags there."""
    folder, name = run.run_dir / "logs", _node_name()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = LogFile(folder / f"{name}.log")
        (run.run_dir / f"flags-{name}.txt").write_text(FLAGS.flags_into_string())
    except OSError as error:
        raise ConfigurationError(
            f"--run_dir={run.run_dir} cannot be written ({error}); choose another folder."
        ) from error
    handler.setFormatter(_log_layout())
    standard_logging.getLogger().addHandler(handler)


def _help_lines() -> Iterator[str]:
    """Yield the flags by topic."""
    yield "Thinwire trains Keras models over thin, slow, uneven networks.\n\n"
    yield f"python main.py --type_node={'|'.join(ROLES)} [--flag=value ...] [--flagfile=FILE]\n"
    for topic, members in sorted(FLAGS.flags_by_module_dict().items(), key=_topic_order):
        if topic.startswith("absl"):
            continue
        yield f"\n{topic}:\n"
        for flag in members:
            values = getattr(flag.parser, "enum_values", None)
            kind = "|".join(values) if values else flag.flag_type()
            text = flag.help.removeprefix(f"<{kind}>: ")
            default = "" if flag.default is None else f" Default: {flag.default_as_str}."
            yield f"  --{flag.name} <{kind}>\n      {text}{default}\n"


def _topic_order(item: tuple[str, Any]) -> int:
    """Keep the topics in the order in which they were defined."""
    first = item[1][0].name
    return list(FLAGS).index(first) if first in FLAGS else 0


def _parse(arguments: list[str]) -> list[str]:
    """Parse the command line; a bad flag ends the process with one clear line and code 1."""
    try:
        return list(FLAGS(arguments))
    except flags.Error as error:
        sys.stderr.write(f"{error} (--help lists all flags)\n")
        sys.exit(EXIT_BAD_FLAG)


def define_flags() -> None:
    """Register every flag of every role."""
    flags.DEFINE_enum("type_node", "Worker", list(ROLES), "What to be.", module_name="Run")
    for room in (
        run_flags,
        observability,
        security,
        ps_flags,
        worker_flags,
        supervisor_flags,
        launch,
        simulator_flags,
        advisor_flags,
    ):
        run_flags.define(*room.TOPICS)
    flags.DEFINE_boolean("help", False, "Show this list.", short_name="h", module_name="Help")


def run_role() -> None:
    """Play the role that the command line names, and exit with its code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, until a role hears it
    define_flags()
    ended_with = main(_parse(sys.argv))
    for end_signal in END_SIGNALS:  # there is nothing left to interrupt, and the code is known
        signal.signal(end_signal, signal.SIG_IGN)
    sys.exit(ended_with)
