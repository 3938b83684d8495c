"""Runs one node as a process: parses flags, starts the log, takes locks, sets the exit code.

Only the modules of the nodes' roles import TensorFlow, so that ``--help`` is instant. For the same
reason, functions that run after the flags are parsed import what only they need.
"""

from __future__ import annotations

import errno
import functools
import gc
import importlib
import importlib.util
import itertools
import logging as standard_logging
import os
import re
import signal
import sys
from typing import NoReturn

from absl import flags, logging

from thinwire.advisor import flags as advisor_flags
from thinwire.cli import help_text
from thinwire.flags import environment, launch, observability, policy_file
from thinwire.flags import run as run_flags
from thinwire.flags.registration import define
from thinwire.ops.types import ConfigurationError
from thinwire.ps import flags as ps_flags
from thinwire.runtime.run.devices import device_variables
from thinwire.runtime.run.files import read_bounded
from thinwire.runtime.run.quiet import configure_libraries, import_quietly
from thinwire.runtime.run.script_target import MODULE_OPTION, ScriptTarget
from thinwire.runtime.run.settings import (
    EXIT_BAD_FLAG,
    EXIT_CONFIGURATION,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    Run,
)
from thinwire.runtime.run.signals import END_SIGNALS, handle_signals
from thinwire.simulator import flags as simulator_flags
from thinwire.supervisor import flags as supervisor_flags
from thinwire.worker import flags as worker_flags

FLAGS = flags.FLAGS

#: errno values of a full or read-only disk: the node has no defect, and the user can free space.
_DISK_REFUSES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
#: Role (--type_node value) -> module whose `main(run)` runs the role and returns the exit code.
ROLES = {
    "PS": "thinwire.ps.role",
    "Worker": "thinwire.worker.role",
    "Supervisor": "thinwire.supervisor.role",
    "Cluster": "thinwire.launcher.role",
    "Standalone": "thinwire.launcher.standalone",
    "Simulator": "thinwire.simulator.role",
    "Advisor": "thinwire.advisor.role",
}
#: Role (--type_node value) -> module that runs the role if workers run a user's script.
_WITH_SCRIPT = {"Cluster": "thinwire.launcher.run", "Advisor": "thinwire.advisor.script"}
#: Roles that start child processes, and that end the child processes first at SIGINT or SIGTERM.
_STARTERS = ("Cluster", "Advisor")
_TYPE_NODE = re.compile(r"--?type_node[= ](\w+)")
#: Roles that build no model from flags if a worker's script sends the model.
_WITHOUT_MODEL = ("PS", "Supervisor")
#: Roles that need no Keras backend of their own if a worker's script sends the model.
_WITHOUT_BACKEND = (*_WITHOUT_MODEL, "Cluster")
#: Roles that run without a parameter server (PS) and write files only into --run_dir.
_WITHOUT_PS = ("Standalone", "Simulator", "Advisor")
#: Names of libraries whose log lines below WARNING are hidden.
_CHATTY = ("matplotlib", "PIL", "h5py", "asyncio", "botocore", "aiobotocore", "s3fs", "fsspec")
#: Role (--type_node value) -> function that checks the role's flags before TensorFlow is imported.
CHECKS = {
    "PS": ps_flags.check,
    "Worker": worker_flags.check,
    "Supervisor": supervisor_flags.check,
    "Standalone": worker_flags.check,
    "Simulator": simulator_flags.check,
    "Advisor": advisor_flags.check,
}


def main(arguments: list[str], runs_script: bool = False) -> int:
    """Run the role that --type_node names on this node; return the exit code.

    Args:
        arguments: Name of the program, then the command-line arguments after the flags.
        runs_script: True if the arguments after the flags are a user's script and its arguments.
            All workers run this script.
    """
    if FLAGS.help or FLAGS.helpfull:
        role = FLAGS.type_node if FLAGS["type_node"].present else None
        role = help_text.SCRIPTS if runs_script else role
        sys.stdout.write(help_text.text_of(arguments[0], role, FLAGS.helpfull))
        return EXIT_DONE
    takes_script = runs_script or (FLAGS.type_node == "Advisor" and len(arguments) > 1)
    if len(arguments) > 1 and not takes_script:
        sys.stderr.write(
            f"unexpected argument {arguments[1]!r}: every setting is a --flag=value "
            f"(see {arguments[0]} --help)\n"
        )
        return EXIT_BAD_FLAG
    _start_log()
    configure_libraries(tensorflow_log_level=3)  # sets variables that gRPC reads at its import
    try:
        return _play(arguments[1:] if takes_script else None)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        logging.error("%s", _explain(error))
        return code


def _play(script: list[str] | None) -> int:
    """Check the flags, prepare the process, and run the node's role; return the exit code.

    Args:
        script: The user's script that workers run, and its arguments. None: the workers train the
            model of their flags.
    """
    from thinwire.launcher import tf_config

    if script:
        # A missing script fails before the import of the Advisor's modules, which takes seconds.
        ScriptTarget.of(script)
    if script is not None:
        script = importlib.import_module(_WITH_SCRIPT[FLAGS.type_node]).complete_flags(script)
    launch.fill_from_slurm(script is not None)
    tf_config.fill(FLAGS, os.environ.get("TF_CONFIG", ""))
    # Slurm or TF_CONFIG may have changed the node's name, and the log level depends on the name.
    logging.get_absl_handler().setFormatter(_log_layout())
    _set_level()
    run = run_flags.read_run()
    if run.type_node not in ("Cluster", "Advisor"):
        launch.refuse_elsewhere(run)
    _refuse_places(run)
    observability.check(run, FLAGS)
    if run.type_node in CHECKS:
        CHECKS[run.type_node](run)
    if script is None and run.model_is_offered and run.type_node not in _WITHOUT_MODEL:
        raise ConfigurationError(
            f"--type_node={run.type_node} --model_from=worker: this command runs no script that "
            "provides the model; start the script with `thinwire run`, or take --model_from=flags."
        )
    _require_backend(run, script is not None)
    if script is not None and FLAGS.dry_run:
        return int(importlib.import_module(_WITH_SCRIPT[run.type_node]).show(run, script))
    _lock(run)
    _keep_log(run)
    # A Cluster logs the warnings for all its nodes, after the lines about the start of the run.
    if run.type_node not in ("Supervisor", "Cluster") and not FLAGS.quiet:
        for warning in run.method.warnings:
            logging.warning("%s", warning)
    _prepare_process(run)
    if script is not None:
        module = importlib.import_module(_WITH_SCRIPT[run.type_node])
        main_of_role = functools.partial(module.main, run, script)
    else:
        main_of_role = functools.partial(importlib.import_module(ROLES[run.type_node]).main, run)
    if run.type_node not in _STARTERS:
        return int(main_of_role())
    with handle_signals(signal.default_int_handler):
        return int(main_of_role())


def _refuse_places(run: Run) -> None:
    """Reject --checkpoint_dir and --report_dir for roles that write only into --run_dir."""
    addresses = {"checkpoint_dir": run.checkpoint_dir, "report_dir": run.report_dir}
    for flag, address in addresses.items():
        if address is not None and run.type_node in _WITHOUT_PS:
            raise ConfigurationError(
                f"--type_node={run.type_node} --{flag}={address}: --{flag} is for a run with a PS "
                f"and a Supervisor, but a {run.type_node} writes only into --run_dir. Leave "
                f"--{flag} out."
            )


def _exit_code(error: Exception) -> int | None:
    """Return the documented exit code of an error that users may expect; None for other errors."""
    if isinstance(error, OSError) and error.errno in _DISK_REFUSES:
        return EXIT_CONFIGURATION
    from thinwire.launcher.error_reasons import exit_code_of
    from thinwire.proto.framing import Malformed

    # `Malformed`: this node cannot parse a message of a PS
    return EXIT_REFUSED if isinstance(error, Malformed) else exit_code_of(error)


def _explain(error: Exception) -> str:
    """Return an expected error's message; for a full disk, the message names file and remedy."""
    if not isinstance(error, OSError) or error.errno not in _DISK_REFUSES:
        return str(error)
    where = error.filename or f"a file of --run_dir={FLAGS.run_dir}"
    return (
        f"cannot write {where}: {error.strerror}. Free space on that disk, or make it writable; "
        "the same command then resumes the run."
    )


def _needs_tensorflow(run: Run) -> bool:
    """Return True if a node needs TensorFlow, on which the built-in networks run.

    If a worker's script sends the model, launcher, PS and Supervisor start without TensorFlow. The
    PS imports a Keras backend later if it must run the workers' Keras optimizer.
    """
    has_model = run.type_node not in _WITHOUT_BACKEND or not run.model_is_offered
    return has_model or run.kernels == "tf"


def _require_backend(run: Run, runs_script: bool) -> None:
    """Reject a run whose models no installed Keras backend can compute.

    Raises:
        ConfigurationError: TensorFlow is missing and this node needs it, or the launcher of a
            script finds no Keras backend.
    """
    if _needs_tensorflow(run) and importlib.util.find_spec("tensorflow") is None:
        raise ConfigurationError(
            f"TensorFlow is not installed, but --type_node={run.type_node} needs it, because flags "
            "name the model or --kernels=tf is given: pip install 'thinwire[cpu]', or "
            "'thinwire[gpu]' for NVIDIA GPUs. On another Keras backend, train with a script of "
            "your own: `thinwire run`."
        )
    if runs_script and not any(map(importlib.util.find_spec, launch.KERAS_BACKENDS)):
        raise ConfigurationError(
            "No Keras backend is installed, but a script needs one: pip install 'thinwire[cpu]' "
            "(TensorFlow), 'thinwire[gpu]' (TensorFlow for NVIDIA GPUs), 'thinwire[jax]' or "
            "'thinwire[torch]'."
        )


def _prepare_process(run: Run) -> None:
    """Configure malloc and the visible GPUs before TensorFlow and gRPC start in this process."""
    from thinwire.runtime.malloc import keep_freed_memory

    keep_freed_memory()
    os.environ.update(device_variables(run.device))
    if run.type_node != "Cluster" and _needs_tensorflow(run):
        import_quietly("tensorflow")


def _node_name() -> str:
    """Return the name of this node, for example ``worker-3``."""
    return f"{FLAGS.type_node.lower()}-{_node_number()}"


def _node_number() -> int:
    """Return the shard or worker id, the rank of a Slurm task's launcher, or 0 for other nodes."""
    part = launch.part_here()
    if part is not None:
        return part.rank
    return int({"PS": FLAGS.id_ps, "Worker": FLAGS.id_worker}.get(FLAGS.type_node, 0))


def _log_layout() -> standard_logging.Formatter:
    """Return a log format that puts this node's name into each log line."""
    return standard_logging.Formatter(f"%(asctime)s {_node_name()} %(levelname).1s %(message)s")


def _start_log() -> None:
    """Start writing this node's log to stderr."""
    logging.use_absl_handler()
    logging.get_absl_handler().setFormatter(_log_layout())
    _set_level()
    if FLAGS.quiet:
        logging.get_absl_handler().setLevel(standard_logging.WARNING)


def _set_level() -> None:
    """Set this node's log level from --log_level, or from absl's --verbosity if that is given."""
    level = observability.level_of(FLAGS.log_level, FLAGS.type_node.lower(), _node_name())
    verbosity = FLAGS["verbosity"]
    logging.set_verbosity(int(verbosity.value or 0) if verbosity.present else level)
    for library in _CHATTY:
        standard_logging.getLogger(library).setLevel(standard_logging.WARNING)


def _lock(run: Run) -> None:
    """Lock this node's files until the process ends.

    A node's process writes no file before it holds the lock.
    """
    from thinwire.runtime.run.directory import lock_of
    from thinwire.runtime.run.lock import LockOwner

    number = _node_number()
    address = run.addresses[number] if run.type_node == "PS" else ""
    lock_of(run.run_dir, run.type_node, number).take(LockOwner.here(run.type_node, number, address))


def _keep_log(run: Run) -> None:
    """Start to copy the log to a file in the run directory, and write all flags to another file."""
    from thinwire.runtime.run.directory import LogFile

    folder, name = run.run_dir / "logs", _node_name()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handler = LogFile(folder / f"{name}.log", _write_to_log_stream)
        (run.run_dir / f"flags-{name}.txt").write_text(FLAGS.flags_into_string())
    except OSError as error:
        raise ConfigurationError(
            f"--run_dir={run.run_dir} cannot be written ({error}); choose another folder."
        ) from error
    handler.setFormatter(_log_layout())
    standard_logging.getLogger().addHandler(handler)


def _write_to_log_stream(text: str) -> None:
    """Write a text to the stream of this node's log.

    The stream of a launcher's log is a copy of stderr that never blocks.
    """
    stream = logging.get_absl_handler().python_handler.stream
    stream.write(f"{text}\n")
    stream.flush()


def define_flags() -> None:
    """Register every flag of every role with absl, which parses the command line."""
    define(*help_text.TOPICS)
    flags.DEFINE_boolean("help", False, "Show common flags.", short_name="h", module_name="Help")
    flags.DEFINE_boolean("helpfull", False, "Show every flag.", module_name="Help")


def run(
    program: str, arguments: list[str], role: str | None = None, runs_script: bool = False
) -> NoReturn:
    """Parse the flags, run a node's role, and exit the process with the role's exit code.

    Args:
        program: Program and subcommand for messages, for example ``thinwire ps``.
        arguments: Words of the command line: the flags and, if `runs_script` is True, a user's
            script and its arguments.
        role: Role of this node (a value of --type_node); None to read the role from the flag
            --type_node.
        runs_script: True if the workers run a user's script.
    """
    try:
        words = _words(program, arguments, role, runs_script)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_CONFIGURATION)
    except flags.Error as error:
        sys.stderr.write(f"{error} (see {program} --help)\n")
        sys.exit(EXIT_BAD_FLAG)
    code = main(words, runs_script)
    # The role has ended. A signal from here on would only replace the role's exit code.
    for end_signal in END_SIGNALS:
        signal.signal(end_signal, signal.SIG_IGN)
    gc.freeze()  # the final garbage collection skips TensorFlow's objects (1 s)
    sys.exit(code)


def _words(program: str, arguments: list[str], role: str | None, runs_script: bool) -> list[str]:
    """Load --policy and parse the flags; return the program and the words after the flags.

    Raises:
        ConfigurationError: The file of --policy, the run of --like or THINWIRE_FLAGS is unusable.
        flags.Error: A flag is malformed.
    """
    _load_policy(arguments)
    define_flags()
    defaults = [] if role is None else [f"--type_node={role}"]
    if runs_script:
        defaults = list(launch.SCRIPT_DEFAULTS)
    if runs_script or role == "Advisor":
        FLAGS.set_gnu_getopt(False)  # absl must not parse the script's arguments as flags
        arguments = _before_module(arguments)
    arguments = [*_environment_words(defaults, arguments), *arguments]
    words = _parse(program, defaults, arguments, role)
    if runs_script and FLAGS.like:
        words = _parse(program, [*defaults, *_flags_of(FLAGS.like)], arguments, role)
    return words


def _flags_of(like: str) -> list[str]:
    """Return the flags of the earlier run that --like names."""
    from thinwire.launcher.launch_document import recorded

    return recorded(like).flags


def _load_policy(arguments: list[str]) -> None:
    """Load the file of --policy, which may bring flags.

    A repeated run (--like) has the --policy of the earlier run.
    """
    topics = help_text.TOPICS
    like = policy_file.value_of("like", arguments, policy_file.kinds_of(topics))
    if policy_file.load_named(arguments, os.environ, topics) is None and like:
        policy_file.load_named(_flags_of(like), {}, topics)


def _before_module(arguments: list[str]) -> list[str]:
    """Insert ``--`` before ``-m MODULE`` if the user runs a module instead of a script file.

    Without ``--``, absl would parse -m and the module's arguments as flags of Thinwire.
    """
    words = iter(enumerate(arguments))
    for position, word in words:
        if word == MODULE_OPTION:
            return [*arguments[:position], "--", *arguments[position:]]
        if word == "--" or not word.startswith("-"):
            # The word is -- or the path of the script, after which no flags of Thinwire follow.
            break
        name = word.lstrip("-")
        if name in FLAGS and not FLAGS[name].boolean:
            # The next word is the value of the flag.
            next(words, None)
    return arguments


def _environment_words(own: list[str], arguments: list[str]) -> list[str]:
    """Return the flags in THINWIRE_FLAGS; only roles that start nodes get the launcher's flags.

    The flags of THINWIRE_FLAGS come before the command line's, so that the command line wins.
    """
    words_by_flag = environment.flags_of(os.environ, help_text.TOPICS)
    words = " ".join([*own, *arguments])
    if not any(match[1] in _STARTERS for match in _TYPE_NODE.finditer(words)):
        words_by_flag = {
            name: words for name, words in words_by_flag.items() if name not in launch.NAMES
        }
    return [word for words in words_by_flag.values() for word in words]


def _check_flag_files(arguments: list[str]) -> None:
    """Reject flag files (--flagfile) that are unreadable or too large; absl has no size limit.

    Raises:
        flags.Error: A flag file cannot be read within the size limit.
    """
    for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name in ("-flagfile", "--flagfile") and (path := value if equals else following):
            try:
                read_bounded(os.path.expanduser(path))
            except OSError as error:
                raise flags.Error(
                    f"--flagfile={path} cannot be read ({error.strerror}); expected a text file "
                    "with one flag per line"
                ) from error


def _parse(program: str, own: list[str], arguments: list[str], role: str | None) -> list[str]:
    _check_flag_files(arguments)
    words = list(FLAGS([program, *own, *arguments]))
    if role not in (None, FLAGS.type_node):
        raise flags.Error(
            f"--type_node={FLAGS.type_node}: {program} runs the role {role}; leave --type_node out"
        )
    return words
