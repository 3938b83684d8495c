"""The wire format does not change: golden bytes decode, and generated code fits the .proto."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.proto.samples import GOLDEN, samples
from thinwire.proto import peers_pb2 as peers
from thinwire.proto import thinwire_pb2 as pb

#: File name suffixes that the tools generate from one .proto file.
KINDS = (".py", ".pyi", "_grpc.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(samples()))
def test_golden_bytes_decode_and_encode_as_ever(name):
    expected = samples()[name]
    data = (GOLDEN / f"{name}.bin").read_bytes()
    assert type(expected).FromString(data) == expected
    assert expected.SerializeToString() == data


@pytest.mark.parametrize("envelope", [pb.ToServer, pb.ToClient, peers.ToPeer, peers.FromPeer])
def test_every_body_has_golden_bytes(envelope):
    bodies = {field.name for field in envelope.DESCRIPTOR.oneofs_by_name["body"].fields}
    assert bodies == {
        message.WhichOneof("body") for message in samples().values() if type(message) is envelope
    }


def test_no_golden_file_is_without_its_sample():
    assert {path.stem for path in GOLDEN.glob("*.bin")} == set(samples())


def test_generated_code_is_what_the_tools_make(tmp_path):
    pytest.importorskip("grpc_tools")
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        "-I.",
        *outputs,
        "thinwire/proto/thinwire.proto",
        "thinwire/proto/peers.proto",
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    for name in (f"{file}_pb2{kind}" for file in ("thinwire", "peers") for kind in KINDS):
        made = (tmp_path / "thinwire" / "proto" / name).read_text()
        assert made == (ROOT / "thinwire" / "proto" / name).read_text(), f"{name}: run `make proto`"
