"""The table of metrics in docs/reference/operations.md lists exactly the existing metrics."""

import re
import types

from tests import documents
from tests.ps.streams import Shard
from tests.ps.telemetry.test_instruments import instruments_of as shard_instruments
from tests.supervisor.test_instruments import STATUS, evaluation
from tests.worker.telemetry.test_instruments import part
from thinwire.ops.routing.counters import SentCounts
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.supervisor import instruments as supervisor_instruments
from thinwire.worker.telemetry import instruments as worker_instruments


def told():
    """Return every metric's Prometheus name, without the prefix."""
    shard = Shard("asgd")
    shard.server.journaled.journal = types.SimpleNamespace(
        num_records=0, num_bytes=0, bytes_since_snapshot=0
    )
    worker = part()
    worker.exchange.datagrams = SentCounts()
    instruments = [
        *shard_instruments(shard, lambda: DatagramCounts())[0].collect(),
        *worker_instruments.collect(worker),
        *supervisor_instruments.collect(STATUS, [evaluation(1, 0.5)]),
    ]
    return {
        instrument.name + "_total" * (instrument.kind == "counter") for instrument in instruments
    }


def test_the_table_names_what_nodes_tell():
    page = (documents.ROOT / "docs" / "reference/operations.md").read_text()
    rows = documents.rows(page, "metric (`thinwire_` before each)", "node", "labels and meaning")
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert {name for name in named if not name.startswith(("process_", "thinwire_"))} == (
        told() | {"node_info"}
    )
