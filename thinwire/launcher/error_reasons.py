"""Finds the one-line reason and the documented exit code of an error that ends a script.

Keras and TensorFlow surround an error raised in a model or within a `tf.function` with pages of
text, for example the arguments of each layer and the traceback of the graph. The module
`error_reasons` extracts an error's one-line reason from such pages of text. `thinwire run` shows
the reason as its last line (`thinwire.launcher.script`), and `exit_with_reason` shows it for a
script that a shell or another launcher has started.
"""

from __future__ import annotations

import itertools
import pathlib
import re
import sys
import sysconfig
import traceback
from types import TracebackType

from thinwire.launcher.failures import ESCAPES
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.settings import (
    EXIT_BAD_FLAG,
    EXIT_CONFIGURATION,
    EXIT_DIVERGED,
    EXIT_OF_STOP,
    EXIT_REFUSED,
    EXIT_UNREACHABLE,
    Diverged,
)
from thinwire.worker.script import RECORD, LeftBehind

#: (module, name) pairs of the exceptions that notify a user's script of the end of its run.
_ENDS = (("thinwire.worker.client.control", "RunHalted"), ("thinwire.script.steps", "RunOver"))
_PACKAGE = str(pathlib.Path(__file__).resolve().parents[1])
_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = sysconfig.get_paths()["stdlib"]
#: Matches the text of an error that Keras or AutoGraph raised to wrap the original error.
_REPLACED = re.compile(
    r"in user code:|Exception encountered when calling |Could not automatically infer the output "
)
#: Matches the lines of a TensorFlow graph error that do not contain the error's reason.
_OF_GRAPH = re.compile(
    r"\s*(Graph execution error:|Detected at node |<stack traces|File \"|\[\[\{\{node |"
    r"\d+ root error\(s\) found|\d+ (successful|derived))"
)
#: Prefix of a note that Thinwire adds to an error of the script, as `explain_batch` does.
_NOTE = "Thinwire: "
# Matches the number before each of several root errors in TensorFlow's text
_NUMBER = re.compile(r"^\s*\(\d+\) ")


def exit_code_of(error: BaseException) -> int | None:
    """Return the documented exit code of an error that Thinwire raised; None for other errors."""
    if stop_reason := stop_reason_of(error):
        return EXIT_OF_STOP.get(stop_reason, EXIT_BAD_FLAG)
    codes: dict[type[BaseException], int] = {
        ConfigurationError: EXIT_CONFIGURATION,
        Diverged: EXIT_DIVERGED,
        LeftBehind: EXIT_UNREACHABLE,
    }
    if "grpc" in sys.modules:
        from thinwire.proto import thinwire_pb2 as pb
        from thinwire.proto.grpc import Unreachable
        from thinwire.proto.grpc.session import RequestRejected

        # A worker stalled for longer than its lease, and the run went to a later phase without it.
        # The run continues; if the launcher starts the script again, the script catches up.
        if isinstance(error, RequestRejected) and error.reason == pb.REASON_PHASE:
            return EXIT_UNREACHABLE
        codes |= {Unreachable: EXIT_UNREACHABLE, RequestRejected: EXIT_REFUSED}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), None)


def stop_reason_of(error: BaseException) -> str:
    """Return the run's stop reason if an error reports the run's end; empty for other errors."""
    for module, name in _ENDS:
        # A module that is not imported cannot have raised its exception.
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(error, kind):
            return str(getattr(error, "cause", ""))
    return ""


def original_of(error: BaseException) -> BaseException:
    """Return the original error that an error of a library wraps, or `error` if there is none.

    TensorFlow's error of a training step hides the original error, which the step has recorded in
    `RECORD`. AutoGraph and Keras replace an error by a new error, whose text quotes the original
    error. Such an error's chain of `__cause__` and `__context__` leads to the original error.
    """
    error = RECORD.cause_of(error)
    passed = {id(error)}
    while _REPLACED.search(str(error)):
        cause = error.__cause__ or error.__context__
        if cause is None or id(cause) in passed or not _is_quoted(cause, error):
            break
        passed.add(id(cause))
        error = cause
    return error


def _is_quoted(cause: BaseException, error: BaseException) -> bool:
    return all(line.strip() in str(error) for line in str(cause).splitlines())


def reason_of(error: BaseException) -> str:
    """Return an error's text as one line, after the type's name if Thinwire did not raise it."""
    error = original_of(error)
    text = ESCAPES.sub("", str(error))
    if exit_code_of(error) is not None:
        return " ".join(text.split())
    lines = [line for line in text.splitlines() if line.strip() and not _OF_GRAPH.match(line)]
    name = type(error).__name__
    reason = f"{name}: {_NUMBER.sub('', lines[0]).strip()}" if lines else name
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE))
    return ". ".join([reason.rstrip("."), *notes])


def place_of(error: BaseException) -> str:
    """Return the script's line in an error's traceback, as ``file:line``, or an empty string.

    `place_of` returns the traceback's innermost line in the user's files before the script's first
    call into Thinwire.
    """
    frames = traceback.extract_tb(error.__traceback__)
    # The first frames belong to the part of Thinwire that runs the script
    after = itertools.dropwhile(_is_of_thinwire, frames)
    own = itertools.takewhile(lambda frame: not _is_of_thinwire(frame), after)
    places = [f"{each.filename}:{each.lineno}" for each in own if _is_of_script(each.filename)]
    return places[-1] if places else ""


def _is_of_thinwire(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_PACKAGE)


def _is_of_script(name: str) -> bool:
    is_generated = name.startswith("<") or "__autograph_generated" in name
    is_installed = _INSTALLED & {*pathlib.Path(name).parts} or name.startswith(_STANDARD)
    return not (is_generated or is_installed)


def exit_with_reason() -> None:
    """Make a script that runs without `thinwire run` end with its error's reason as last line.

    An error of Thinwire is written as one line to stderr, and the process exits with the error's
    documented exit code. An error of the script keeps its traceback. If the traceback of a script's
    error does not end with the reason, a last line repeats the reason.
    """
    before = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        code, reason = exit_code_of(original_of(error)), reason_of(error)
        if code is None:
            before(kind, error, trace)
            if not str(error).rstrip().endswith(reason.partition(": ")[2]):
                sys.stderr.write(f"{reason}\n")
            return
        place = place_of(error)
        sys.stderr.write(f"{place}: {reason}\n" if place else f"{reason}\n")
        # Python exits with the code of a SystemExit that `sys.excepthook` raises
        raise SystemExit(code)

    sys.excepthook = report
