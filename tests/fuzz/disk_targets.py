"""Fuzz targets: damaged journals, checkpoints, metrics and logs, and those of other versions."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import shutil
import struct
import zlib
from typing import Any

import numpy as np

from tests.checkpoint_files import arrays_of, entries
from tests.fuzz.target import FOLDER, Reader, Target, joined
from tests.ps.journaled_run import JournaledRun
from tests.supervisor.samples import make_status, write_run
from tests.virtual.toy import method
from thinwire.ops.types import ConfigurationError
from thinwire.ps.core import events
from thinwire.ps.core.serialization import to_plain
from thinwire.ps.persistence import journal, journal_format
from thinwire.ps.persistence.journal_format import DamagedRecord
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.persistence.checkpoint_log import FORMAT_VERSION
from thinwire.runtime.persistence.state_format import manifest_bytes
from thinwire.runtime.run.directory import rounds_of
from thinwire.runtime.telemetry import predictions
from thinwire.supervisor import metrics_log
from thinwire.supervisor.metrics_log import read_lines
from thinwire.supervisor.report.writer import load_run
from thinwire.tools.esync import runs as measured_runs
from thinwire.tools.esync.format import read_mode

_BODY = struct.Struct("<dB")
_PART = "parts/one.bin"


# -- the journal ---------------------------------------------------------------------------------


@functools.cache
def _run() -> JournaledRun:
    """Return a run of two workers with a journal of a few events; callers only read the run."""
    chosen = method("adacomp", 2, compression_rate=0.25)
    made = JournaledRun(FOLDER.empty("run"), chosen, iter_max=1000)
    made.join_all()
    for _ in range(6):
        made.turn()
    for each in made.journals:
        each.close()
    return made


@functools.cache
def _records() -> tuple[bytes, ...]:
    """Return the bodies of its journal, the head first."""
    run = _run()
    (number,) = journal.numbers(run.folder / "0")
    data = journal.contents(journal.path_of(run.folder / "0", number))
    return tuple(bytes(body) for _, body in journal_format.bodies(data))


def record(data: bytes) -> None:
    """Read records: unchanged, or with corrected checksums."""
    source = Reader(data)
    if source.number() % 2:
        with contextlib.suppress(DamagedRecord):
            for _, body in journal_format.bodies(memoryview(source.rest())):
                _decode(body)
        return
    for body in source.pieces():
        _decode(memoryview(body))


def _decode(body: memoryview) -> None:
    with contextlib.suppress(DamagedRecord):
        event, now = _run().coders[0].decode(body)
        assert isinstance(now, float) and type(event).__module__ == events.__name__
    with contextlib.suppress(DamagedRecord):
        journal_format.content_of_head(body)


def _event(value: Any, now: float = 1.0) -> bytes:
    return _BODY.pack(now, 1) + json.dumps(value).encode()


def _record_seeds() -> list[bytes]:
    others = (
        events.WorkerAlive(1),
        events.WorkerDisconnected(1, 1000),
        events.Leave(1, 1000, "done"),
        events.Tick(),
        events.Query(1, 1000, 2, 1, 0.1, 0.0, 0.0),
        events.Stop("iter_max"),
        events.MembershipEpoch(3, (1,), True, events.GroupAssignment(3, ((1,), (2,)), {1: 4})),
    )
    bodies = [*_records(), *(_event(to_plain(each)) for each in others)]
    framed = b"".join(bytes(p) for body in _records() for p in journal_format.framed([body]))
    return [b"\1" + framed, *(b"\0" + joined([body]) for body in bodies)]


def journal_file(data: bytes) -> None:
    """Replay a journal with changed, missing, doubled or invented records."""
    source, run = Reader(data), _run()
    folder = FOLDER.empty("journal")
    (number,) = journal.numbers(run.folder / "0")
    known, bodies = _records(), []
    while source and len(bodies) < 40:
        kind = source.number()
        if kind < 200:
            bodies.append(known[kind % len(known)])
        elif kind < 240:
            body = bytearray(known[source.number() % len(known)])
            body[source.number(2) % len(body)] = source.number()
            bodies.append(bytes(body))
        else:
            bodies.append(source.piece())
    records = [b"".join(bytes(p) for p in journal_format.framed([body])) for body in bodies if body]
    journal.path_of(folder, number).write_bytes(journal._MAGIC + b"".join(records))
    come, _ = run.come_back(folder=folder)
    assert 0 <= come.num_records <= len(records)
    assert come.place.offset >= 0 and np.isfinite(come.core["model"]["theta"]).all()


def _journal_seeds() -> list[bytes]:
    whole = bytes(range(len(_records())))
    return [whole, whole + b"\xf0" + joined([_event(to_plain(events.Tick()))]), b"\0\xd0\1\x20\0"]


# -- checkpoints ---------------------------------------------------------------------------------


@functools.cache
def _checkpoint() -> tuple[bytes, bytes]:
    """Return log entry and arrays of a small checkpoint."""
    folder = FOLDER.empty("checkpoint")
    Checkpoints.in_folder(folder).save(
        3, {"a": np.arange(3), "b": [1, 2.5, None], "c": (b"xy", float("inf")), 4: np.float32(2)}
    )
    (entry,) = entries(folder)
    arrays, content = arrays_of(entry).read_bytes(), json.loads(entry.read_bytes())["content"]
    return manifest_bytes(content | _entry_fields(arrays)), arrays


def checkpoint(data: bytes) -> None:
    """Read a checkpoint; the checksum of its log entry is corrected if the entry is JSON."""
    source = Reader(data)
    mends, entry, arrays = source.number(), source.piece(), source.rest()
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        if mends & 1:
            content = _entry_fields(arrays) | json.loads(entry)["content"]
            _mend_arrays(content, arrays, mends)
            entry = manifest_bytes(content)
    place = FOLDER.path / "one"
    for name, written in (("log/000000001.json", entry), (_PART, arrays)):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(written)
    checkpoints = Checkpoints.in_folder(place)
    with contextlib.suppress(ConfigurationError):  # another format
        checkpoints.load_values()
        found = checkpoints.load_latest()
        if found is not None:
            assert isinstance(found[0], int) and isinstance(found[1], dict)


def _entry_fields(arrays: bytes) -> dict[str, Any]:
    """Return the fields of a log entry that do not depend on the state."""
    parts = [{"name": _PART, "bytes": len(arrays)}]
    return {"kind": "snapshot", "generation": -1, "token": "", "parts": parts}


def _mend_arrays(content: dict[str, Any], arrays: bytes, mends: int) -> None:
    if mends & 2:
        content |= {"format": FORMAT_VERSION, **_entry_fields(arrays)}
    for each in content["arrays"] if mends & 2 else ():
        size = int(np.prod(each["shape"])) * np.dtype(each["dtype"]).itemsize
        each["crc32"] = zlib.crc32(arrays[each["offset"] : each["offset"] + size])


def _checkpoint_seeds() -> list[bytes]:
    entry, arrays = _checkpoint()
    return [bytes([mends]) + joined([entry]) + arrays for mends in (0, 3)]


def saved(data: bytes) -> None:
    """Read small files of a run: the advice, and the marker of the run's end."""
    path = FOLDER.write("advice.json", data)
    with contextlib.suppress(ConfigurationError):
        predictions.load(path)
    with contextlib.suppress(ConfigurationError):
        measured_runs.final_accuracy(_folder_with("summary.json", data))


def _folder_with(name: str, content: bytes) -> pathlib.Path:
    FOLDER.path.joinpath("left").mkdir(exist_ok=True)
    FOLDER.write(f"left/{name}", content)
    return FOLDER.path / "left"


def _saved_seeds() -> list[bytes]:
    given = {
        "schema": 1,
        "proposal": 0,
        "predicted": [],
        "test_accuracy": 0.9,
        "machine": "x",
    }
    return [json.dumps(given).encode(), b'{"test_accuracy": null}', b"[" * 5000]


# -- files that the Supervisor reads back --------------------------------------------------------


def metrics_file(data: bytes) -> None:
    """Read a run's summary and metrics, as reports and a restarted Supervisor do."""
    source = Reader(data)
    summary, lines = source.piece(), source.rest()
    folder = _folder_with("summary.json", summary)
    path = FOLDER.write("left/metrics.jsonl", lines)
    found, num_bytes = read_lines(path)
    assert num_bytes <= len(lines) and all(isinstance(line, dict) for line in found)
    with contextlib.suppress(ConfigurationError):
        load_run(folder)
    with contextlib.suppress(ValueError):
        metrics_log.read_rounds(path)
    with contextlib.suppress(ConfigurationError):
        measured_runs.load(folder)
    shutil.rmtree(rounds_of(folder, 1).parent, ignore_errors=True)
    log = metrics_log.RoundsLog(folder)
    place = rounds_of(folder, 1)
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(lines)
    log.add(1, summary.decode(errors="replace"))
    log.add(1, '{"host":"h","device":"cpu","rank":0,"life":"l","columns":[],"rows":[]}')
    log.close()


def _metrics_seeds() -> list[bytes]:
    folder = write_run(FOLDER.empty("whole") / "run")
    summary, lines = ((folder / name).read_bytes() for name in ("summary.json", "metrics.jsonl"))
    short = b"".join(lines.splitlines(keepends=True)[:3])
    row = b'{"num_iters":1,"num_samples":8,"total_time":0.5,"time":{"encode":0.1}}\n'
    status = make_status(40).to_json().encode()
    return [joined([summary]) + short, joined([summary]) + row * 2, joined([b"{}"]) + status]


def esync_logs(data: bytes) -> None:
    """Import rounds in ESync's file format and draw their figures."""
    folder = FOLDER.empty("esync")
    device = folder / "host" / "cpu"
    device.mkdir(parents=True)
    for number, content in enumerate(Reader(data).pieces(), 1):
        (device / f"iter-{number}.txt").write_bytes(content)
        if number == 4:
            break
    with contextlib.suppress(ValueError):
        read_mode(folder)
    with contextlib.suppress(ConfigurationError):
        measured_runs.load(folder)


def _esync_seeds() -> list[bytes]:
    step = {"check ready": 0.1, "forward and backward": 0.5, "global update": 0.2}
    row = {
        "num_iters": 1,
        "num_samples": 8,
        "total_time": 1.5,
        "accuracy": 0.5,
        "time": {"0": step},
    }
    one = json.dumps(row).encode()
    two = json.dumps({**row, "num_iters": 2, "time": {"0": step, "1": step}}).encode()
    return [joined([one, two]), joined([b'{"time": {}}']), joined([b'{"time": {"x": {}}}'])]


TARGETS = {
    "record": Target("records of the journal", record, _record_seeds),
    "journal": Target("whole journals, replayed to a core", journal_file, _journal_seeds, 256),
    "checkpoint": Target("checkpoints", checkpoint, _checkpoint_seeds),
    "saved": Target("advice and summaries", saved, _saved_seeds),
    "metrics": Target("metrics.jsonl, summary.json, rounds", metrics_file, _metrics_seeds),
    "esync_logs": Target("ESync's own log files", esync_logs, _esync_seeds),
}
