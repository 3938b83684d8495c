"""The evaluator of a script's run: a child of the Supervisor that runs the script and never trains.

It is started with the run's other processes, because the script may clear a folder at its top; that
must happen before anybody trains. It is ended where the scripts train without validation data, and
started again when a fit has some. It ends with the Supervisor, however that ends: a watchdog sees
to it. One that was killed is started again, some times: shard 0 knows what is not evaluated yet.
What it writes is kept in the run directory's logs.
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

#: Names the script, relative to the current folder, where no `thinwire run` has recorded it.
SCRIPT_VARIABLE = "THINWIRE_SCRIPT"
_END_SECONDS = 5.0
_TERMINATE, _KILL = b"T", b"K"  # as the watchdog understands them
_MOST_OUTPUT_BYTES = 1 << 16
#: Before each new start of one that was killed; there are no more than these.
_PAUSES_SECONDS = (1.0, 5.0, 25.0)
_FIRST_CODE_OF_SIGNAL = 129  # the watchdog's exit code for signal n is 128 + n


class _EvaluatorState(enum.Enum):
    IDLE = enum.auto()  # not started, or ended because nothing was to be evaluated
    STARTED = enum.auto()
    PAUSED = enum.auto()  # killed by a signal, and to be started again
    FAILED = enum.auto()  # for good


class ScriptEvaluator:
    """Starts, watches and ends the evaluator.

    Args:
        run: The run's settings; what `thinwire run` was given lies in its directory.
        clock: Seconds.
    """

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._output = run.run_dir / "logs" / "evaluator.out"
        self._input = StandardInput(run.run_dir)  # this process reads none of it itself
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._copy: OutputFile | None = None
        self._last_output = b""
        self._state = _EvaluatorState.IDLE
        self._num_starts = self._num_restarts = 0  # all, and those after a signal
        self._restart_at = 0.0  # by the clock, where it was killed
        self._script: list[str] = []  # its path and its arguments
        found = launched_with(run.run_dir)
        began = float(found.get("began", 0.0))  # unknown: it then keeps all files
        self._folder, self._more_flags = "", [EVALUATES, f"{RUN_BEGAN}{began}"]
        try:
            script = found["script"]
            self._path, module = str(script["path"]), str(script.get("module", ""))
            self._script = module_words(module, self._path, [*map(str, script["arguments"])])
            self._folder = str(script["folder"])
            is_copied = any(str(word).startswith("--sync_dst_dir=") for word in found["flags"])
            if is_copied and not module:
                self._more_flags.append(IN_SCRIPT_FOLDER)
        except (KeyError, TypeError):
            given = os.environ.get(SCRIPT_VARIABLE)
            self._script = [os.path.abspath(given)] if given else []
            self._path = "".join(self._script)

    @property
    def why_not(self) -> str:
        """Why no evaluator can be started; empty: one can."""
        if not self._script:
            return (
                f"{self._run.run_dir} names no script, for `thinwire run` has not run there; "
                f"expected its path in {SCRIPT_VARIABLE}"
            )
        if not pathlib.Path(self._path).is_file():
            return f"the script {self._path} is not there any more"
        return "its evaluator has ended before" if self._state is _EvaluatorState.FAILED else ""

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended, or will be started again."""
        return self._state is _EvaluatorState.PAUSED or self.is_alive

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        process = self._process
        return (
            self._state is _EvaluatorState.STARTED
            and process is not None
            and process.poll() is None
        )

    def start(self) -> None:
        """Start it, unless it was started, or cannot be."""
        if self._state is _EvaluatorState.IDLE and not self.why_not:
            self._start()

    def dismiss(self) -> None:
        """End it where nothing is to be evaluated; `start` then starts it again."""
        if self._state in (_EvaluatorState.STARTED, _EvaluatorState.PAUSED):
            logging.info("nothing is to be evaluated yet; ending the evaluator")
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
            start_new_session=True,  # a terminal's Ctrl-C is the Supervisor's affair
            cwd=self._folder if os.path.isdir(self._folder) else None,
            env=environment,
            pass_fds=passed,
        )
        for descriptor in passed:
            os.close(descriptor)
        self._process = process
        # The script does not write the file itself: its `print` would raise on a full disk.
        self._reader = threading.Thread(
            target=self._follow, args=(process, self._copy), name="evaluator-output", daemon=True
        )
        self._reader.start()
        self._state, self._num_starts = _EvaluatorState.STARTED, self._num_starts + 1
        logging.info("started the evaluator; its output: %s", self._output)

    def tend(self) -> str:
        """Start it again, after a pause, if it was killed.

        Returns:
            Once, with what error it has ended for good; empty: with none, or not yet.
        """
        process = self._process
        if process is None or self._state in (_EvaluatorState.IDLE, _EvaluatorState.FAILED):
            return ""
        if self._state is _EvaluatorState.PAUSED:
            if self._clock() >= self._restart_at:
                self._num_restarts += 1
                self.end()  # closes what belongs to the old one
                self._start()
            return ""
        code = process.poll()
        if not code:
            return ""
        ended = f"the evaluator has ended with exit code {code}"
        if _is_of_signal(code) and self._num_restarts < len(_PAUSES_SECONDS) and not self.why_not:
            pause = _PAUSES_SECONDS[self._num_restarts]
            logging.warning("%s; starting it again in %g s", ended, pause)
            self._state, self._restart_at = _EvaluatorState.PAUSED, self._clock() + pause
            return ""
        self._state = _EvaluatorState.FAILED
        restarts = f" (started again {self._num_restarts} times)" if self._num_restarts else ""
        return f"{ended}{restarts}: {self._last_line()}"

    def end(self, signal: bytes = _KILL) -> None:
        """End it: immediately, or by a signal at which it removes its temporary files."""
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
        """Copy what the evaluator writes into its file, and keep the last of it for errors."""
        with process.stdout or io.BytesIO() as stream:
            while output := os.read(stream.fileno(), _MOST_OUTPUT_BYTES):
                self._last_output = (self._last_output + output)[-_MOST_OUTPUT_BYTES:]
                copy.put(output, "evaluator")

    def _end_output(self) -> None:
        """Wait for the last of the output of an evaluator that has ended; log what was lost."""
        copy, reader = self._copy, self._reader
        if copy is None or reader is None:
            return
        reader.join(_END_SECONDS)  # a process that the script has left behind may hold the pipe
        copy.close()
        if report := copy.report():
            logging.warning("lost output: %s", report)
        self._copy = self._reader = None

    def _last_line(self) -> str:
        """Return the last line of its output: of a traceback, the exception."""
        self._end_output()
        text = self._last_output.decode(errors="replace")
        lines: Sequence[str] = [line for line in text.splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it has written nothing"


def _is_of_signal(code: int) -> bool:
    """Return whether an exit code is that of a command, or a watchdog, that a signal has ended."""
    return code < 0 or code >= _FIRST_CODE_OF_SIGNAL


def _package() -> pathlib.Path:
    """Return the folder of the package, whose launcher is above this layer."""
    spec = importlib.util.find_spec("thinwire")
    if spec is None or spec.origin is None:  # it is what runs here
        raise ModuleNotFoundError("thinwire")
    return pathlib.Path(spec.origin).resolve().parent
