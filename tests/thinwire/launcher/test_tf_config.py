import json
import os
import subprocess

import pytest
from absl import flags

from tests.forked import forker
from tests.nodes import MAIN, TINY, free_port
from thinwire.launcher import tf_config
from thinwire.ops.types import ConfigurationError

CLUSTER = {"ps": ["p0:1", "10.0.0.2:2"], "worker": ["w0:1", "w1:1"]}


def config(kind=None, index=0, **cluster):
    task = {} if kind is None else {"task": {"type": kind, "index": index}}
    return json.dumps({"cluster": cluster or CLUSTER, **task})


def filled(text, *given):
    """Return the flags that matter here after a command line and TF_CONFIG."""
    values = flags.FlagValues()
    roles = ["PS", "Worker", "Supervisor", "Cluster", "Standalone"]
    flags.DEFINE_enum("type_node", "Worker", roles, "", flag_values=values)
    for name, default in (("nb_workers", 4), ("id_worker", 1), ("id_ps", 0), ("port", 2223)):
        flags.DEFINE_integer(name, default, "", flag_values=values)
    flags.DEFINE_string("ip_PS", "127.0.0.1", "", flag_values=values)
    flags.DEFINE_list("ps_hosts", [], "", flag_values=values)
    values(["main.py", *given])
    untouched = values.flag_values_dict()
    tf_config.fill(values, text)
    found = values.flag_values_dict()
    return {name: value for name, value in found.items() if value != untouched[name]}


ADDRESSES = {"ps_hosts": ["p0:1", "10.0.0.2:2"], "nb_workers": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("{}", {}),
        (config(), ADDRESSES),
        (config("worker", 1), ADDRESSES | {"id_worker": 2}),
        (config("worker", "1"), ADDRESSES | {"id_worker": 2}),
        (config("ps", 0), ADDRESSES | {"type_node": "PS", "ip_PS": "0.0.0.0"}),
        (config("ps", 1), ADDRESSES | {"type_node": "PS", "id_ps": 1, "ip_PS": "10.0.0.2"}),
        (config("evaluator", 0), ADDRESSES | {"type_node": "Supervisor"}),
        (
            config("worker", 1, chief=["c:1"], **CLUSTER),
            ADDRESSES | {"nb_workers": 3, "id_worker": 3},
        ),
        (config("chief", 0, chief=["c:1"], **CLUSTER), ADDRESSES | {"nb_workers": 3}),
        (config("ps", 0, ps=["127.0.0.1:7"]), {"type_node": "PS", "ps_hosts": ["127.0.0.1:7"]}),
    ],
)
def test_it_fills_what_flags_do_not_say(text, expected):
    assert filled(text) == expected


def test_flags_win():
    worker = config("worker", 1)
    assert filled(worker, "--id_worker=1") == ADDRESSES
    assert filled(worker, "--nb_workers=7") == {
        k: v for k, v in (ADDRESSES | {"id_worker": 2}).items() if k != "nb_workers"
    }
    assert filled(worker, "--ip_PS=1.2.3.4") == {"nb_workers": 2, "id_worker": 2}
    assert filled(worker, "--ps_hosts=a:1") == {"nb_workers": 2, "id_worker": 2}
    assert filled(worker, "--type_node=Supervisor") == ADDRESSES
    assert filled(config("ps", 1), "--ip_PS=1.2.3.4") == ADDRESSES | {"type_node": "PS", "id_ps": 1}
    assert filled(worker, "--type_node=Cluster") == {}
    assert filled("no json", "--type_node=Standalone") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["no JSON"]),
        ("[]", ["not an object"]),
        (json.dumps({"task": {"type": "ps", "index": 0}}), ["cluster is None"]),
        (config(boss=["a:1"]), ["'boss'", "evaluator"]),
        (config(ps="a:1"), ["ps is 'a:1'", "list"]),
        (config(ps=[1]), ["not a list of addresses"]),
        (config("boss"), ["'boss'", "worker"]),
        (config("worker", 2), ["worker 2", "2 of type worker"]),
        (config("worker", -1), ["-1"]),
        (config("worker", True), ["True"]),
        (config("chief"), ["chief 0", "0 of type chief"]),
        (config(chief=["a:1", "b:1"]), ["2 chiefs"]),
        (config("worker", 0, worker=["a:1"]), ["no ps"]),
        (json.dumps({"cluster": CLUSTER, "task": 3}), ["task is 3"]),
        (json.dumps({"cluster": CLUSTER, "rpc_layer": "grpc+verbs"}), ["grpc+verbs"]),
    ],
)
def test_what_cannot_be_read_is_refused(text, words):
    with pytest.raises(ConfigurationError) as refused:
        filled(text)
    assert all(word in str(refused.value) for word in ["TF_CONFIG", *words])


def run_main(folder, text, *given):
    done = subprocess.run(
        [forker().python, str(MAIN), f"--run_dir={folder}", *given],
        env=os.environ | {"TF_CONFIG": text},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.product
def test_a_real_node_takes_its_place(tmp_path):
    """Run as the second worker of a PS that was never started."""
    dead = f"127.0.0.1:{free_port()}"
    text = config("worker", 1, ps=[dead], worker=["here:1", "here:2"])
    code, output = run_main(tmp_path, text, "--reconnect_timeout_seconds=0.5", *TINY)
    assert code == 3, output
    assert f"--ps_hosts=['{dead}'], from TF_CONFIG" in output
    assert f"{dead}" in output.splitlines()[-1]
    assert "worker-2 E" in output.splitlines()[-1]


def test_a_bad_one_ends_a_node_at_once(tmp_path):
    code, output = run_main(tmp_path, "[")
    assert code == 2
    assert "TF_CONFIG: it is no JSON" in output
    assert len(output.splitlines()) == 1
