"""Runs a user's script as a worker or the evaluator of a run, as ``python script.py`` would.

`thinwire run` starts ``script.py [--flag=value ...] -- SCRIPT [ARGUMENT ...]``, by the path of this
module or as ``-m``. `launcher/script.py` writes the flags to a file that only this user can read,
for `thinwire.script.settings`. `launcher/script.py` sets the seeds and threads of a library when
the user's script imports the library. If the script fails on a worker, `launcher/script.py` writes
one line for the launcher (`failures`), which shows the failure once and ends the run. If the script
fails as the evaluator, `launcher/script.py` writes the traceback, and the run continues. Because
`thinwire.launcher.script` may run as the main program, no module imports names from it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import random
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

if not __package__:
    # If `script.py` is run by its path, the module path, which belongs to the user's script, lacks
    # the package thinwire. Once imported, thinwire finds its modules by its own path. The package's
    # parent folder must not stay on the module path, where it could hide modules of the user.
    _ROOT = str(pathlib.Path(__file__).resolve().parents[2])
    sys.path.insert(0, _ROOT)
    importlib.import_module("thinwire")
    sys.path.remove(_ROOT)

from thinwire.launcher.error_reasons import (
    exit_code_of,
    original_of,
    place_of,
    reason_of,
    stop_reason_of,
)
from thinwire.launcher.failures import Cause, Failure, report_completion
from thinwire.runtime.run.devices import device_variables
from thinwire.runtime.run.program import digest_of_bytes
from thinwire.runtime.run.quiet import (
    configure_libraries,
    keep_generated_code_in_memory,
    quiet_stderr,
)
from thinwire.runtime.run.resuming import OtherRun
from thinwire.runtime.run.script_settings import (
    EVALUATES,
    IN_SCRIPT_FOLDER,
    RUN_BEGAN,
    SENT_SCRIPT,
    SETTINGS_VARIABLE,
    remove_own_settings,
    write_settings,
)
from thinwire.runtime.run.script_target import MODULE_OPTION
from thinwire.runtime.run.settings import (
    EXIT_BAD_FLAG,
    EXIT_CONFIGURATION,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_SCRIPT,
    EXIT_UNREACHABLE,
    SCRIPT_FAILED,
)
from thinwire.runtime.run.signals import admit_signals
from thinwire.worker.held_libraries import (
    hold_h5py,
    hold_tensorflow,
    hold_torch,
    share_downloads,
)
from thinwire.worker.held_python import hold_back
from thinwire.worker.script import RECORD
from thinwire.worker.temporary import record_temporary, remove_temporary

#: Stop reasons with which the PS end a script because another process failed or was interrupted.
_OTHERS_CAUSES = (SCRIPT_FAILED, "interrupted")
#: Delay in seconds before an interrupted script ends the run. If all nodes were interrupted, the PS
#: end the run during the delay. If only this script was interrupted, it ends the run after the
#: delay.
_INTERRUPTED_SECONDS = 0.5
_STEP_VARIABLE = "SLURM_STEP_ID"
_SEPARATOR = "--"
_HASH_SEED = "PYTHONHASHSEED"
#: Number of the signal (SIGTERM) by which the launcher has ended this script; an empty list before
#: the signal.
_ENDED: list[int] = []


def main(arguments: Sequence[str]) -> int:
    """Run the user's script that the arguments name; return the script's exit code."""
    # At exit the interpreter searches TensorFlow's million objects for reference cycles, several
    # times, which takes a second of CPU time. The search skips objects that `gc.freeze` has frozen.
    atexit.register(gc.freeze)
    arguments = list(arguments)
    at = arguments.index(_SEPARATOR)
    words, script = [_absolute(word) for word in arguments[:at]], arguments[at + 1 :]
    values = _values(words)
    _fix_hashes(int(values["seed"]))
    _prepare_process(values)
    if IN_SCRIPT_FOLDER in words:
        words.remove(IN_SCRIPT_FOLDER)
        _go_to_folder(script)
    evaluates = EVALUATES in words
    node = "evaluator" if evaluates else f"worker-{int(values['id_worker'])}"
    settings = write_settings(pathlib.Path(values["run_dir"]), node, words, script)
    os.environ[SETTINGS_VARIABLE] = str(settings)
    _hold_files(values, node)
    _prepare_libraries(values)
    try:
        return _evaluate(script) if evaluates else _run(script)
    finally:
        remove_own_settings(settings)


def _go_to_folder(script: list[str]) -> None:
    """Change to the folder of the script; for -m, to the copy of the launcher's current folder."""
    if script[0] == MODULE_OPTION:
        os.chdir(SENT_SCRIPT)
        return
    path = pathlib.Path(script[0]).resolve()
    script[0] = path.name
    os.chdir(path.parent)


def _name_of(script: Sequence[str]) -> str:
    """Return the script's name for messages: its file name, or -m and the module's name."""
    if script[0] == MODULE_OPTION:
        return " ".join(script[:2])
    return pathlib.Path(script[0]).name


def _absolute(word: str) -> str:
    """Return a flag with its path made absolute, because a script may change the current folder."""
    name, equals, value = word.partition("=")
    is_path = (
        name in ("--run_dir", "--policy") or name.endswith("_file") or name.startswith("--tls_")
    )
    return f"{name}={os.path.abspath(value)}" if is_path and equals else word


def _values(words: Sequence[str]) -> dict[str, str]:
    """Return name -> value for words --name=value; if a flag is repeated, its last value counts."""
    pairs = (word.removeprefix("--").partition("=") for word in words)
    return {name: value for name, _, value in pairs}


def _hold_files(given: Mapping[str, str], node: str) -> None:
    """Keep workers other than the chief from deleting or truncating files that the chief writes."""
    began = given.get(RUN_BEGAN.strip("-="))
    # Without a launcher's start time, no other worker writes the same files.
    if began is None:
        return
    number = 0 if node == "evaluator" else int(given["id_worker"])
    is_first = bool(number) and not int(given.get("num_restarts", "0"))
    hold_back(
        pathlib.Path(given["run_dir"]),
        node,
        float(began),
        lambda: number == RECORD.chief,
        is_first,
    )


def _fix_hashes(seed: int) -> None:
    """Restart Python with the run's seed as PYTHONHASHSEED, unless a hash seed is set.

    The order of a set of strings depends on the hash seed. With different hash seeds, workers could
    number the words of a vocabulary differently.
    """
    if os.environ.get(_HASH_SEED, "random") != "random":
        return
    os.environ[_HASH_SEED] = str(seed % 2**32)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _prepare_process(given: Mapping[str, str]) -> None:
    """Configure the device, output streams and signal handlers of this process."""
    # Hide TensorFlow's greeting, which every worker would log.
    configure_libraries(tensorflow_log_level=2)
    os.environ.update(device_variables(given.get("device", "auto")))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # By default, Python block-buffers an output stream to a pipe.
            stream.reconfigure(line_buffering=True)
    record_temporary()
    signal.signal(signal.SIGTERM, _end_evaluator if EVALUATES[2:] in given else _end)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _prepare_libraries(given: Mapping[str, str]) -> None:
    """Set seeds and threads of numpy and backends, and protect files that the chief writes.

    JAX needs no seed: Keras draws the seeds of its JAX backend by Python's module `random`.
    """
    seed, threads = int(given["seed"]), int(given.get("worker_threads", "0"))
    # A training step blocks one of TensorFlow's threads while it waits for an exchange with the PS.
    # With --kernels=tf the exchange itself calls TensorFlow and needs threads that are not blocked.
    calls = 2 if given.get("kernels") == "tf" else 1
    random.seed(seed)
    _act_after_imports(
        {
            "numpy": lambda numpy: numpy.random.seed(seed % 2**32),
            "h5py": hold_h5py,
            "keras.src.utils.file_utils": share_downloads,
            "tensorflow": lambda tensorflow: _prepare_tensorflow(tensorflow, seed, threads, calls),
            "torch": lambda torch: _prepare_torch(torch, seed, threads),
        }
    )


def _prepare_tensorflow(tensorflow: Any, seed: int, threads: int, calls: int) -> None:
    tensorflow.config.threading.set_intra_op_parallelism_threads(threads)
    tensorflow.config.threading.set_inter_op_parallelism_threads(threads * calls)
    tensorflow.random.set_seed(seed)
    keep_generated_code_in_memory()
    hold_tensorflow()


def _prepare_torch(torch: Any, seed: int, threads: int) -> None:
    torch.manual_seed(seed)
    hold_torch(torch)
    if threads:  # 0 keeps torch's own choice
        torch.set_num_threads(threads)


def _end(number: int, frame: Any) -> None:
    """Raise SystemExit on SIGTERM, so that the user's script can release its resources."""
    signal.signal(number, signal.SIG_DFL)
    _ENDED.append(number)
    time.sleep(_INTERRUPTED_SECONDS)
    raise SystemExit(128 + number)


def _end_evaluator(number: int, frame: Any) -> None:
    """End the evaluator process on SIGTERM; clean up only its temporary files."""
    remove_temporary()
    os._exit(128 + number)


def _act_after_imports(actions: Mapping[str, Callable[[Any], None]]) -> None:
    """Call each function with its module, now if the module is imported, else after its import."""
    later = dict(actions)
    for name, action in actions.items():
        # Python's start-up files (sitecustomize) may have imported the module
        if name in sys.modules:
            action(sys.modules[name])
            del later[name]
    sys.meta_path.insert(0, _AfterImport(later))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Import hook that calls a function once, as soon as a given module has been imported.

    Args:
        actions: Name of a module -> function that is called with the imported module.
    """

    def __init__(self, actions: dict[str, Callable[[Any], None]]) -> None:
        self._actions = actions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a module's spec, whose loader calls the module's function after the import."""
        # The action is removed first, because `importlib.util.find_spec` calls this method again,
        # and the second call must return None to let Python's usual finders find the module.
        action = self._actions.pop(fullname, None)
        if action is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_act(module: types.ModuleType) -> None:
                del loader.exec_module  # restores `exec_module` of the loader's class
                with quiet_stderr() if fullname == "tensorflow" else contextlib.nullcontext():
                    execute(module)
                action(module)

            loader.exec_module = execute_and_act
        return spec


# -- the script ---------------------------------------------------------------------------------


def _run(words: Sequence[str]) -> int:
    """Run the user's script as a worker, report a failure, and return the exit code."""
    name, thread_errors = _name_of(words), _note_thread_errors()
    try:
        _execute(words)
        code, failure = EXIT_DONE, None
    except SystemExit as error:
        code = _code_of(error)
        failure = _failure_of_exit(error, code, name)
    except KeyboardInterrupt:
        code, failure = EXIT_INTERRUPTED, None
        time.sleep(_INTERRUPTED_SECONDS)
    except BaseException as error:  # noqa: BLE001 - any error of the script
        if (ended := _code_of_signal(error)) is not None:
            return ended
        failure = _failure(error)
        code = failure.code
    if code == EXIT_DONE and failure is None:
        failure = _failure(thread_errors[0]) if thread_errors else _idleness(name)
    elif code == EXIT_INTERRUPTED and failure is None and not _ENDED:
        failure = Failure(code, f"{name} was interrupted", Cause.INTERRUPTED)
    if failure is not None:
        code = failure.code
        failure.report()
    cause = None if failure is None else failure.cause
    if cause is Cause.ELSEWHERE:
        return code
    if cause in (Cause.LOST, Cause.OTHER_RUN) or _is_cancelled(code):
        RECORD.endings.clear()
    # If the PS cannot be notified of the end, the launcher ends the run.
    with contextlib.suppress(Exception):
        RECORD.end(code != EXIT_DONE, "" if failure is None else failure.headline)
    if code == EXIT_DONE:
        report_completion()
    return code


def _failure_of_exit(error: SystemExit, code: int, name: str) -> Failure | None:
    """Return the failure of a script that called `sys.exit`; None if the exit is no failure."""
    if _ENDED or code == EXIT_INTERRUPTED:
        return None
    if code:
        words = "" if isinstance(error.code, int) else f": {' '.join(str(error.code).split())}"
        return Failure(code, f"{name} ended with exit code {code}{words}")
    if error is RECORD.left_fit_by:
        text = (
            f"{name} ended with exit code 0 in the middle of fit, which the other workers "
            "would continue; expected fit to return: set self.model.stop_training = True."
        )
        return Failure(EXIT_SCRIPT, text, Cause.THINWIRE)
    return None


def _note_thread_errors() -> list[BaseException]:
    """Return a list that collects each error of Thinwire that ends a thread of the script.

    If Thinwire's error ends a thread, the training in this thread has failed, even if the main
    thread runs the script to its end.
    """
    errors: list[BaseException] = []
    before = threading.excepthook

    def note(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or exit_code_of(original_of(args.exc_value)) is None:
            before(args)
        else:
            errors.append(args.exc_value)

    threading.excepthook = note
    return errors


def _is_cancelled(code: int) -> bool:
    """Return whether Slurm has ended this script and all other nodes of the step by a signal.

    Slurm sends the signal to every process of the step, and this process may be the first that
    reacts.
    """
    return _STEP_VARIABLE in os.environ and (bool(_ENDED) or code == EXIT_INTERRUPTED)


def _code_of_signal(error: BaseException) -> int | None:
    """Return the exit code of the signal that caused an error; None if no signal caused it.

    If a signal handler raises SystemExit inside TensorFlow, TensorFlow replaces it by another
    error. A KeyboardInterrupt during an import of TensorFlow becomes the cause or context of an
    ImportError.
    """
    if _ENDED:
        return 128 + _ENDED[0]
    cause: BaseException | None = error if isinstance(error, ImportError) else None
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            return EXIT_INTERRUPTED
        cause = cause.__cause__ or cause.__context__
    return None


def _evaluate(words: Sequence[str]) -> int:
    """Run the script as the evaluator (a process that evaluates); return the exit code."""
    try:
        _execute(words)
    except SystemExit as error:
        return _code_of(error)
    except BaseException as error:  # noqa: BLE001 - any error of the script
        failure = _failure(error)
        sys.stderr.write("" if failure.cause is Cause.ELSEWHERE else f"{failure.text}\n")
        return failure.code
    return EXIT_DONE


def _execute(words: Sequence[str]) -> None:
    """Run the user's script as the main module `__main__`, which it remains after its end."""
    # From this line on, the callers catch the exceptions that signal handlers raise.
    admit_signals()
    if words[0] == MODULE_OPTION:
        _execute_module(words[1], words[2:])
        return
    path = pathlib.Path(words[0]).resolve()
    source = path.read_bytes()
    RECORD.source = path, digest_of_bytes(source)
    main_module = _new_main_module(words[0], None)
    main_module.__loader__ = importlib.machinery.SourceFileLoader("__main__", str(path))
    sys.argv[:] = list(words)
    _begin_module_path(str(path.parent))
    exec(compile(source, words[0], "exec"), main_module.__dict__)


def _execute_module(name: str, arguments: Sequence[str]) -> None:
    """Run a module as ``python -m`` does, after importing the module's packages.

    `_execute_module` does not use `runpy.run_module`, which restores the previous main module at
    its end, although the script's threads and exit handlers still need the script as main module.
    """
    # `python -m` sets the same sys.argv while Python imports packages.
    sys.argv[:] = [MODULE_OPTION, *arguments]
    _begin_module_path(os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
        if spec is None:
            raise ImportError(
                f"No module named {name}.__main__; {name!r} is a package and cannot be directly "
                "executed"
            )
    if spec is None or spec.origin is None or spec.loader is None:
        raise ImportError(f"No module named {name}")
    loader: Any = spec.loader
    code = loader.get_code(spec.name)
    path = pathlib.Path(spec.origin).resolve()
    RECORD.source = path, digest_of_bytes(path.read_bytes())
    main_module = _new_main_module(spec.origin, spec)
    main_module.__loader__ = loader
    sys.argv[0] = spec.origin
    exec(code, main_module.__dict__)


def _new_main_module(file: str, spec: importlib.machinery.ModuleSpec | None) -> Any:
    """Create an empty module `__main__` for the user's script; install it in `sys.modules`."""
    main_module: Any = types.ModuleType("__main__")
    main_module.__file__ = file
    main_module.__builtins__ = builtins
    main_module.__cached__ = None if spec is None else spec.cached
    main_module.__spec__ = spec
    if spec is not None:
        main_module.__package__ = spec.parent
    sys.modules["__main__"] = main_module
    return main_module


def _begin_module_path(folder: str) -> None:
    if not sys.flags.safe_path:  # without -P, `python -m` puts the current folder first on the path
        del sys.path[0]
    sys.path.insert(0, folder)


def _code_of(error: SystemExit) -> int:
    """Return the exit code that the Python interpreter would use for a SystemExit.

    A code of the SystemExit that is neither None nor a number is written to stderr, as the
    interpreter does.
    """
    if error.code is None:
        return EXIT_DONE
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return EXIT_BAD_FLAG


def _idleness(name: str) -> Failure | None:
    """Return the failure of a script that never communicated with the PS; else None."""
    if not RECORD.is_distributed:
        return Failure(
            EXIT_CONFIGURATION,
            f"{name} ended without a call of thinwire.distribute(): this worker exchanged "
            "nothing. Add `model = thinwire.distribute(model)` between compile and fit, or run "
            f"the script without Thinwire: python {name}.",
            Cause.THINWIRE,
        )
    if not RECORD.has_exchanged:
        return Failure(
            EXIT_CONFIGURATION,
            f"{name} called thinwire.distribute() and ended without an exchange: any training on "
            "this worker was not shared with the other workers. Expected a call of fit of the "
            "model that distribute() was given; in a custom training loop, steps of `optimizer = "
            "thinwire.distribute(optimizer, model=model)`.",
            Cause.THINWIRE,
        )
    return None


def _failure(error: BaseException) -> Failure:
    """Return the failure that describes an error that the user's script raised."""
    original = original_of(error)
    code, stop_reason = exit_code_of(original), stop_reason_of(original)
    place, reason = place_of(error), reason_of(error)
    placed = f"{place}: {reason}" if place else reason
    if code is None:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next  # skips the traceback's frames of this module
        text = "".join(traceback.format_exception(type(error), error, trace))
        return Failure(EXIT_SCRIPT, text.rstrip(), reason=placed)
    if stop_reason in _OTHERS_CAUSES:
        return Failure(code, reason, Cause.ELSEWHERE)
    if isinstance(original, OtherRun):
        return Failure(code, reason, Cause.OTHER_RUN)
    return Failure(code, placed, Cause.LOST if code == EXIT_UNREACHABLE else Cause.THINWIRE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
