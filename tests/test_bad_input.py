"""Bad input ends within seconds with one clear line and the documented exit code."""

import gzip
import shutil
import socket
import subprocess
import sys

import pytest

from proto import convert
from proto import thinwire_pb2 as pb
from proto.channel_grpc import serve
from proto.session import Refused, Session
from tests.nodes import MAIN

pytestmark = pytest.mark.timeout(200)


def run_main(*flags, cwd, seconds=40):
    done = subprocess.run(
        [sys.executable, str(MAIN), *flags], cwd=cwd, capture_output=True, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr.strip()


#: flags, exit code, words of the one line.
AT_ONCE = [
    (["--no_such_flag=1"], 1, ["no_such_flag"]),
    (["--method=adacmp"], 1, ["method", "adacmp", "adacomp"]),
    (["--type_node=Boss"], 1, ["type_node", "Boss"]),
    (["--compression_rate=0"], 1, ["compression_rate", "0"]),
    (["--compression_rate=-0.5"], 1, ["compression_rate", "-0.5"]),
    (["--compression_rate=nan"], 1, ["compression_rate", "nan"]),
    (["--compression_rate=x"], 1, ["compression_rate", "x"]),
    (["--learning_rate=inf"], 1, ["learning_rate", "inf"]),
    (["--max_seconds=nan"], 1, ["max_seconds", "nan"]),
    (["--epochs=0"], 1, ["epochs"]),
    (["--nb_workers=0"], 1, ["nb_workers"]),
    (["--batch_size=0"], 1, ["batch_size"]),
    (["--device=gpu"], 1, ["device", "gpu:N"]),
    (["stray"], 1, ["stray"]),
    (["--id_worker=0"], 2, ["id_worker=0", "1..4"]),
    (["--id_worker=9", "--nb_workers=4"], 2, ["id_worker=9", "1..4"]),
    (["--link_loss=1"], 2, ["link_loss=1"]),
    (["--link_mbps=1,2,3"], 2, ["link_mbps", "3 values"]),
    (["--lr_schedule=0.5"], 2, ["lr_schedule", "0.5"]),
    (["--method=gsp", "--groups=1,2|2,3"], 2, ["groups", "exactly one group"]),
    (["--method=gsp", "--groups_file=missing.txt"], 2, ["groups_file", "missing.txt"]),
    (["--method=bsp", "--staleness_bound=2"], 2, ["staleness_bound=2", "no bound"]),
    (["--data_dir=missing"], 2, ["data_dir", "missing"]),
    (["--partition=clas"], 1, ["partition", "clas", "dirichlet"]),
    (["--dirichlet_alpha=0"], 1, ["dirichlet_alpha", "0.0", "0.001"]),
    (["--dirichlet_alpha=1"], 2, ["dirichlet_alpha=1", "--partition=iid"]),
    (["--partition=file", "--no_block_shuffle"], 2, ["data_sharding_file", "--partition=file"]),
    (["--no_block_shuffle"], 2, ["no_block_shuffle", "--partition=class", "--partition=iid"]),
    (["--partition=file", "--data_sharding_file=absent"], 2, ["data_sharding_file", "absent"]),
    (["--model=missing.py"], 2, ["model", "missing.py"]),
    (["--ps_hosts=nonsense"], 2, ["ps_hosts", "nonsense"]),
]


@pytest.mark.parametrize(("flags", "code", "words"), AT_ONCE, ids=lambda v: str(v)[:40])
def test_bad_flags(flags, code, words, tmp_path):
    got, line = run_main(*flags, "--reconnect_timeout_seconds=0.5", cwd=tmp_path)
    assert got == code, line
    assert len(line.splitlines()) == 1, line
    assert all(word in line for word in words), line


def ends_with(nodes, name, code, *words):
    assert nodes.wait(name, 120) == code, nodes.output(name)
    output = nodes.output(name)
    assert "Traceback" not in output
    errors = [line for line in output.splitlines() if " E " in line]
    assert len(errors) == 1, output
    assert all(word in errors[0] for word in words), errors[0]


def test_what_a_worker_alone_can_notice(nodes):
    """Unreachable PS; batch larger than the shard; a corrupt data file: all at the same time."""
    corrupt = nodes.folder / "corrupt"
    sample = MAIN.parent / "data" / "fashion_mnist_sample"
    shutil.copytree(sample, corrupt)
    for file in corrupt.glob("train-images*"):
        file.write_bytes(gzip.compress(b"not an idx file"))
    here = ("--type_node=Worker", "--reconnect_timeout_seconds=2")
    nodes.start("alone", *here)
    nodes.start("greedy", *here, "--batch_size=999999")
    nodes.start("corrupt", *here, "--dataset=fashion_mnist_sample", f"--data_dir={corrupt}")
    ends_with(nodes, "alone", 3, str(nodes.port))
    ends_with(nodes, "greedy", 2, "batch_size", "999999")
    ends_with(nodes, "corrupt", 2, "train-images")


def test_what_a_ps_refuses(nodes):
    """Another model, another method, a taken id, a used port, a used run directory."""
    nodes.cluster(2, "--method=adacomp", "--iter_max=1000000", "--slowdown=50")
    nodes.watch(lambda status: status.version > 5)
    worker = ("--type_node=Worker", "--id_worker=2", f"--run_dir={nodes.folder / 'other'}")
    nodes.start("model", *worker, "--network=cnn")
    nodes.start("method", *worker, "--compression_rate=0.5")
    nodes.start("taken", *worker)
    nodes.start("port", "--type_node=PS", f"--run_dir={nodes.folder / 'other-ps'}")
    nodes.start("run_dir", "--type_node=PS", "--port=0", "--compression_rate=0.5")
    ends_with(nodes, "model", 4, "model differs")
    ends_with(nodes, "method", 4, "codec.compression_rate", "0.01", "0.5")
    ends_with(nodes, "taken", 4, "--id_worker=2", "127.0.0.1")
    ends_with(nodes, "port", 2, str(nodes.port))
    ends_with(nodes, "run_dir", 2, "--overwrite", "codec.compression_rate")
    hello = pb.Hello(protocol_version=2, role=pb.ROLE_SUPERVISOR, num_shards=1)
    with pytest.raises(Refused, match="protocol_version"):
        Session(f"127.0.0.1:{nodes.port}", hello, 1000).open(5.0)


def test_a_ps_of_another_protocol_version(nodes):
    message = "protocol_version: this PS speaks 9, the client 1"
    refusal = pb.Refusal(reason=pb.REASON_PROTOCOL_VERSION, message=message)

    def refuse(stream):
        for _ in stream.incoming():
            stream.send((convert.frame(pb.ToClient(refusal=refusal)),))
            return

    server = serve("127.0.0.1", nodes.port, refuse, 4)
    try:
        nodes.start("worker", "--type_node=Worker")
        ends_with(nodes, "worker", 4, message)
    finally:
        server.stop()


def test_a_ps_binds_other_addresses_only_when_told(nodes):
    nodes.start("ps", "--type_node=PS", "--ip_PS=0.0.0.0")
    ends_with(nodes, "ps", 2, "--insecure", "0.0.0.0")


def test_a_port_that_is_no_ps(nodes):
    with socket.create_server(("127.0.0.1", nodes.port)):
        nodes.start("worker", "--type_node=Worker", "--reconnect_timeout_seconds=2")
        ends_with(nodes, "worker", 3, str(nodes.port))


NAN_MODEL = """
import keras
import numpy as np


def build_model():
    def loss(labels, outputs):
        return keras.ops.log(-1.0 - keras.ops.sum(outputs**2, axis=-1))

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="d")], name="nan")
    model.compile(loss=loss)
    return model


def load_data():
    x, y = np.ones((40, 4), np.float32), np.zeros(40, np.int32)
    return (x, y), (x, y)
"""


def test_a_run_that_only_makes_nan_ends_with_5(nodes):
    (nodes.folder / "nan_model.py").write_text(NAN_MODEL)
    nodes.cluster(1, "--method=asgd", f"--model={nodes.folder / 'nan_model.py'}")
    assert nodes.wait("worker-1") == 5, nodes.output("worker-1")
    assert nodes.wait("ps") == 5
    summary = nodes.summary()
    assert summary["stop_reason"] == "diverged"
    assert summary["updates"] == 0
    assert summary["rejected_pushes"]["non_finite"] > 50


def test_own_model_from_the_examples(nodes):
    nodes.start("cluster", "--type_node=Cluster", "--nb_workers=1", "--iter_max=60", "--port=0",
                f"--model={MAIN.parent / 'examples' / 'own_model.py'}")  # fmt: skip
    assert nodes.wait("cluster") == 0, nodes.output("cluster")
    assert nodes.summary()["test_accuracy"] is not None
