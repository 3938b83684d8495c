"""The sources of a script's settings, and settings that contradict the launcher."""

import argparse
import json

import pytest

from tests.certificates import Papers
from thinwire.cli import help_text
from thinwire.ops.types import ConfigurationError, Kind
from thinwire.runtime.run.script_settings import EVALUATES, SETTINGS_VARIABLE, write_settings
from thinwire.script.settings import ALL_TOPICS, is_in_run, read_settings

WORDS = (
    "--type_node=Worker",
    "--model_from=worker",
    "--nb_workers=3",
    "--method=bsp",
    "--ps_hosts=127.0.0.1:7",
    "--id_worker=2",
    "--seed=5",
    "--log_level=warning",
)
STEP = {
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-09],x",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}
SCHEDULERS = ("TF_CONFIG", "THINWIRE_FLAGS", *STEP, "RANK", "WORLD_SIZE", "MASTER_ADDR")


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch):
    for name in (*SCHEDULERS, SETTINGS_VARIABLE, "JOB_COMPLETION_INDEX", "THINWIRE_PS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launched(tmp_path, monkeypatch):
    def write(*words):
        path = write_settings(
            tmp_path, "worker-2", [*WORDS, f"--run_dir={tmp_path}", *words], ["train.py"]
        )
        monkeypatch.setenv(SETTINGS_VARIABLE, str(path))
        return path

    return write


def read(args=None, **keywords):
    return read_settings(args, keywords, type_node="Worker")


def test_the_launcher_s_file_gives_a_worker_its_place(launched):
    launched()
    found = read()
    assert is_in_run(None, {}) and found.is_launched
    run = found.run
    assert (run.nb_workers, run.seed, run.addresses) == (3, 5, ("127.0.0.1:7",))
    assert found.worker().id_worker == 2 and run.model_is_offered
    assert run.method.choices["server_optimizer"] == "script"


def test_a_method_of_changes_steps_on_the_workers(launched):
    launched("--method=dgs")
    method = read().run.method
    assert method.kind is Kind.DELTA and method.local.brings_weights


def test_the_evaluator_has_the_supervisor_s_certificate(monkeypatch, tmp_path):
    papers = Papers()
    for name, issued in papers.by_name.items():
        papers.write(tmp_path, name, issued)
    own = f"--tls_cert={tmp_path}/{{node}}.crt", f"--tls_key={tmp_path}/{{node}}.key"
    words = [word for word in WORDS if not word.startswith(("--type_node", "--id_worker"))]
    words += [f"--run_dir={tmp_path}", *own, f"--tls_ca={tmp_path}/ca.crt", EVALUATES]
    path = write_settings(tmp_path, "evaluator", words, ["train.py"])
    monkeypatch.setenv(SETTINGS_VARIABLE, str(path))
    credentials = read().run.credentials
    assert credentials.certificate == (tmp_path / "supervisor-0.crt").read_bytes()


def test_a_script_takes_its_data_as_it_likes(launched):
    launched()
    assert read(shard="off", batch="worker").run.data.shard == "off"


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"method": "dgs"}, ["method=dgs", "--method=bsp"]),
        ({"shard": "auto"}, ["shard=auto", "--shard=off"]),
        ({"nb_workers": 2}, ["nb_workers=2", "--nb_workers=3"]),
        ({"id_worker": 1}, ["id_worker", "numbers the workers"]),
        ({"batch_size": 32}, ["batch_size"]),
        ({"learning_rate": 0.1}, ["learning_rate"]),
        ({"dataset": "mnist"}, ["dataset"]),
    ],
)
def test_what_contradicts_the_launcher_is_refused_with_both(launched, keywords, words):
    launched(*(["--shard=off"] if "shard" in keywords else []))
    with pytest.raises(ConfigurationError) as refused:
        read(**keywords)
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_script_may_repeat_the_launcher_and_add_what_is_its_own(launched):
    launched()
    found = read(method="BSP", nb_workers=3, clip_norm=2.5, measure="off")
    assert (found.worker().clip_norm, found.worker().measure) == (2.5, "off")


def test_a_script_s_own_arguments_are_its_own(launched):
    launched()
    own = argparse.Namespace(epochs=7, batch_size=64, learning_rate=0.5, seed=9, model="resnet")
    found = read(own)
    assert (found.run.epochs, found.run.seed) == (None, 5)


def test_a_file_that_others_may_read_is_refused(launched):
    launched().chmod(0o644)
    with pytest.raises(ConfigurationError, match="0600"):
        read()


@pytest.mark.parametrize("text", ["", "[]", '{"flags": 1, "script": []}', "{"])
def test_a_file_of_another_form_is_refused(launched, text):
    launched().write_text(text)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        is_in_run(None, {})


def test_a_missing_file_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv(SETTINGS_VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(ConfigurationError, match="gone"):
        read()


@pytest.mark.parametrize(
    ("environment", "worker", "workers", "address"),
    [
        (
            {**STEP, "SLURM_PROCID": "1"},
            2,
            4,
            "gpu07:2223",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"},
            1,
            2,
            "10.0.0.1:2223",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "THINWIRE_PS": "ps:9"},
            2,
            2,
            "ps:9",
        ),
        (
            {"JOB_COMPLETION_INDEX": "2", "THINWIRE_PS": "ps:9", "THINWIRE_NB_WORKERS": "3"},
            3,
            3,
            "ps:9",
        ),
        (
            {
                "TF_CONFIG": json.dumps(
                    {
                        "cluster": {"ps": ["ps:9"], "worker": ["a:1", "b:1"]},
                        "task": {"type": "worker", "index": 1},
                    }
                )
            },
            2,
            2,
            "ps:9",
        ),
    ],
)
def test_cluster_managers_give_a_worker_its_place(
    monkeypatch, environment, worker, workers, address
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = read()
    assert is_in_run(None, {}) and not found.is_launched
    assert (found.worker().id_worker, found.run.nb_workers) == (worker, workers)
    assert found.run.addresses == (address,) and found.run.model_is_offered


#: Variables that give a place, each with its name: none here has flags of a method.
GIVING_PLACES = {
    "TF_CONFIG": {
        "TF_CONFIG": '{"cluster": {"ps": ["a:1"], "worker": ["b:1", "c:1"]},'
        ' "task": {"type": "worker", "index": 1}}'
    },
    "Slurm": {**STEP, "SLURM_PROCID": "1"},
    "torchrun": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
    "THINWIRE_FLAGS": {},
}


@pytest.mark.parametrize("source", GIVING_PLACES)
def test_a_variable_gives_flags_wherever_the_place_comes_from(monkeypatch, source):
    words = "--method=dgs --compression_rate=0.3 --lease_seconds=7 --restart_workers=1 --device=cpu"
    for name, value in GIVING_PLACES[source].items():
        monkeypatch.setenv(name, value)
    if source == "THINWIRE_FLAGS":
        words += " --id_worker=2 --nb_workers=2 --ps_hosts=a:1"
    monkeypatch.setenv("THINWIRE_FLAGS", words)
    found = read()
    assert is_in_run(None, {}) and not found.is_launched
    assert (found.run.method.name, found.run.lease_seconds) == ("dgs", 7)
    assert found.values.compression_rate == 0.3
    assert found.worker().id_worker == 2 and not found.given
    other = read(lease_seconds=9)  # the script's values win, flag by flag
    assert (other.run.method.name, other.run.lease_seconds) == ("dgs", 9)
    assert other.given == {"lease_seconds"}


def test_its_flags_win_over_the_place_that_a_manager_gives(monkeypatch):
    for name, value in {**STEP, "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("THINWIRE_FLAGS", "--ps_hosts=mine:9")
    assert read().run.addresses == ("mine:9",)
    monkeypatch.setenv("THINWIRE_FLAGS", "--id_worker=1")
    with pytest.raises(ConfigurationError, match="id_worker, but Slurm numbers the workers"):
        read()


def test_without_a_place_its_flags_leave_a_script_alone(monkeypatch):
    monkeypatch.setenv("THINWIRE_FLAGS", "--method=dgs --nb_workers=4")
    assert not is_in_run(None, {})
    assert read(id_worker=1).run.method.name == "dgs"  # a place of the script's own


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--compresion_rate=0.3", "compresion_rate"),
        ("--method=dgs train.py", "'train.py'"),
        ("--lease_seconds=-1", "lease_seconds"),
        ("--method='dgs", "quotation"),
    ],
)
def test_a_variable_that_is_no_list_of_flags_is_refused(monkeypatch, text, words):
    monkeypatch.setenv("THINWIRE_FLAGS", text)
    with pytest.raises(ConfigurationError, match=f"THINWIRE_FLAGS=.*{words}.*--method=dgs"):
        read(id_worker=1)


def test_it_knows_the_flags_of_every_role():
    names = {option.name for topic in help_text.TOPICS for option in topic.options}
    known = {option.name for topic in ALL_TOPICS for option in topic.options}
    assert names - known == {"type_node"}


@pytest.mark.parametrize(
    "environment",
    [
        {**STEP, "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script
        {"RANK": "0"},
        {"JOB_COMPLETION_INDEX": "0"},
    ],
)
def test_without_a_place_a_script_is_alone(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not is_in_run(None, {})
    assert not is_in_run([], {"clip_norm": 1.0})
    assert is_in_run(None, {"id_worker": 1})
    assert is_in_run(["--nb_workers=2"], {})


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({**STEP, "SLURM_PROCID": "4"}, "SLURM_PROCID=4 "),
        ({**STEP, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK='x'"),
        ({"JOB_COMPLETION_INDEX": "0", "THINWIRE_PS": "ps:9"}, "THINWIRE_NB_WORKERS"),
    ],
)
def test_a_place_that_is_none_is_refused(monkeypatch, environment, words):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=words):
        is_in_run(None, {})
