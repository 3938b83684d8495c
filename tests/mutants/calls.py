"""Runs pytest and `make test` in a copy of the tree, through the copy's fork server."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

from tests.mutants.copies import Copy, CopyProblem
from tests.mutants.outcomes import FILE_VARIABLE

#: Arguments of the fork server: slow modules that no mutant can change.
LOADED = (
    *("numpy", "tensorflow", "keras", "hypothesis", "pytest"),
    *("_hypothesis_pytestplugin", "pytest_timeout"),
)
#: The tests of this package would fail on any mutant that changes the code of a record.
_WITHOUT_OWN_TESTS = "--ignore=tests/mutants"
_OPTIONS = (_WITHOUT_OWN_TESTS, "-p", "no:cacheprovider", "-p", "tests.mutants.outcomes")
_CODE_PASSED, _CODE_NOTHING_FOUND = 0, 5
#: Separate namespaces of processes and networks: a mutant may kill wrong processes, or set an
#: interface instead of reading it.
_ISOLATED = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "--net")


class ServerDied(RuntimeError):
    """The fork server of a copy has ended."""


@dataclasses.dataclass(frozen=True)
class Ending:
    """How one test ended."""

    test: str
    outcome: str  # passed, skipped, failed, or uncollected: its file could not be imported
    seconds: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a call ended."""

    code: int
    stopped: str  # "timeout" or "failure"; "" if the command ended without one
    seconds: float
    endings: tuple[Ending, ...]
    output: str

    @property
    def passed(self) -> bool:
        return not self.stopped and self.code in (_CODE_PASSED, _CODE_NOTHING_FOUND)

    @property
    def failed(self) -> tuple[str, ...]:
        """The tests that failed, in the order of their failures."""
        return tuple(dict.fromkeys(e.test for e in self.endings if e.outcome == "failed"))

    @property
    def killer(self) -> str:
        """The reason why a call did not pass, as reports show it."""
        if self.failed:
            return self.failed[0]
        if self.stopped == "timeout":
            return "timeout"
        uncollected = [ending.test for ending in self.endings if ending.outcome == "uncollected"]
        return f"cannot be imported: {uncollected[0]}" if uncollected else f"exit code {self.code}"


class Calls:
    """The fork server of a copy. A context manager; one call at a time."""

    def __init__(self, copy: Copy, loaded: Sequence[str] = LOADED) -> None:
        self.copy = copy
        self._scratch = tempfile.TemporaryDirectory(prefix="mutant-calls-")
        server = copy.folder / "tests" / "mutants" / "fork_server.py"
        self._process = subprocess.Popen(
            [*_isolation(), str(copy.python), str(server), *loaded],
            cwd=copy.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._is_closed = threading.Event()
        self._number = 0

    def __enter__(self) -> Calls:
        ready = self._reply()
        if not ready["ready"]:
            raise ServerDied(f"importing TensorFlow brings {ready['loaded']}: forks would break")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._scratch.cleanup()

    def close(self) -> None:
        """End the server and all that it started; a call that is under way fails."""
        self._is_closed.set()
        self._process.kill()
        self._process.wait()

    def pytest(self, *arguments: str, limit_seconds: float) -> Outcome:
        """Run pytest in a fork."""
        return self._call(None, ("-q", "-p", "no:xdist", *arguments), limit_seconds)

    def command(self, *words: str, limit_seconds: float, environment: dict[str, str]) -> Outcome:
        """Run another program, which runs pytest."""
        return self._call(words[0], words[1:], limit_seconds, environment)

    def suite(self, limit_seconds: float, ends_at_failure: bool) -> Outcome:
        """Run `make test`, to the end or to the first failure."""
        return self._call("make", ("test",), limit_seconds, ends_at_failure=ends_at_failure)

    def _call(
        self,
        program: str | None,
        arguments: Sequence[str],
        limit_seconds: float,
        environment: dict[str, str] | None = None,
        ends_at_failure: bool = False,
    ) -> Outcome:
        self._number += 1
        place = pathlib.Path(self._scratch.name) / str(self._number)
        output, report = place.with_suffix(".txt"), place.with_suffix(".jsonl")
        self._send(
            program=program,
            arguments=list(arguments),
            environment=(environment or {})
            | {FILE_VARIABLE: str(report), "PYTEST_ADDOPTS": " ".join(_OPTIONS)},
            output=str(output),
            report=str(report),
            limit_seconds=limit_seconds,
            ends_at_failure=ends_at_failure,
        )
        reply = self._reply()
        lines = report.read_text().splitlines() if report.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        for entry in entries:
            if "package" in entry and not self.copy.has(entry["package"]):
                raise CopyProblem(
                    f"the tests imported {entry['package']}, expected a file below"
                    f" {self.copy.folder}"
                )
        endings = tuple(
            Ending(entry["id"], entry["outcome"], entry["seconds"])
            for entry in entries
            if "id" in entry
        )
        text = output.read_text(errors="replace") if output.exists() else ""
        for file in (output, report):
            file.unlink(missing_ok=True)
        return Outcome(reply["code"], reply["stopped"], reply["seconds"], endings, text)

    def _send(self, **request: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ServerDied(self._why()) from error

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ServerDied(self._why())
        return dict(json.loads(line))

    def _why(self) -> str:
        if self._is_closed.is_set():
            return "the run was interrupted"
        return f"the fork server ended with code {self._process.wait()}; its errors are above"


def _isolation() -> tuple[str, ...]:
    """Return the command that isolates what follows it, or nothing where that is not allowed."""
    try:
        done = subprocess.run([*_ISOLATED, "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return ()
    return () if done.returncode else _ISOLATED
