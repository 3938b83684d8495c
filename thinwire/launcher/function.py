"""``thinwire.run(function, ...)``: runs a Python function as every worker of a run.

`run` pickles the function and its arguments into the run directory, next to a script that calls the
function, and starts `thinwire run` with that script. Workers unpickle only files of the run
directory, never data received over the network.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
import pathlib
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from thinwire.flags.environment import VARIABLE, flag_word
from thinwire.launcher import program
from thinwire.launcher.local import SupervisedProcess, watchdog_command
from thinwire.launcher.output import LOG_PREFIX, NodeOutput, Screen, report_losses
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.directory import summary_of
from thinwire.runtime.run.script_settings import SETTINGS_VARIABLE
from thinwire.runtime.run.settings import EXIT_DONE

_FOLDER, _CALL, _RESULT = "function", "call.pkl", "result.pkl"
#: Text of the script that every worker runs. The pickled call is in the folder of the script.
_SCRIPT = """\
# What is called: {digest}
import pathlib

from thinwire.launcher.function import call

if __name__ == "__main__":
    call(pathlib.Path(__file__).resolve().parent)
"""
_WAIT_SECONDS = 0.2


class RunFailed(Exception):
    """A training run that `thinwire.run` had started failed.

    Attributes:
        exit_code: Exit code of the failed command `thinwire run`.
        run_dir: Path of the run directory, which holds the nodes' logs.
    """

    def __init__(self, exit_code: int, run_dir: pathlib.Path, last_output: str) -> None:
        super().__init__(
            f"the run ended with exit code {exit_code}: {last_output} (logs: {run_dir / 'logs'})"
        )
        self.exit_code, self.run_dir = exit_code, run_dir


@dataclasses.dataclass(frozen=True)
class FunctionRun:
    """Result of a training run by `thinwire.run` that ended successfully.

    Attributes:
        run_dir: Path of the run directory.
        summary: Content of the run's summary.json; empty if the run has not written the file.
        value: Return value of the function on worker 1; None if the return value could not be
            pickled, or if worker 1 ran on a host that does not share the run directory's disk.
        lost_output: Text that reports how many lines of the run's output are missing on the
            caller's stdout and stderr, and why; empty if no line is missing.
    """

    run_dir: pathlib.Path
    summary: Mapping[str, Any]
    value: Any
    lost_output: str = ""


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    nb_workers: int = 2,
    **flags: Any,
) -> FunctionRun:
    """Run a function on several workers, with a PS and a Supervisor; every worker is a process.

    The user's function builds its Keras model, passes the model to `thinwire.distribute` and calls
    `fit`, as a script does. The user's function is pickled by name if other processes can import
    it. A function of a notebook or of the main program is pickled by value, with the global values
    that it uses.

    Args:
        function: Python function that every worker calls.
        args: Positional arguments of the function that every worker calls; cloudpickle must be able
            to pickle them.
        nb_workers: Number of workers.
        **flags: Flags of `thinwire run` by name, for example ``method="dgs"`` or ``iter_max=100``.

    Raises:
        ConfigurationError: The function or its arguments cannot be pickled.
        RunFailed: The command `thinwire run` ended with an exit code other than 0.
        KeyboardInterrupt: The run was interrupted. A repetition of the call resumes the run.
    """
    name = getattr(function, "__name__", "function").strip("<>")
    run_dir = pathlib.Path(flags.pop("run_dir", None) or f"runs/{name}").resolve()
    script = _write_call(run_dir / _FOLDER, function, args)
    settings = {"nb_workers": nb_workers, "run_dir": run_dir} | flags
    words = [flag_word(key, value) for key, value in settings.items() if value is not None]
    command = [sys.executable, *program.NODE, "run", *words, str(script)]
    # `output.close` reports lost lines after the run. A warning in the caller's log during the run
    # could block on the same stalled reader that made the lines of output wait.
    output = _RepeatedLines("the run", Screen(on_first_loss=lambda _: None))
    supervised = watchdog_command(sys.executable, program.WATCHDOG, command)
    variables = {name: os.environ[name] for name in (VARIABLE,) if name in os.environ}
    process = SupervisedProcess(supervised, output, variables=variables)
    try:
        code = _wait(process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        lost_output = output.close()
    if code != EXIT_DONE:
        raise RunFailed(code, run_dir, output.last_error)
    return FunctionRun(run_dir, summary_of(run_dir), _result(run_dir / _FOLDER), lost_output)


def call(folder: pathlib.Path) -> None:
    """Call the pickled function on a worker; worker 1 writes the return value to a file.

    Args:
        folder: Folder that holds the file with the pickled function and arguments.
    """
    document = cloudpickle.loads((folder / _CALL).read_bytes())
    sys.path[:] = [*sys.path, *(entry for entry in document["path"] if entry not in sys.path)]
    function, args = cloudpickle.loads(document["call"])
    value = function(*args)
    if not os.environ.get(SETTINGS_VARIABLE, "").endswith("worker-1.json"):
        return
    # The launcher reads the return value from the run directory. `folder` may be a copy of the
    # script's folder on another host.
    result_folder = pathlib.Path(os.environ[SETTINGS_VARIABLE]).parents[1] / _FOLDER
    try:
        result_folder.mkdir(exist_ok=True)
        (result_folder / _RESULT).write_bytes(cloudpickle.dumps(value))
    except Exception as error:  # noqa: BLE001 - pickling calls methods of the user's classes
        sys.stderr.write(f"the return value of the function cannot be pickled: {error}\n")


def _write_call(folder: pathlib.Path, function: Callable[..., Any], args: Sequence[Any]) -> str:
    """Write the pickled function call and the script that executes it; return the script's path."""
    try:
        pickled = cloudpickle.dumps((function, tuple(args)))
    except Exception as error:
        raise ConfigurationError(
            f"thinwire.run(): {function!r} or its arguments cannot be sent to workers ({error}); "
            "expected what cloudpickle can pickle. Build models and open files inside the function."
        ) from error
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / _RESULT).unlink(missing_ok=True)
    (folder / _CALL).write_bytes(cloudpickle.dumps({"path": sys.path, "call": pickled}))
    script = folder / f"{_FOLDER}.py"
    script.write_text(_SCRIPT.format(digest=_digest_of(function, args)))
    return str(script)


def _digest_of(function: Callable[..., Any], args: Sequence[Any]) -> str:
    """Return a digest of a function, of the functions of its module that it calls, and of `args`.

    The script that every worker runs contains the digest of the function. If the function changes,
    the digest in the script changes, and a changed script does not resume the earlier run. The
    digest covers the source text instead of a pickle, because a pickle contains the number of a
    notebook's cell, which changes when the unchanged cell is evaluated again.
    """
    digest = hashlib.sha256(cloudpickle.dumps(tuple(args)))
    for name, value in _used(function, {}).items():
        digest.update(f"{name} {_text_of(value)}".encode())
    return digest.hexdigest()


def _used(function: Any, known: dict[str, Any]) -> dict[str, Any]:
    """Return name -> value for a function and the functions and constants of its module it uses.

    The returned dict has no functions of modules other than the function's own module.
    """
    code = getattr(function, "__code__", None)
    known[getattr(function, "__qualname__", type(function).__name__)] = function
    for name in () if code is None else _names_of(code):
        other = function.__globals__.get(name)
        is_near = getattr(other, "__module__", None) == function.__module__
        if name not in known and callable(other) and is_near:
            _used(other, known)
        elif isinstance(other, bool | int | float | str):
            known[name] = other
    return known


def _names_of(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a code object and its nested code objects use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)


def _text_of(value: Any) -> str:
    """Return the source of a function or class, or its code object if no file has the source."""
    if not callable(value):
        return repr(value)
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        parts = vars(value).values() if isinstance(value, type) else [value]
        codes = [part.__code__ for part in parts if hasattr(part, "__code__")]
        return " ".join(map(_code_text, codes)) or type(value).__name__


def _code_text(code: types.CodeType) -> str:
    constants = (
        _code_text(constant) if isinstance(constant, types.CodeType) else repr(constant)
        for constant in code.co_consts
    )
    return f"{code.co_code!r} {code.co_names} {' '.join(constants)}"


def _wait(process: SupervisedProcess) -> int:
    """Return the run's exit code; after Ctrl-C, interrupt the run, then raise KeyboardInterrupt."""
    interrupted = False
    while (code := process.poll()) is None:
        try:
            time.sleep(_WAIT_SECONDS)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            process.send_signal(signal.SIGINT)
    if interrupted:
        raise KeyboardInterrupt
    process.wait()  # waits for the threads that read the last lines of the run's output
    return code


def _result(folder: pathlib.Path) -> Any:
    path = folder / _RESULT
    return cloudpickle.loads(path.read_bytes()) if path.is_file() else None


class _RepeatedLines(NodeOutput):
    """Repeats the output lines of a run on the caller's `sys.stdout` and `sys.stderr`.

    Attributes:
        last_error: Last line of the run's stderr, without the time and level of a log line. If the
            run failed, this line states the reason.
    """

    def on_line(self, line: str, is_error: bool) -> None:
        """Write one line of the run's output to the caller's stdout or stderr."""
        if is_error and line.strip():
            self.last_error = LOG_PREFIX.sub("", line)
        self.screen.write(line, is_error, self.name)

    def close(self) -> str:
        """Stop writing output; return a report of lost output lines, and log it if stderr works."""
        self.screen.close()
        if self.screen.is_error_stalled:
            return "; ".join(filter(None, (copy.report() for copy in self.screen.copies)))
        return "; ".join(report_losses(self.screen.copies))
