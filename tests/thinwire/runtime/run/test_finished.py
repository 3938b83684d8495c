"""A finished run is not confused with another run in the same directory."""

import dataclasses
import json

import pytest

from tests.command_line import given
from thinwire.flags.run import read_run
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.finished import SETTINGS, deciding_settings, digest_of, finished_summary
from thinwire.runtime.run.settings import DataChoice, ModelChoice

FLAGS = ("--type_node=Cluster", "--method=dgs", "--iter_max=5", "--network=lenet")


def run_of(folder, *more):
    with given(*FLAGS, f"--run_dir={folder}", *more):
        return read_run()


def finish(folder, **more):
    summary = {"stop_reason": "iter_max", "updates": 5, "seconds": 1.0, **more}
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.fixture
def folder(tmp_path):
    finish(tmp_path, **{SETTINGS: deciding_settings(run_of(tmp_path))})
    return tmp_path


def test_the_same_run_is_finished_and_one_that_goes_on_is_not(folder):
    assert finished_summary(run_of(folder)) == "iter_max"
    assert finished_summary(run_of(folder, "--iter_max=4")) == "iter_max"
    assert finished_summary(run_of(folder, "--iter_max=6")) is None
    for flag in ("--nb_workers=7", "--port=3000", "--lease_seconds=3", "--log_level=debug"):
        assert finished_summary(run_of(folder, flag)) == "iter_max"
    assert finished_summary(run_of(folder, "--seed=9", "--resume")) is None


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--method=asgd", "method was 'dgs' and is now 'asgd'"),
        ("--network=cnn", "network was 'lenet' and is now 'cnn'"),
        ("--model={}/model.py", "model was 'None' and is now 'model.py .sha256"),
        ("--dataset=synthetic", "dataset was '.*' and is now 'synthetic'"),
        ("--compression_rate=0.5", "compression_rate was '0.01' and is now '0.5'"),
        ("--learning_rate=0.3", "learning_rate was"),
        ("--seed=9", "seed was"),
        ("--aggregate=median", "aggregate"),
    ],
)
def test_another_run_is_refused_and_what_differs_named(folder, flag, words):
    (folder / "model.py").write_text("def build_model(): ...\n")
    more = ["--method=bsp"] if "aggregate" in flag else []
    if more:
        finish(folder, **{SETTINGS: deciding_settings(run_of(folder, *more))})
    with pytest.raises(ConfigurationError, match=f"{words}(.|\n)*--overwrite"):
        finished_summary(run_of(folder, *more, flag.format(folder)))


def test_a_summary_of_an_earlier_version_and_what_is_no_summary(folder):
    finish(folder)
    assert finished_summary(run_of(folder, "--method=asgd")) == "iter_max"
    (folder / "summary.json").write_text("[]")
    assert finished_summary(run_of(folder)) is None


def test_another_script_or_other_arguments_are_refused(folder):
    script, run = folder / "train.py", run_of(folder)
    script.write_text("print(1)\n")
    before = {"path": str(script), "arguments": ["--epochs=2"], "sha256": digest_of(script)}
    (folder / "launch.json").write_text(json.dumps({"script": before}))
    assert finished_summary(run, [str(script), "--epochs=2"]) == "iter_max"
    with pytest.raises(ConfigurationError, match="arguments were.*--epochs=2.*--epochs=3"):
        finished_summary(run, [str(script), "--epochs=3"])
    script.write_text("print(2)\n")
    with pytest.raises(ConfigurationError, match="the script was .*train.py"):
        finished_summary(run, [str(script), "--epochs=2"])


def test_every_setting_of_a_model_and_of_data_is_looked_at():
    under_flags = {"sharding_file": "data_sharding_file", "path": "model"}
    fields = {each.name for kind in (DataChoice, ModelChoice) for each in dataclasses.fields(kind)}
    with given(*FLAGS):
        looked_at = deciding_settings(read_run())
    names = {under_flags.get(name, name) for name in fields}
    follows = {"whole_epochs"}  # from the pacer, which the fingerprint has
    assert names - looked_at.keys() == {"model_from"} | follows


@pytest.mark.parametrize(
    ("method", "nb_workers", "groups"),
    [
        ("dgs", 1, None),  # one worker forms the same group under either rule
        ("bsp", 1, None),
        ("dgs", 2, "each alone"),
        ("bsp", 2, "all together"),
    ],
)
def test_groups_decide_a_run_of_two_workers_and_not_of_one(tmp_path, method, nb_workers, groups):
    run = run_of(tmp_path, f"--method={method}", f"--nb_workers={nb_workers}")
    assert deciding_settings(run).get("sync.groups") == groups
