"""Evaluator process of a script's run, a child process of the Supervisor that never trains.

The evaluator process runs the user's training script, without training. The Supervisor starts the
evaluator together with the workers, because the user's script may clear a folder in its first
lines, which must happen before training starts. The Supervisor ends the evaluator if the scripts
train without validation data, and starts it again when a fit has validation data. A watchdog ends
the evaluator when the Supervisor ends for any reason. The Supervisor restarts an evaluator that a
signal killed a limited number of times; shard 0 then repeats the unanswered evaluation requests.
The Supervisor writes the evaluator's output to the logs in the run directory.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import io
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from absl import logging

from thinwire.runtime.output_copy import OutputFile
from thinwire.runtime.run.directory import launched_with
from thinwire.runtime.run.script_settings import EVALUATES, IN_SCRIPT_FOLDER, RUN_BEGAN
from thinwire.runtime.run.script_target import module_words
from thinwire.runtime.run.settings import Run
from thinwire.runtime.standard_input import StandardInput
from thinwire.supervisor import flags as supervisor_flags

#: Environment variable with the path of the script, relative to the working directory. The variable
#: is read if no `thinwire run` has recorded a script in the run directory.
SCRIPT_VARIABLE = "THINWIRE_SCRIPT"
_END_SECONDS = 5.0
_TERMINATE, _KILL = b"T", b"K"  # commands that the watchdog process reads from its input
_MOST_OUTPUT_BYTES = 1 << 16
#: Pause in seconds before each restart of a killed evaluator. The number of pauses is the limit of
#: restarts.
_PAUSES_SECONDS = (1.0, 5.0, 25.0)
_FIRST_CODE_OF_SIGNAL = 129  # the watchdog's exit code is 128 + n if signal n ended the evaluator


class _EvaluatorState(enum.Enum):
    # The evaluator was not started or has been ended, because no call of fit has validation data.
    IDLE = enum.auto()
    STARTED = enum.auto()
    PAUSED = enum.auto()  # a signal killed the evaluator, which waits for its restart
    FAILED = enum.auto()  # the evaluator ended with an error and is not started again


class ScriptEvaluator:
    """Starts, watches and ends the evaluator process of a script's run.

    Args:
        run: Settings of the training run, whose directory records the script that `thinwire run`
            started.
        clock: Function that returns monotonic time in seconds.
    """

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._output = run.run_dir / "logs" / "evaluator.out"
        self._input = StandardInput(
            run.run_dir
        )  # the standard input is passed on to the evaluator; the Supervisor does not read it
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._copy: OutputFile | None = None
        self._last_output = b""
        self._state = _EvaluatorState.IDLE
        # Number of all starts of the evaluator, and of its restarts after a signal.
        self._num_starts = self._num_restarts = 0
        # Time of the evaluator's restart in the state PAUSED, in seconds of the clock.
        self._restart_at = 0.0
        self._script: list[str] = []  # path and command-line arguments of the user's script
        record = launched_with(run.run_dir)
        # Start time 0 means unknown, so that the script keeps all files.
        began = float(record.get("began", 0.0))
        self._folder, self._more_flags = "", [EVALUATES, f"{RUN_BEGAN}{began}"]
        try:
            script = record["script"]
            self._path, module = str(script["path"]), str(script.get("module", ""))
            self._script = module_words(module, self._path, [*map(str, script["arguments"])])
            self._folder = str(script["folder"])
            is_copied = any(str(word).startswith("--sync_dst_dir=") for word in record["flags"])
            if is_copied and not module:
                self._more_flags.append(IN_SCRIPT_FOLDER)
        except (KeyError, TypeError):
            script_path = os.environ.get(SCRIPT_VARIABLE)
            self._script = [os.path.abspath(script_path)] if script_path else []
            self._path = "".join(self._script)

    @property
    def why_not(self) -> str:
        """Reason why no evaluator can be started; empty if an evaluator can be started."""
        if not self._script:
            return (
                f"{self._run.run_dir} names no script, because `thinwire run` has not run in this "
                f"directory; expected the script's path in {SCRIPT_VARIABLE}"
            )
        if not pathlib.Path(self._path).is_file():
            return f"the script {self._path} does not exist any more"
        return (
            "the evaluator has ended with an error" if self._state is _EvaluatorState.FAILED else ""
        )

    @property
    def is_running(self) -> bool:
        """True if the evaluator process runs or will be started again after a pause."""
        return self._state is _EvaluatorState.PAUSED or self.is_alive

    @property
    def is_alive(self) -> bool:
        """True if the evaluator process runs now."""
        process = self._process
        return (
            self._state is _EvaluatorState.STARTED
            and process is not None
            and process.poll() is None
        )

    def start(self) -> None:
        """Start the evaluator process if none runs and one can be started."""
        if self._state is _EvaluatorState.IDLE and not self.why_not:
            self._start()

    def dismiss(self) -> None:
        """End the evaluator because there is nothing to evaluate; `start` can start it again."""
        if self._state in (_EvaluatorState.STARTED, _EvaluatorState.PAUSED):
            logging.info("no call of fit has validation data yet: ending the evaluator process")
            self.end(_TERMINATE)
            self._state = _EvaluatorState.IDLE

    def _start(self) -> None:
        self._output.parent.mkdir(parents=True, exist_ok=True)
        words = [*supervisor_flags.script_words(self._run), *self._more_flags]
        launcher = _package() / "launcher"
        opened = self._input.open()
        passed = () if opened is None else (opened,)
        watchdog = ["-I", str(launcher / "watchdog.py"), "inf", "10", "quiet"]
        watchdog += [f"--input=fd:{descriptor}" for descriptor in passed]
        script = [sys.executable, "-P", str(launcher / "script.py"), *words, "--", *self._script]
        environment = {name: text for name, text in os.environ.items() if name != "TF_CONFIG"}
        self._copy = OutputFile(self._output, append=bool(self._num_starts))
        process = subprocess.Popen(
            [sys.executable, *watchdog, *script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C must not reach the evaluator
            cwd=self._folder if os.path.isdir(self._folder) else None,
            env=environment,
            pass_fds=passed,
        )
        for descriptor in passed:
            os.close(descriptor)
        self._process = process
        # A thread copies the script's output to the log file. If the script wrote to the file
        # directly, `print` would raise an error in the script on a full disk.
        self._reader = threading.Thread(
            target=self._follow, args=(process, self._copy), name="evaluator-output", daemon=True
        )
        self._reader.start()
        self._state, self._num_starts = _EvaluatorState.STARTED, self._num_starts + 1
        logging.info("started the evaluator process, whose output is in %s", self._output)

    def tend(self) -> str:
        """Restart the evaluator after a pause if a signal killed it; the Supervisor calls this
        regularly.

        Returns:
            Error message in the first call after the evaluator has ended for good; an empty string
            in all other calls.
        """
        process = self._process
        if process is None or self._state in (_EvaluatorState.IDLE, _EvaluatorState.FAILED):
            return ""
        if self._state is _EvaluatorState.PAUSED:
            if self._clock() >= self._restart_at:
                self._num_restarts += 1
                self.end()  # the call closes the pipes of the killed evaluator
                self._start()
            return ""
        code = process.poll()
        if not code:
            return ""
        ended = f"the evaluator has ended with exit code {code}"
        if _is_of_signal(code) and self._num_restarts < len(_PAUSES_SECONDS) and not self.why_not:
            pause = _PAUSES_SECONDS[self._num_restarts]
            logging.warning("%s; starting the evaluator process again in %g s", ended, pause)
            self._state, self._restart_at = _EvaluatorState.PAUSED, self._clock() + pause
            return ""
        self._state = _EvaluatorState.FAILED
        restarts = f" (started again {self._num_restarts} times)" if self._num_restarts else ""
        return f"{ended}{restarts}: {self._last_line()}"

    def end(self, signal: bytes = _KILL) -> None:
        """End the evaluator: kill it, or send SIGTERM so that it can remove its temporary files."""
        process = self._process
        if process is None or process.stdin is None or process.stdin.closed:
            return
        with contextlib.suppress(OSError):
            os.write(process.stdin.fileno(), signal)
        process.stdin.close()
        deadline = time.monotonic() + _END_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        if process.poll() is None:
            process.kill()
        process.wait()
        self._end_output()

    def _follow(self, process: subprocess.Popen[bytes], copy: OutputFile) -> None:
        """Copy the evaluator's output to its log file; store the last bytes for error messages."""
        with process.stdout or io.BytesIO() as stream:
            while output := os.read(stream.fileno(), _MOST_OUTPUT_BYTES):
                self._last_output = (self._last_output + output)[-_MOST_OUTPUT_BYTES:]
                copy.put(output, "evaluator")

    def _end_output(self) -> None:
        """Wait for the remaining output of an ended evaluator; log output that was lost."""
        copy, reader = self._copy, self._reader
        if copy is None or reader is None:
            return
        # The wait for the end of the output has a time limit, because a process that the script
        # started may hold the pipe open.
        reader.join(_END_SECONDS)
        copy.close()
        if report := copy.report():
            logging.warning("lost output: %s", report)
        self._copy = self._reader = None

    def _last_line(self) -> str:
        """Return the evaluator's last output line, which names the exception after a traceback."""
        self._end_output()
        text = self._last_output.decode(errors="replace")
        lines: Sequence[str] = [line for line in text.splitlines() if line.strip()]
        return lines[-1].strip() if lines else "the evaluator has written no output"


def _is_of_signal(code: int) -> bool:
    """Return True if an exit code means that a signal ended the evaluator or its watchdog."""
    return code < 0 or code >= _FIRST_CODE_OF_SIGNAL


def _package() -> pathlib.Path:
    """Return the folder of the package thinwire without importing its launcher."""
    spec = importlib.util.find_spec("thinwire")
    # The condition is impossible, because this module belongs to the package thinwire.
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("thinwire")
    return pathlib.Path(spec.origin).resolve().parent
