"""What nodes report of themselves, read with care: it comes from other machines."""

from __future__ import annotations

from typing import Any

from thinwire.ops.persistence.documents import parse_json
from thinwire.ops.routing.counters import SentCounts
from thinwire.ops.telemetry import run_status
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.wire.claims import MOST_COUNTED

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
        return {key: _whole(table) for key, table in tables.items()}
    except (ValueError, KeyError, AttributeError, TypeError):
        return {}


def _whole(table: dict[str, Any]) -> dict[str, int]:
    return {key: count for key, count in table.items() if type(count) is int and count >= 0}


def is_last(text: str) -> bool:
    """Return whether this is the last report of a following shard."""
    try:
        return parse_json(text)["is_last"] is True
    except (ValueError, KeyError, TypeError):
        return False
