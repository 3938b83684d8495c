"""Bad input ends a process within seconds with one clear line and the documented exit code."""

import contextlib
import gzip
import shutil
import socket
import subprocess

import pytest

from tests.command_line import given
from tests.forked import MAIN, forker
from thinwire.data.loading import load_shard
from thinwire.flags.run import read_run
from thinwire.ops.types import ConfigurationError, ModelSpec, TensorSpec
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import frame
from thinwire.proto.grpc import GrpcServer
from thinwire.proto.grpc.session import ClientSession, RequestRejected
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.run.fingerprint import fingerprint

pytestmark = pytest.mark.timeout(200)


def run_main(*flags, cwd, seconds=40):
    done = subprocess.run(
        [forker().python, str(MAIN), *flags],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr.strip()


CLUSTER = ("--type_node=Cluster", "--port=0", "--dataset=synthetic")
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
    (["--model_from=worker"], 2, ["model_from=worker", "thinwire run"]),
    (["--id_worker=9", "--nb_workers=4"], 2, ["id_worker=9", "1..4"]),
    (["--link_loss=1"], 2, ["link_loss=1"]),
    (["--link_mbps=1,2,3"], 2, ["link_mbps", "3 values"]),
    (["--lr_schedule=0.5"], 2, ["lr_schedule", "0.5"]),
    (["--method=gsp", "--groups=1,2|2,3"], 2, ["groups", "exactly one group"]),
    (["--method=gsp", "--groups_file=missing.txt"], 2, ["groups_file", "missing.txt"]),
    (["--method=bsp", "--staleness_bound=2"], 2, ["staleness_bound=2", "--sync=bsp", "ssp"]),
    (["--data_dir=missing"], 2, ["data_dir", "missing"]),
    (["--data_dir=."], 2, ["data_dir=.", "empty"]),
    (["--run_dir=/dev/null/run"], 2, ["run_dir=/dev/null/run", "cannot be written"]),
    (["--partition=clas"], 1, ["partition", "clas", "dirichlet"]),
    (["--dirichlet_alpha=0"], 1, ["dirichlet_alpha", "0.0", "0.001"]),
    (["--dirichlet_alpha=1"], 2, ["dirichlet_alpha=1", "--partition=iid"]),
    (["--partition=file", "--no_block_shuffle"], 2, ["data_sharding_file", "--partition=file"]),
    (["--no_block_shuffle"], 2, ["no_block_shuffle", "--partition=class", "--partition=iid"]),
    (["--partition=file", "--data_sharding_file=absent"], 2, ["data_sharding_file", "absent"]),
    (
        ["--type_node=Supervisor", "--token_file=/dev/zero"],
        2,
        ["token_file", "regular file"],
    ),
    (["--method=gsp", "--groups_file=/dev/zero"], 2, ["groups_file", "regular file"]),
    (["--partition=file", "--data_sharding_file=/dev/zero"], 2, ["sharding_file", "regular file"]),
    (["--flagfile=/dev/zero"], 1, ["flagfile", "regular file"]),
    ([*CLUSTER, "--tls_cert=/dev/zero", "--tls_key=/dev/zero"], 2, ["tls_cert", "regular file"]),
    ([*CLUSTER, "--port=2222", "--hosts_file=/dev/zero"], 2, ["hosts_file", "regular file"]),
    pytest.param(
        [*CLUSTER, "--nb_ps=50", "--network=lenet"],
        2,
        ["nb_ps=50", "expected 1..10 shards"],
        marks=pytest.mark.product,
    ),
    (["--model=missing.py"], 2, ["model", "missing.py"]),
    (["--ps_hosts=nonsense"], 2, ["ps_hosts", "nonsense"]),
    (["--local_optimizer=sdg"], 1, ["local_optimizer", "sdg", "momentum"]),
    (["--local_lr=0"], 1, ["local_lr", "above 0"]),
    (["--local_opt_state=average"], 2, ["--local_opt_state", "--pacer=every", "--pacer=esync"]),
    (["--method=esync", "--local_optimizer=adam", "--local_momentum=0.5"], 2, ["local_momentum"]),
]


#: Each case is a process; errors of flags have separate tests.
SELDOM = [case for number, case in enumerate(AT_ONCE) if number % 3]


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        *AT_ONCE[::3],
        *(
            each if hasattr(each, "marks") else pytest.param(*each, marks=pytest.mark.product)
            for each in SELDOM
        ),
    ],
    ids=lambda v: str(v)[:40],
)
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


def damaged_sample(folder, change):
    """The shipped data, its training images changed; `change`: bytes of the .gz -> bytes."""
    shutil.copytree(MAIN.parent / "data" / "fashion_mnist_sample", folder)
    for file in folder.glob("train-images*"):
        file.write_bytes(change(file.read_bytes()))
    return f"--data_dir={folder}"


def test_data_that_cannot_be_used(tmp_path):
    """A corrupt file; a folder that holds something else; a batch larger than the shard."""
    corrupt = damaged_sample(tmp_path / "corrupt", lambda _: gzip.compress(b"not an idx file"))
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").write_text("not a data set")
    cases = [
        ([corrupt], "train-images"),
        ([f"--data_dir={tmp_path / 'letters'}"], "letters holds no train data"),
        (["--dataset=synthetic", "--batch_size=999999"], "batch_size.*999999"),
    ]
    for flags, words in cases:
        with given(*flags), pytest.raises(ConfigurationError, match=words):
            load_shard(read_run(), None, 1)


def test_what_a_worker_alone_can_notice(nodes):
    """All at the same time: no PS; a port that is no PS; a PS of another version; cut data."""
    message = "protocol_version: this PS speaks 9, the client 2"
    refusal = pb.Refusal(reason=pb.REASON_PROTOCOL_VERSION, message=message)

    def refuse(stream):
        for _ in stream.incoming():
            stream.send((frame(pb.ToClient(refusal=refusal)),))
            return

    here = ("--type_node=Worker", "--reconnect_timeout_seconds=2")
    cut = damaged_sample(nodes.folder / "cut", lambda data: data[: len(data) // 2])
    with socket.create_server(("127.0.0.1", 0)) as silent, contextlib.ExitStack() as at_end:
        silent_port = silent.getsockname()[1]
        server = GrpcServer("127.0.0.1", 0, refuse)
        at_end.callback(server.stop)

        def start(name, *flags):  # each is worker 1 of a separate run
            nodes.start(name, *flags, f"--run_dir={nodes.folder / name}-run")

        start("alone", *here)
        start("silent", *here, f"--port={silent_port}")
        start("version", "--type_node=Worker", f"--port={server.port}")
        start("cut", *here, "--dataset=fashion_mnist_sample", cut)
        ends_with(nodes, "alone", 3, str(nodes.port))
        ends_with(nodes, "silent", 3, str(silent_port))
        ends_with(nodes, "version", 4, message)
        ends_with(nodes, "cut", 2, "train-images", "cannot be read")


def test_what_a_ps_refuses(nodes):
    """Another model, another method, a taken id, a used port, a used run directory."""
    # The run does not wait for worker 1: adacomp starts with the present workers.
    nodes.common += ("--nb_workers=2", "--method=adacomp", "--iter_max=1000000", "--slowdown=50")
    other = ("--type_node=Worker", "--id_worker=2")
    nodes.start("ps", "--type_node=PS")
    nodes.worker(2)
    nodes.start("model", *other, "--network=cnn", f"--run_dir={nodes.folder / 'model'}-run")
    nodes.watch(lambda status: status.version > 5)
    nodes.start("taken", *other, f"--run_dir={nodes.folder / 'taken'}-run")
    nodes.start("port", "--type_node=PS", f"--run_dir={nodes.folder / 'other-ps'}")
    ends_with(nodes, "model", 4, "model differs")
    ends_with(nodes, "taken", 4, "--id_worker=2", "127.0.0.1")
    ends_with(nodes, "port", 2, str(nodes.port))
    says_hello_in_vain(nodes, "protocol_version", protocol_version=1)
    says_hello_in_vain(nodes, "codec.compression_rate.*0.01.*0.5", compression_rate="0.5")
    says_hello_in_vain(nodes, "id_worker=2", compression_rate="0.01")
    nodes.kill("ps")  # otherwise the lock would be the reason
    nodes.start("run_dir", "--type_node=PS", "--port=0", "--compression_rate=0.5")
    ends_with(nodes, "run_dir", 2, "--overwrite", "codec.compression_rate")


def says_hello_in_vain(nodes, words, compression_rate="0.01", **fields):
    """Send a Hello as worker 2, with the settings that the PS has written for the run."""
    saved = Checkpoints.in_folder(nodes.run_dir / "checkpoints" / "ps-0").load_latest()[1]
    with given("--type_node=Worker", *nodes.common):
        settings = dict(fingerprint(read_run()))
    settings["codec.compression_rate"] = compression_rate
    tensors = [TensorSpec(path, tuple(shape), dtype) for path, shape, dtype in saved["model"]]
    hello = {
        "protocol_version": messages.PROTOCOL_VERSION,
        "role": pb.ROLE_WORKER,
        "id": 2,
        "num_shards": 1,
        "fingerprint": messages.settings_of(list(settings.items())),
        "model": messages.tensors_of(ModelSpec(tuple(tensors))),
    }
    with pytest.raises(RequestRejected, match=words):
        ClientSession(f"127.0.0.1:{nodes.port}", pb.Hello(**hello | fields), 1000).open(5.0)


@pytest.mark.product
def test_a_ps_binds_other_addresses_only_when_told(nodes):
    nodes.start("ps", "--type_node=PS", "--ip_PS=0.0.0.0")
    ends_with(nodes, "ps", 2, "--insecure", "0.0.0.0")


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


@pytest.mark.product
def test_a_run_that_only_makes_nan_ends_with_5(nodes):
    (nodes.folder / "nan_model.py").write_text(NAN_MODEL)
    nodes.cluster(1, "--method=asgd", f"--model={nodes.folder / 'nan_model.py'}")
    assert nodes.wait("worker-1") == 5, nodes.output("worker-1")
    assert nodes.wait("ps") == 5
    summary = nodes.summary()
    assert summary["stop_reason"] == "diverged"
    assert summary["updates"] == 0
    assert summary["rejected_pushes"]["non_finite"] > 50


@pytest.mark.product
def test_own_model_from_the_examples(nodes):
    model = f"--model={MAIN.parent / 'examples' / 'own_model.py'}"
    nodes.cluster(1, "--iter_max=60", model, supervisor=True)
    for name in nodes.processes:
        assert nodes.wait(name) == 0, nodes.output(name)
    assert nodes.summary()["test_accuracy"] is not None
