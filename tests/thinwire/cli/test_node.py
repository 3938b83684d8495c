"""A node's exit codes, and the lines of its log file."""

import errno
import logging as standard_logging
import re

import pytest

from tests.command_line import given
from thinwire.cli import node
from thinwire.flags.run import read_run
from thinwire.ops.types import ConfigurationError
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.proto.grpc import Unreachable
from thinwire.proto.grpc.session import RequestRejected


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "full"), 2),
        (OSError(errno.ENOENT, "missing"), None),
        (ConfigurationError("wrong"), 2),
        (Unreachable("nobody"), 3),
        (RequestRejected(pb.Refusal(reason=pb.REASON_MODEL)), 4),
        (RequestRejected(pb.Refusal(reason=pb.REASON_PHASE)), 3),
        (Malformed("no message"), 4),
        (ValueError("a bug"), None),
    ],
)
def test_expected_failures_have_their_codes(error, code):
    assert node._exit_code(error) == code


def test_lines_of_a_log_file_have_time_node_and_level(tmp_path):
    root = standard_logging.getLogger()
    before = list(root.handlers)
    with given(f"--run_dir={tmp_path}"):
        node._keep_log(read_run())
        try:
            root.error("something failed")
        finally:
            for handler in set(root.handlers) - set(before):
                root.removeHandler(handler)
                handler.close()
    (file,) = (tmp_path / "logs").glob("*.log")
    assert re.fullmatch(r"[-\d]+ [\d:,]+ worker-1 E something failed\n", file.read_text())
