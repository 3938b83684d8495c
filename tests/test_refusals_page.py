"""docs/guide/refusals.md explains every reason for which a shard rejects a client or a push."""

import collections
import re

from tests import documents
from thinwire.proto import thinwire_pb2 as pb

PAGE = documents.ROOT / "docs" / "guide" / "refusals.md"


def rows():
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"\| `[A-Z_]+` \|", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_reason_of_the_wire_has_one_row():
    reasons = collections.Counter(row[0].strip("`") for row in rows())
    expected = {name.removeprefix("REASON_") for name in pb.Reason.DESCRIPTOR.values_by_name}
    assert reasons == dict.fromkeys(expected, 1)


def test_every_row_has_what_is_seen_the_cause_and_the_way_out():
    for row in rows():
        assert len(row) == 4 and all(row), row


def test_the_keys_of_the_summary_are_those_that_shards_count():
    """Each `rejected_pushes.KEY` and `refused_peers.KEY` of the page stands in the code."""
    keys = set(re.findall(r"`(?:rejected_pushes|refused_peers)\.(\w+)`", PAGE.read_text()))
    assert len(keys) >= 10
    folders = ("ps", "proto", "ops", "worker")
    code = "".join(
        path.read_text() for name in folders for path in (documents.ROOT / name).rglob("*.py")
    )
    counted = {name.removeprefix("REASON_").lower() for name in pb.Reason.DESCRIPTOR.values_by_name}
    assert not [key for key in keys if f'"{key}"' not in code and key not in counted]
