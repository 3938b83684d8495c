"""Checks and reads the status reports that workers and other shards send, as untrusted input.

The functions with `check` in their name reject an ill-formed report when it arrives. The other
functions return an empty result for an ill-formed report, because a checkpoint of an earlier
version of Thinwire may hold such a report.
"""

from __future__ import annotations

from typing import Any

from thinwire.ops.routing.counters import SentCounts
from thinwire.proto.framing import Malformed
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.wire.claims import MOST_COUNTED
from thinwire.runtime.persistence.documents import check_plain, is_name, parse_json
from thinwire.runtime.telemetry import run_status

#: Fields of a worker's line in the run's status that the worker counts. The shard counts all other
#: fields of the line.
_OWN_FIELDS = (
    "bytes_up",
    "compute_seconds",
    "encode_seconds",
    "send_seconds",
    "wait_seconds",
    "steps_per_second",
    "non_finite",
    "restarts",
    "labels",
)


#: Size limit of the metrics document that a node sends, in bytes; a longer document is malformed.
MAX_DOCUMENT_BYTES = 256 << 10
#: Largest number of digits of a worker's id in a report.
_LONGEST_NUMBER = 18


def check_size(document: str) -> None:
    """Reject a report whose document is too long.

    Raises:
        Malformed: The document is longer than `MAX_DOCUMENT_BYTES`.
    """
    if len(document.encode()) > MAX_DOCUMENT_BYTES:
        raise Malformed(f"a client's report has {len(document)} characters, too many")


def check_worker(text: str) -> None:
    """Reject a worker's status report that a correct worker cannot have sent.

    Raises:
        Malformed: The status report is ill-formed; the error names the field, its value and the
            bounds.
    """
    try:
        report = run_status.WorkerMetrics.from_json(text)
    except ValueError as error:
        raise Malformed(f"report: {error}") from error
    for name in _OWN_FIELDS:
        value = getattr(report, name)
        values = value.values() if isinstance(value, dict) else [value]
        if any(not 0 <= number <= MOST_COUNTED for number in values):
            raise Malformed(f"report: {name} is {max(values)}; expected 0 to {MOST_COUNTED}")


def check_shard(text: str) -> None:
    """Reject a status report that no correct following shard (a shard other than 0) sends.

    Raises:
        Malformed: The status report is ill-formed; the error names the field, its value and the
            bounds.
    """
    try:
        document = parse_json(text)
        if not isinstance(document, dict):
            raise ValueError(f"the report's document is {document!a:.80}; expected a JSON object")
        check_plain(document, "report")
        _check_counts(document, "report")
        DatagramCounts.from_dict(document.get("datagrams", {}))
    except ValueError as error:
        raise Malformed(f"report: {error}") from error


def _check_counts(value: Any, where: str) -> None:
    """Reject an integer outside 0..`MOST_COUNTED` anywhere in a report's JSON document."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_counts(item, f"{where}.{key}")
    elif isinstance(value, list):
        for item in value:
            _check_counts(item, where)
    elif type(value) is int and not 0 <= value <= MOST_COUNTED:
        raise ValueError(f"count {where} is {value}; expected 0 to {MOST_COUNTED}")


def own_counters(text: str) -> dict[str, Any]:
    """Return the counters in a worker's report; {} if the report is ill-formed or out of bounds."""
    try:
        report = run_status.WorkerMetrics.from_json(text)
    except ValueError:
        return {}
    figures = {name: getattr(report, name) for name in _OWN_FIELDS}
    numbers = [*report.labels.values(), *(figures[name] for name in figures if name != "labels")]
    return figures if all(0 <= number <= MOST_COUNTED for number in numbers) else {}


def sent(text: str) -> SentCounts | None:
    """Return the counts of sent datagrams in a worker's report; None if the report has none."""
    try:
        return run_status.WorkerMetrics.from_json(text).datagrams
    except ValueError:
        return None


def received(text: str) -> DatagramCounts:
    """Return the counts of received datagrams in the report of a shard other than shard 0."""
    try:
        return DatagramCounts.from_dict(_entry(text, "datagrams"))
    except (ValueError, KeyError, TypeError):
        return DatagramCounts()


def counts(text: str, name: str) -> dict[str, int]:
    """Return the table of counts called `name` from the report of a shard other than shard 0."""
    return _whole(_entry(text, name))


def tables(text: str, name: str) -> dict[str, dict[str, int]]:
    """Return key -> table of counts, from the entry `name` of the report of a shard other than
    0.
    """
    tables = {key: table for key, table in _entry(text, name).items() if is_name(key)}
    is_whole = all(isinstance(table, dict) for table in tables.values())
    return {key: _whole(table) for key, table in tables.items()} if is_whole else {}


def _entry(text: str, name: str) -> dict[str, Any]:
    """Return a table in a report of a shard; {} if the report is ill-formed or has no such
    table.
    """
    try:
        entry = parse_json(text)[name]
    except (ValueError, KeyError, TypeError):
        return {}
    return entry if isinstance(entry, dict) else {}


def by_worker(text: str, name: str) -> dict[int, int]:
    """Return worker id -> count, from the entry `name` of the report of a shard other than 0."""
    return {
        int(worker): count
        for worker, count in counts(text, name).items()
        if worker.isascii() and worker.isdigit() and len(worker) <= _LONGEST_NUMBER
    }


def _whole(table: dict[str, Any]) -> dict[str, int]:
    return {
        key: count
        for key, count in table.items()
        if type(count) is int and 0 <= count <= MOST_COUNTED and is_name(key)
    }


def is_last(text: str) -> bool:
    """Return whether a report is the last report that a shard other than shard 0 sends."""
    try:
        return parse_json(text)["is_last"] is True
    except (ValueError, KeyError, TypeError):
        return False
