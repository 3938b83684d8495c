"""Plays one role as a process: flags, log, locks, and an exit code for whatever ends it.

TensorFlow is imported only inside a role, so that ``--help`` is instant.
"""

from __future__ import annotations

import contextlib
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
from thinwire.flags import environment, launch, observability
from thinwire.flags import run as run_flags
from thinwire.flags.registration import define
from thinwire.launcher import tf_config
from thinwire.ops.types import ConfigurationError
from thinwire.ps import flags as ps_flags
from thinwire.runtime.run.directory import LogFile, lock_of
from thinwire.runtime.run.files import read_bounded
from thinwire.runtime.run.lock import LockOwner
from thinwire.runtime.run.quiet import configure_libraries, import_quietly
from thinwire.runtime.run.script_target import MODULE_OPTION, ScriptTarget
from thinwire.runtime.run.settings import (
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
from thinwire.runtime.run.signals import END_SIGNALS, raise_at_signals
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
    "Standalone": "thinwire.launcher.standalone",
    "Simulator": "thinwire.simulator.role",
    "Advisor": "thinwire.advisor.role",
}
#: --type_node value -> module that does it with a script.
_WITH_SCRIPT = {"Cluster": "thinwire.launcher.run", "Advisor": "thinwire.advisor.script"}
#: Name in --log_level -> absl's number.
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
#: Roles that start other processes, which must not be left behind.
_STARTERS = ("Cluster", "Advisor")
_TYPE_NODE = re.compile(r"--?type_node[= ](\w+)")
#: Roles that need no model of their own where workers bring it.
_WITHOUT_MODEL = ("PS", "Supervisor")
#: Roles that keep nothing elsewhere.
_WITHOUT_PS = ("Standalone", "Simulator", "Advisor")
_CHATTY = ("matplotlib", "PIL", "h5py", "asyncio", "botocore", "aiobotocore", "s3fs", "fsspec")
#: --type_node value -> its own settings, checked before TensorFlow is imported.
CHECKS = {
    "PS": ps_flags.check,
    "Worker": worker_flags.check,
    "Supervisor": supervisor_flags.check,
    "Standalone": worker_flags.check,
    "Simulator": simulator_flags.check,
    "Advisor": advisor_flags.check,
}


def main(arguments: list[str], runs_script: bool = False) -> int:
    """Play one role; return the exit code.

    Args:
        arguments: The program, and what follows its flags.
        runs_script: Whether that is a script, which all workers then run.
    """
    if FLAGS.help or FLAGS.helpfull:
        role = FLAGS.type_node if FLAGS["type_node"].present else None
        role = help_text.SCRIPTS if runs_script else role
        program = arguments[0]
        text = (
            help_text.full_text_of(program) if FLAGS.helpfull else help_text.text_of(program, role)
        )
        sys.stdout.write(text)
        return EXIT_DONE
    takes_script = runs_script or (FLAGS.type_node == "Advisor" and len(arguments) > 1)
    if len(arguments) > 1 and not takes_script:
        sys.stderr.write(
            f"unexpected argument {arguments[1]!r}: every setting is a --flag=value "
            f"(see {arguments[0]} --help)\n"
        )
        return EXIT_BAD_FLAG
    _start_log()
    configure_libraries(tensorflow_log_level=3)  # before gRPC reads certificates
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
    """Check the flags, prepare the process, and play the role; return the exit code.

    Args:
        script: What workers run, and its arguments; None: their role.
    """
    if script:
        ScriptTarget.of(script)  # before the Advisor's modules, which take seconds
    if script is not None:
        script = importlib.import_module(_WITH_SCRIPT[FLAGS.type_node]).complete_flags(script)
    launch.fill_from_slurm(script is not None)
    tf_config.fill(FLAGS, os.environ.get("TF_CONFIG", ""))
    logging.get_absl_handler().setFormatter(_log_layout())  # the node's name may be new ...
    _set_level()  # ... and its level with it
    run = run_flags.read_run()
    if run.type_node not in ("Cluster", "Advisor"):
        launch.refuse_elsewhere(run)
    _refuse_places(run)
    observability.check(run, FLAGS)
    if run.type_node in CHECKS:
        CHECKS[run.type_node](run)
    if script is None and run.model_is_offered and run.type_node not in _WITHOUT_MODEL:
        raise ConfigurationError(
            f"--type_node={run.type_node} --model_from=worker: there is no script to bring the "
            "model; start the script with `thinwire run`, or take --model_from=flags."
        )
    if _needs_tensorflow(run):
        _require_tensorflow()
    if script is not None and FLAGS.dry_run:
        return int(importlib.import_module(_WITH_SCRIPT[run.type_node]).show(run, script))
    _lock(run)
    _keep_log(run)
    # A Cluster logs them once for all, after how its run starts.
    if run.type_node not in ("Supervisor", "Cluster") and not FLAGS.quiet:
        for warning in run.method.warnings:
            logging.warning("%s", warning)
    _prepare_process(run)
    if script is not None:
        module = importlib.import_module(_WITH_SCRIPT[run.type_node])
        main_of_role = functools.partial(module.main, run, script)
    else:
        main_of_role = functools.partial(importlib.import_module(ROLES[run.type_node]).main, run)
    with raise_at_signals() if run.type_node in _STARTERS else contextlib.nullcontext():
        return int(main_of_role())


def _refuse_places(run: Run) -> None:
    """Refuse addresses where nothing is kept elsewhere."""
    given = {"checkpoint_dir": run.checkpoint_dir, "report_dir": run.report_dir}
    for flag, address in given.items():
        if address is not None and run.type_node in _WITHOUT_PS:
            raise ConfigurationError(
                f"--type_node={run.type_node} --{flag}={address}: it is for a run with a PS and a "
                f"Supervisor, and a {run.type_node} keeps all in --run_dir. Leave it out."
            )


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


def _explain(error: Exception) -> str:
    """Return an expected failure in words; of a disk's refusal with the file and what to do."""
    if not isinstance(error, OSError) or error.errno not in _DISK_REFUSES:
        return str(error)
    where = error.filename or f"a file of --run_dir={FLAGS.run_dir}"
    return (
        f"cannot write {where}: {error.strerror}. Free space on that disk, or make it writable; "
        "the same command then resumes the run."
    )


def _needs_tensorflow(run: Run) -> bool:
    """Return whether a node needs it from the start; where workers bring the model, few do.

    A PS imports it later if the worker's optimizer needs it.
    """
    has_model = run.type_node not in _WITHOUT_MODEL or not run.model_is_offered
    return has_model or run.kernels == "tf"


def _require_tensorflow() -> None:
    if importlib.util.find_spec("tensorflow") is None:
        raise ConfigurationError(
            "TensorFlow is not installed, and every role needs it: pip install 'thinwire[cpu]', or "
            "'thinwire[gpu]' for NVIDIA GPUs."
        )


def _prepare_process(run: Run) -> None:
    """Set what must be set before TensorFlow and gRPC start."""
    from thinwire.runtime.malloc import keep_freed_memory

    keep_freed_memory()
    if run.device != "auto":
        os.environ["CUDA_VISIBLE_DEVICES"] = run.device.removeprefix("gpu:").replace("cpu", "-1")
    if run.type_node != "Cluster" and _needs_tensorflow(run):
        import_quietly("tensorflow")


def _node_name() -> str:
    """Return for example ``worker-3``."""
    return f"{FLAGS.type_node.lower()}-{_node_number()}"


def _node_number() -> int:
    """Return this node's id; of a Cluster in several parts, this part's; 0 for others."""
    part = launch.part_here()
    if part is not None:
        return part.rank
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
    """Set the level of every log; absl's own --verbosity wins where given."""
    level = observability.level_of(FLAGS.log_level, FLAGS.type_node.lower(), _node_name())
    given = FLAGS["verbosity"]
    logging.set_verbosity(int(given.value or 0) if given.present else LEVELS[level])
    for library in _CHATTY:  # their lines at these levels concern nobody's run
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
        handler = LogFile(folder / f"{name}.log", _write_to_log_stream)
        (run.run_dir / f"flags-{name}.txt").write_text(FLAGS.flags_into_string())
    except OSError as error:
        raise ConfigurationError(
            f"--run_dir={run.run_dir} cannot be written ({error}); choose another folder."
        ) from error
    handler.setFormatter(_log_layout())
    standard_logging.getLogger().addHandler(handler)


def _write_to_log_stream(text: str) -> None:
    """Write where log lines go: in a launcher, to its copy of stderr, which never blocks."""
    stream = logging.get_absl_handler().python_handler.stream
    stream.write(f"{text}\n")
    stream.flush()


def define_flags() -> None:
    """Register every flag of every role."""
    define(*help_text.TOPICS)
    flags.DEFINE_boolean("help", False, "Show common flags.", short_name="h", module_name="Help")
    flags.DEFINE_boolean("helpfull", False, "Show every flag.", module_name="Help")


def run(
    program: str, arguments: list[str], role: str | None = None, runs_script: bool = False
) -> NoReturn:
    """Play a role, and exit with its code.

    Args:
        program: What was run, such as ``thinwire ps``.
        arguments: The flags; with `runs_script`, then the script and its arguments.
        role: A value of --type_node; None: the flags name it.
        runs_script: Whether workers run a script.
    """
    define_flags()
    own = [] if role is None else [f"--type_node={role}"]
    if runs_script or role == "Advisor":
        FLAGS.set_gnu_getopt(False)  # what follows the script is the script's own
    if runs_script:
        own = list(launch.SCRIPT_DEFAULTS)
    if runs_script or role == "Advisor":
        arguments = _before_module(arguments)
    arguments = [*_environment_words(own, arguments), *arguments]
    rest = _parse(program, own, arguments, role)
    if runs_script and FLAGS.like:
        rest = _parse(program, [*own, *_repeated_flags()], arguments, role)
    code = main(rest, runs_script)
    for end_signal in END_SIGNALS:  # there is nothing left to interrupt, and the code is known
        signal.signal(end_signal, signal.SIG_IGN)
    gc.freeze()  # else the interpreter looks through TensorFlow's objects before it ends: a second
    sys.exit(code)


def _repeated_flags() -> list[str]:
    """Return the flags of the run that --like names."""
    from thinwire.launcher.launch_document import recorded

    try:
        return recorded(FLAGS.like).flags
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_CONFIGURATION)


def _before_module(arguments: list[str]) -> list[str]:
    """Return the arguments with ``--`` before ``-m MODULE``, where that stands for the script.

    absl would take -m for a flag, and what follows the module for flags of Thinwire.
    """
    words = iter(enumerate(arguments))
    for position, word in words:
        if word == MODULE_OPTION:
            return [*arguments[:position], "--", *arguments[position:]]
        if word == "--" or not word.startswith("-"):
            break  # the script
        name = word.lstrip("-")
        if name in FLAGS and not FLAGS[name].boolean:
            next(words, None)  # its value
    return arguments


def _environment_words(own: list[str], arguments: list[str]) -> list[str]:
    """Return the words of THINWIRE_FLAGS, without a launcher's flags on a node that is none.

    They stand before the command line's own, whose values then count.
    """
    try:
        found = environment.flags_of(os.environ, help_text.TOPICS)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(EXIT_CONFIGURATION)
    words = " ".join([*own, *arguments])
    if not any(match[1] in _STARTERS for match in _TYPE_NODE.finditer(words)):
        found = {name: words for name, words in found.items() if name not in launch.NAMES}
    return [word for words in found.values() for word in words]


def _check_flag_files(arguments: list[str]) -> None:
    """Refuse flag files without end, which absl would go on reading; raises `flags.Error`."""
    for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name in ("-flagfile", "--flagfile") and (path := value if equals else following):
            try:
                read_bounded(os.path.expanduser(path))
            except OSError as error:
                raise flags.Error(
                    f"--flagfile={path} cannot be read ({error.strerror}); expected a text file "
                    "with a flag a line"
                ) from error


def _parse(program: str, own: list[str], arguments: list[str], role: str | None) -> list[str]:
    """Parse the flags; a bad one ends the process with one clear line and code 1."""
    try:
        _check_flag_files(arguments)
        rest = list(FLAGS([program, *own, *arguments]))
        if role not in (None, FLAGS.type_node):
            raise flags.Error(
                f"--type_node={FLAGS.type_node}: {program} is the {role}; leave it out"
            )
    except flags.Error as error:
        sys.stderr.write(f"{error} (see {program} --help)\n")
        sys.exit(EXIT_BAD_FLAG)
    return rest
