"""``thinwire.run(function, ...)``: a Python function as every worker of a run.

The function and its arguments are written into the run directory, with a script that calls it;
the rest is `thinwire run`. Only files of the run directory are unpickled, never what comes over the
wire.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import os
import pathlib
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from thinwire.flags.environment import VARIABLE
from thinwire.launcher import program
from thinwire.launcher.local import SupervisedProcess, watchdog_command
from thinwire.launcher.output import LOG_PREFIX, Screen, report_losses
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.script_settings import SETTINGS_VARIABLE
from thinwire.runtime.run.settings import EXIT_DONE

_FOLDER, _CALL, _RESULT = "function", "call.pkl", "result.pkl"
#: Where the script finds the folder of the call: its own.
_SCRIPT = """\
# What is called: {digest}
import pathlib

from thinwire.launcher.function import call

if __name__ == "__main__":
    call(pathlib.Path(__file__).resolve().parent)
"""
_WAIT_SECONDS = 0.2


class RunFailed(Exception):
    """A run of `thinwire.run` did not end well; `exit_code` is that of `thinwire run`."""

    def __init__(self, exit_code: int, run_dir: pathlib.Path, last_output: str) -> None:
        super().__init__(
            f"the run ended with exit code {exit_code}: {last_output} (logs: {run_dir / 'logs'})"
        )
        self.exit_code, self.run_dir = exit_code, run_dir


@dataclasses.dataclass(frozen=True)
class FunctionRun:
    """A run that ended well.

    Attributes:
        run_dir: Its folder.
        summary: summary.json, as far as there is one.
        value: What the function returned on worker 1; None where that could not be pickled, or
            where the worker ran on a host with another disk.
        lost_output: How many lines the caller's stdout and stderr lack, and why; empty if none.
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
    """Run a function on several workers, each a process of its own, with a PS and a Supervisor.

    The function builds its model, gives it to `thinwire.distribute` and calls `fit`, as a script
    does. It is sent by name if other processes can import it, else by value (of a notebook, or of
    the main program, whose modules' values it uses are then sent too).

    Args:
        function: Called on every worker.
        args: Its arguments; they must pickle.
        nb_workers: Number of workers.
        **flags: Flags of `thinwire run` by name, such as ``method="dgs"`` or ``iter_max=100``.

    Raises:
        ConfigurationError: The function or its arguments cannot be pickled.
        RunFailed: The run did not end well.
        KeyboardInterrupt: It was interrupted; the same call resumes it.
    """
    name = getattr(function, "__name__", "function").strip("<>")
    run_dir = pathlib.Path(flags.pop("run_dir", None) or f"runs/{name}").resolve()
    script = _write_call(run_dir / _FOLDER, function, args)
    settings = {"nb_workers": nb_workers, "run_dir": run_dir} | flags
    words = [_word(key, value) for key, value in settings.items() if value is not None]
    command = [sys.executable, *program.RUN, "run", *words, str(script)]
    # A line of the caller's log could wait for the same reader as the output: the end reports.
    output = _RepeatedLines(Screen(on_first_loss=lambda _: None))
    supervised = watchdog_command(
        sys.executable, program.WATCHDOG, command, announce=False, silence_seconds=math.inf
    )
    given = {name: os.environ[name] for name in (VARIABLE,) if name in os.environ}
    process = SupervisedProcess(supervised, output, announced=False, variables=given)
    try:
        code = _wait(process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        lost_output = output.close()
    if code != EXIT_DONE:
        raise RunFailed(code, run_dir, output.last_error)
    return FunctionRun(run_dir, _summary(run_dir), _result(run_dir / _FOLDER), lost_output)


def call(folder: pathlib.Path) -> None:
    """Call the function of a folder, as a worker; worker 1 leaves what it returns."""
    found = cloudpickle.loads((folder / _CALL).read_bytes())
    sys.path[:] = [*sys.path, *(each for each in found["path"] if each not in sys.path)]
    function, args = cloudpickle.loads(found["call"])
    value = function(*args)
    if not os.environ.get(SETTINGS_VARIABLE, "").endswith("worker-1.json"):
        return
    kept = pathlib.Path(os.environ[SETTINGS_VARIABLE]).parents[1] / _FOLDER  # not of a copy
    try:
        kept.mkdir(exist_ok=True)
        (kept / _RESULT).write_bytes(cloudpickle.dumps(value))
    except Exception as error:  # noqa: BLE001 - whatever pickling calls
        sys.stderr.write(f"what the function returned cannot be pickled: {error}\n")


def _write_call(folder: pathlib.Path, function: Callable[..., Any], args: Sequence[Any]) -> str:
    """Write the call and the script that makes it; return the script's path."""
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
    """Return the digest of a function, of those that it calls here, and of its arguments.

    It stands in the script, so that another function is another script. A pickle would not do: it
    has the number of a notebook's cell, which another evaluation of the same text changes.
    """
    found = hashlib.sha256(cloudpickle.dumps(tuple(args)))
    for name, each in _used(function, {}).items():
        found.update(f"{name} {_text_of(each)}".encode())
    return found.hexdigest()


def _used(function: Any, known: dict[str, Any]) -> dict[str, Any]:
    """Return name -> value of a function, and of the functions and numbers here that it uses."""
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
    """Yield the names that a code uses, and those of comprehensions and functions within it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names_of(each)


def _text_of(value: Any) -> str:
    """Return the source of a function or a class, or of its code where no file has its text."""
    if not callable(value):
        return repr(value)
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        parts = vars(value).values() if isinstance(value, type) else [value]
        codes = [each.__code__ for each in parts if hasattr(each, "__code__")]
        return " ".join(map(_code_text, codes)) or type(value).__name__


def _code_text(code: types.CodeType) -> str:
    constants = (
        _code_text(each) if isinstance(each, types.CodeType) else repr(each)
        for each in code.co_consts
    )
    return f"{code.co_code!r} {code.co_names} {' '.join(constants)}"


def _word(name: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        value = ",".join(str(each) for each in value)
    return f"--{name}={value}"


def _wait(process: SupervisedProcess) -> int:
    """Wait for the end, and pass an interruption on, which then is raised."""
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
    process.wait()  # for its last lines
    return code


def _summary(run_dir: pathlib.Path) -> Mapping[str, Any]:
    try:
        return dict(json.loads((run_dir / "summary.json").read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _result(folder: pathlib.Path) -> Any:
    path = folder / _RESULT
    return cloudpickle.loads(path.read_bytes()) if path.is_file() else None


class _RepeatedLines:
    """Repeats lines on the caller's stdout and stderr, which a notebook has replaced.

    Attributes:
        last_error: The last line of stderr, without the time and the level of a log: the reason of
            a run that did not end well.
    """

    last_error = ""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen

    def on_line(self, line: str, is_error: bool) -> None:
        """Repeat one line."""
        if is_error and line.strip():
            self.last_error = LOG_PREFIX.sub("", line)
        self._screen.write(line, is_error, "the run")

    def close(self) -> str:
        """Finish the output; return what is missing, which is logged if stderr is read."""
        self._screen.close()
        if self._screen.is_error_stalled:
            return "; ".join(filter(None, (copy.report() for copy in self._screen.copies)))
        return "; ".join(report_losses(self._screen.copies))
