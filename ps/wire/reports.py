"""What nodes report of themselves, read with care: it comes from other machines.

`check_worker` and `check_shard` reject a report where it arrives. The functions that read one take
nothing from an ill-formed document all the same: a checkpoint of an earlier version may hold it.
"""

from __future__ import annotations

from typing import Any

from thinwire.ops.routing.counters import SentCounts
from thinwire.proto.framing import Malformed
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.wire.claims import MOST_COUNTED
from thinwire.runtime.persistence.documents import check_plain, is_name, parse_json
from thinwire.runtime.telemetry import run_status

#: Fields a worker counts itself; the rest of its line is what the shard saw.
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


#: Digits of a worker's number in a report.
_LONGEST_NUMBER = 18


def check_worker(text: str) -> None:
    """Refuse a report that no worker can have made.

    Raises:
        Malformed: It names the field, its value and what was expected.
    """
    try:
        report = run_status.WorkerMetrics.from_json(text)
    except ValueError as error:
        raise Malformed(f"report: {error}") from error
    for name in _OWN_FIELDS:
        value = getattr(report, name)
        values = value.values() if isinstance(value, dict) else [value]
        if any(not 0 <= each <= MOST_COUNTED for each in values):
            raise Malformed(f"report: {name} is {max(values)}; expected 0 to {MOST_COUNTED}")


def check_shard(text: str) -> None:
    """Refuse a report that no following shard can have made.

    Raises:
        Malformed: It names the field, its value and what was expected.
    """
    try:
        document = parse_json(text)
        if not isinstance(document, dict):
            raise ValueError(f"it is {document!a:.80}; expected an object")
        check_plain(document, "report")
        _check_counts(document, "report")
        DatagramCounts.from_dict(document.get("datagrams", {}))
    except ValueError as error:
        raise Malformed(f"report: {error}") from error


def _check_counts(value: Any, where: str) -> None:
    """Refuse a whole number beyond what anything is counted to, anywhere in a document."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_counts(item, f"{where}.{key}")
    elif isinstance(value, list):
        for item in value:
            _check_counts(item, where)
    elif type(value) is int and not 0 <= value <= MOST_COUNTED:
        raise ValueError(f"{where} is {value}; expected 0 to {MOST_COUNTED}")


def own_counters(text: str) -> dict[str, Any]:
    """Take a worker's own figures from its report; what is ill-formed or impossible is nothing."""
    try:
        report = run_status.WorkerMetrics.from_json(text)
    except ValueError:
        return {}
    found = {name: getattr(report, name) for name in _OWN_FIELDS}
    numbers = [*report.labels.values(), *(found[name] for name in found if name != "labels")]
    return found if all(0 <= each <= MOST_COUNTED for each in numbers) else {}


def sent(text: str) -> SentCounts | None:
    """Take what a worker has sent in datagrams from its report."""
    try:
        return run_status.WorkerMetrics.from_json(text).datagrams
    except ValueError:
        return None


def received(text: str) -> DatagramCounts:
    """Take what came in datagrams from a following shard's report."""
    try:
        return DatagramCounts.from_dict(parse_json(text)["datagrams"])
    except (ValueError, KeyError, TypeError):
        return DatagramCounts()


def counts(text: str, name: str) -> dict[str, int]:
    """Take one table of counts from a following shard's report."""
    try:
        return _whole(parse_json(text)[name])
    except (ValueError, KeyError, AttributeError, TypeError):
        return {}


def tables(text: str, name: str) -> dict[str, dict[str, int]]:
    """Take several tables of counts from a following shard's report."""
    try:
        tables = parse_json(text)[name]
        return {key: _whole(table) for key, table in tables.items() if is_name(key)}
    except (ValueError, KeyError, AttributeError, TypeError):
        return {}


def by_worker(text: str, name: str) -> dict[int, int]:
    """Take a table of counts by worker from a following shard's report."""
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
    """Return whether this is the last report of a following shard."""
    try:
        return parse_json(text)["is_last"] is True
    except (ValueError, KeyError, TypeError):
        return False
