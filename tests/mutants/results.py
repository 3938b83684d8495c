"""Results of mutants, appended to a file, so that an interrupted run can be continued."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import threading
from collections.abc import Iterable

from tests.mutants import sources

FOLDER = sources.ROOT / "runs" / "mutants"

#: Stages in which a mutant can be killed, in order; the last stage means that no test killed it.
KILLERS, FOLDER_TESTS, LINES, SUITE, SURVIVED = "killers", "folder", "lines", "suite", "survived"
#: A mutant that changes no behaviour, so that no test can kill it.
EQUIVALENT = "equivalent"


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of one mutant."""

    key: str  # digest of all that the result depends on
    name: str
    area: str
    stage: str
    killer: str  # id of the test that failed first, or another sign; "" if nothing failed
    seconds: float


class Results:
    """The results in a file, by key. Threads may share it."""

    def __init__(self, path: pathlib.Path, fresh: bool = False) -> None:
        self.path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        self._by_key: dict[str, Result] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                if line.endswith("}"):  # not the half of a line at which a run was killed
                    result = Result(**json.loads(line))
                    self._by_key[result.key] = result

    def get(self, key: str) -> Result | None:
        """Return the result of a former run, if there is one."""
        return self._by_key.get(key)

    def add(self, result: Result) -> None:
        """Note a result, on disk too."""
        with self._lock:
            self._by_key[result.key] = result
            with self.path.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(result)) + "\n")


def digest(*texts: str | bytes) -> str:
    """Return a key that changes with each of the texts."""
    total = hashlib.sha256()
    for text in texts:
        content = text.encode() if isinstance(text, str) else text
        total.update(len(content).to_bytes(8, "little") + content)
    return total.hexdigest()[:24]


def digest_of_files(paths: Iterable[pathlib.Path]) -> str:
    """Return a key that changes with the content of files; a missing one counts as empty."""
    return digest(*(path.read_bytes() if path.is_file() else b"" for path in sorted(paths)))
