"""Kubernetes manifests: accepted by the API schema, correct content, working commands."""

import base64
import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from tests.nodes import MAIN, free_port
from tests.waiting import wait_until
from thinwire.tools import manifests

KINDS = ["Secret", "Service", "StatefulSet", "PersistentVolumeClaim", "Job", "Job"]


@pytest.fixture
def made(capsys):
    """Return the objects of a command line."""

    def make(*words):
        assert manifests.main(["kubernetes", "--image", "registry/mine:3", *words]) == 0
        return list(yaml.safe_load_all(capsys.readouterr().out))

    return make


@pytest.fixture
def certificates(tmp_path):
    nodes = ("ps-0", "worker-1", "worker-2", "supervisor-0")
    for name in (
        "ca.crt",
        "ca.key",
        *(f"{node}.{kind}" for node in nodes for kind in ("crt", "key")),
    ):
        (tmp_path / name).write_text(f"this is {name}")
    return str(tmp_path)


def container(document):
    return document["spec"]["template"]["spec"]["containers"][0]


def environment(document):
    return {each["name"]: each.get("value") for each in container(document)["env"]}


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--name", "mine", "--workers", "8", "--shards", "3", "--gpus", "1"),
        ("--storage", "1Ti", "--storage_class", "fast", "--flags=--lease_seconds=30"),
    ],
    ids=str,
)
def test_the_api_accepts_them(made, words):
    found = made(*words)
    assert [each["kind"] for each in found] == KINDS
    for document in found:
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_the_api_accepts_those_with_certificates(made, certificates):
    found = made("--certificates", certificates)
    assert [each["kind"] for each in found] == ["Secret", "Secret", *KINDS]
    for document in found:
        kubernetes_validate.validate(document, "1.31", strict=True)
    secrets = {each["metadata"]["name"]: each["data"] for each in found[:3]}
    assert set(secrets["thinwire-worker"]) == {
        *("ca.crt", "worker-1.crt", "worker-1.key", "worker-2.crt", "worker-2.key"),
    }
    assert "ca.key" not in {name for data in secrets.values() for name in data}
    assert base64.b64decode(secrets["thinwire-ps"]["ps-0.key"]) == b"this is ps-0.key"
    assert "--tls_cert=/etc/thinwire/{node}.crt" in environment(found[-1])["THINWIRE_FLAGS"]
    mounts = {each["name"]: each["mountPath"] for each in container(found[-1])["volumeMounts"]}
    assert mounts["certificates"] == "/etc/thinwire"


def test_workers_find_all_shards(made):
    *_, service, shards, _, supervisor, workers = made("--shards", "2", "--workers", "3")
    addresses = "thinwire-ps-0.thinwire-ps:2223,thinwire-ps-1.thinwire-ps:2223"
    found = environment(workers)
    assert (found["THINWIRE_PS"], found["THINWIRE_NB_WORKERS"]) == (addresses, "3")
    for document in (shards, supervisor):
        assert f"--ps_hosts={addresses}" in container(document)["command"]
    assert service["metadata"]["name"] == shards["spec"]["serviceName"] == "thinwire-ps"
    assert service["spec"]["selector"] == shards["spec"]["template"]["metadata"]["labels"]
    assert (workers["spec"]["completions"], workers["spec"]["parallelism"]) == (3, 3)


def test_flags_reach_every_node(made):
    _, _, shards, _, supervisor, workers = made("--method", "dgs", "--flags=--compression_rate=0.1")
    for document in (shards, supervisor):
        assert {"--method=dgs", "--compression_rate=0.1"} <= set(container(document)["command"])
    assert "--method=dgs --compression_rate=0.1" in environment(workers)["THINWIRE_FLAGS"]


def test_a_new_token_each_time_or_that_of_a_file(made, tmp_path):
    assert made()[0]["stringData"] != made()[0]["stringData"]
    (tmp_path / "token").write_text("sixteen bytes or more\n")
    found = made("--token_file", str(tmp_path / "token"))
    assert found[0]["stringData"] == {"token": "sixteen bytes or more"}


def test_an_empty_token_file_is_refused(capsys, tmp_path):
    (tmp_path / "token").write_text("\n")
    words = ["kubernetes", "--image", "x", "--token_file", str(tmp_path / "token")]
    assert manifests.main(words) == 2
    assert "token is empty; expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--name", "Mine"), "--name=Mine"),
        (("--flags='",), "quotation"),
        (("--workers", "0"), "--workers=0"),
        (("--flags=--run_dir=x",), "--run_dir=x"),
        (("--flags=dgs",), "dgs: expected a --flag=value"),
        (("--certificates", "/nowhere"), "ca.crt"),
        (("--token_file", "/nowhere"), "/nowhere"),
    ],
)
def test_refusals(capsys, words, said):
    assert manifests.main(["kubernetes", "--image", "x", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        *("$name ${x} $$ $(SHARD)", 'x: "y" #', "'", "\\ud83d\\", "- z\n  # with gpus", "a, b]}"),
        *("null", "1e3", "0o7", "yes", "", "{node}", "ä\u2028\x85\x7f\t\U0001f600"),
    ],
)
def test_values_come_out_as_they_were_given(made, tmp_path, text):
    (tmp_path / "token").write_text(f"a{text}b")
    found = made(
        *("--token_file", str(tmp_path / "token"), "--image", text, "--script", text),
        *("--cpus", text, "--memory", text, "--storage", text, "--storage_class", f"a{text}b"),
        f"--flags=--odd={shlex.quote(text)}",
    )
    assert [each["kind"] for each in found] == KINDS
    secret, _, shards, claim, supervisor, workers = found
    assert secret["stringData"] == {"token": f"a{text}b"}
    for document in (shards, supervisor, workers):
        assert container(document)["image"] == text
        assert container(document)["resources"] == {
            "requests": {"cpu": text, "memory": text},
            "limits": {"memory": text},
        }
    (template,) = shards["spec"]["volumeClaimTemplates"]
    for spec in (claim["spec"], template["spec"]):
        assert spec["resources"] == {"requests": {"storage": text}}
        assert spec["storageClassName"] == f"a{text}b"
    assert container(workers)["command"] == ["python", text]
    assert environment(supervisor)["THINWIRE_SCRIPT"] == text
    for document in (shards, supervisor):
        assert container(document)["command"][-1] == f"--odd={text}"
    assert shlex.split(environment(workers)["THINWIRE_FLAGS"])[-1] == f"--odd={text}"


def test_each_part_of_the_template_is_only_where_it_belongs(made, certificates):
    plain, secure = made(), made("--certificates", certificates, "--gpus", "2")
    (template,) = plain[2]["spec"]["volumeClaimTemplates"]
    assert "storageClassName" not in {**plain[3]["spec"], **template["spec"]}
    assert container(plain[-1])["resources"]["limits"] == {"memory": "4Gi"}
    assert container(secure[-1])["resources"]["limits"] == {"memory": "4Gi", "nvidia.com/gpu": "2"}
    probes = [container(each)["readinessProbe"] for each in (plain[2], secure[4])]
    assert [set(each) - {"periodSeconds", "timeoutSeconds"} for each in probes] == [
        {"grpc"},
        {"tcpSocket"},
    ]
    for found, has_token in ((plain, True), (secure, False)):
        for document in (found[-4], found[-2], found[-1]):
            assert ("THINWIRE_TOKEN" in environment(document)) == has_token
            volumes = document["spec"]["template"]["spec"].get("volumes", [])
            names = {"certificates"} & {each["name"] for each in volumes}
            mounted = {
                each["name"]: each["mountPath"] for each in container(document)["volumeMounts"]
            }
            assert bool(names) == ("certificates" in mounted) == (not has_token)
            own = container(document)["command"] + environment(found[-1])["THINWIRE_FLAGS"].split()
            (run_dir,) = {each for each in own if each.startswith("--run_dir=")}
            assert run_dir == f"--run_dir={mounted['run']}/run"


SCRIPT = """
import keras
import numpy as np

import thinwire

x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model = thinwire.distribute(model)
model.fit(x, x.sum(1), batch_size=32, epochs=3, validation_data=(x, x.sum(1)), verbose=0)
print("worker", thinwire.worker_id(), "of", thinwire.num_workers())
"""


@pytest.mark.processes
@pytest.mark.product
@pytest.mark.timeout(240)
def test_their_commands_run(made, tmp_path):
    """The commands run as in the pods; the PS's name leads to this machine."""
    port = free_port()
    secret, _, shards, _, supervisor, workers = made(
        *("--port", str(port), "--method", "asgd", "--flags=--iter_max=6")
    )
    (tmp_path / "train.py").write_text(SCRIPT)
    started = []
    try:
        for document, more in (
            (shards, {"SHARD": "0"}),
            (supervisor, {}),
            (workers, {"JOB_COMPLETION_INDEX": "0"}),
            (workers, {"JOB_COMPLETION_INDEX": "1"}),
        ):
            started.append(start(document, more, secret["stringData"]["token"], tmp_path))
        outputs = [process.communicate(timeout=150)[0] for process in started[1:]]
        server = started[0]
        for _ in range(2):  # a finished PS stays, also where it is started again
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise AssertionError(server.communicate(timeout=4)[0])
            await_listener(port)
            server.terminate()
            assert server.wait(30) == 0
            server = start(shards, {"SHARD": "0"}, secret["stringData"]["token"], tmp_path)
            started.append(server)
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started[:4]] == [0, 0, 0, 0], outputs
    assert ["worker 1 of 2" in outputs[1], "worker 2 of 2" in outputs[2]] == [True, True]
    records = (tmp_path / "supervisor" / "run" / "metrics.jsonl").read_text()
    assert '"kind":"eval"' in records, "the Supervisor's pod has an evaluator"
    summary = json.loads((tmp_path / "supervisor" / "run" / "summary.json").read_text())
    assert (summary["method"], summary["nb_workers"], summary["updates"]) == ("asgd", 2, 6)


def await_listener(port):
    """Wait until the port is open, as a probe does."""

    def is_open():
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return True
        return False

    wait_until(is_open, 60, f"a listener at port {port}", 0.1)


def start(document, more, token, folder):
    """Start a container's command; environment, mounts and names belong to the test."""
    own = container(document)
    mounted = folder / own["name"]

    def here(text):
        text = text.replace("/var/lib/thinwire", str(mounted))
        text = text.replace("thinwire-ps-0.thinwire-ps:", "127.0.0.1:")
        return re.sub(r"\$\((\w+)\)", lambda found: more[found[1]], text)

    program, *words = map(here, own["command"])
    python = {"thinwire": [sys.executable, str(MAIN)], "python": [sys.executable]}[program]
    if program == "thinwire":
        words[0] = {"ps": "--type_node=PS", "supervisor": "--type_node=Supervisor"}[words[0]]
    variables = {name: here(value) for name, value in environment(document).items() if value}
    return subprocess.Popen(
        [*python, *words],
        cwd=folder,
        env={
            **{"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(MAIN.parent)},
            **{"THINWIRE_TOKEN": token, "CUDA_VISIBLE_DEVICES": "-1"},
            **variables,
            **more,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


DOCKERFILE = (MAIN.parent / "Dockerfile").read_text()


def instructions():
    """Return the Dockerfile's instructions with their arguments."""
    lines = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines()]


def test_the_image_has_the_pinned_requirements_and_no_root():
    found = instructions()
    assert found[0] == ("FROM", "python:3.11-slim-bookworm")
    runs = " ".join(words for name, words in found if name == "RUN")
    assert "--requirement requirements.txt" in runs
    assert "install --no-deps --no-build-isolation ." in runs
    names = [name for name, _ in found]
    (user,) = (words for name, words in found if name == "USER")
    assert user == "1000" and names.index("USER") > max(
        at for at, name in enumerate(names) if name == "RUN"
    )


def test_the_image_s_health_check_runs():
    """Nothing is looked at where no address is given, and a PS that is not there is no success."""
    (check,) = (words for name, words in instructions() if name == "HEALTHCHECK")
    command = json.loads(check.partition("CMD ")[2])
    folder = shutil.which("thinwire", path=os.path.dirname(sys.executable))
    path = f"{os.path.dirname(folder or sys.executable)}:{os.environ['PATH']}"
    for address, code in (("", 0), (f"127.0.0.1:{free_port()}", 1)):
        environment = {**os.environ, "PATH": path, "THINWIRE_HEALTH": address}
        assert subprocess.run(command, env=environment, check=False).returncode == code
