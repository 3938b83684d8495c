"""Settings of scripts: every accepted form, and rejected settings."""

import argparse
import json
import types

import pytest
from absl import flags

from thinwire.ops.types import ConfigurationError
from thinwire.script.settings import read_settings


def read(args=None, **keywords):
    return read_settings(args, keywords, type_node="Worker")


def of_absl(**values):
    own = flags.FlagValues()
    flags.DEFINE_integer("nb_workers", 1, "", flag_values=own)
    flags.DEFINE_string("method", None, "", flag_values=own)
    flags.DEFINE_string("dataset", "my own", "", flag_values=own)
    flags.DEFINE_float("dropout", 0.5, "of the script itself", flag_values=own)
    own(["script", *(f"--{name}={value}" for name, value in values.items())])
    return own


@pytest.mark.parametrize(
    "args",
    [
        {"nb_workers": 3, "method": "asgd"},
        types.SimpleNamespace(nb_workers=3, method="ASGD", port=None, dropout=0.5),
        argparse.Namespace(nb_workers=3, mode="asgd", model="their own", device="cuda"),
        ["--nb_workers=3", "--method", "asgd"],
        of_absl(nb_workers=3, method="asgd"),
    ],
    ids=["mapping", "object", "argparse", "words", "absl"],
)
def test_every_shape_says_the_same(args):
    settings = read(args, id_worker=2)
    assert settings.run.nb_workers == 3
    assert settings.run.method.name == "asgd"
    assert settings.worker().id_worker == 2
    assert {"nb_workers", "id_worker"} <= settings.given


def test_keywords_win_and_lists_are_lists():
    settings = read({"nb_workers": 2, "port": 5}, nb_workers=4, link_mbps=[1, 2, 3, 4])
    assert settings.run.nb_workers == 4
    assert [device.link.mbps for device in [settings.worker().device]] == [1.0]
    assert settings.run.addresses == ("127.0.0.1:5",)


def test_the_process_wide_flags_stay_the_scripts_own():
    before = set(flags.FLAGS)
    read(nb_workers=2)
    assert set(flags.FLAGS) == before


@pytest.mark.parametrize(
    ("mode", "method"),
    [
        ("DGS", "dgs"),
        ("gradient_SGD", "dgs"),
        ("Aji", "gd"),
        ("dgc", "dgc"),
        ("AdaComp", "adacomp"),
    ],
)
def test_modes(mode, method):
    assert read(mode=mode).run.method.name == method


@pytest.mark.parametrize("mode", ["msgd", "SGD"])
def test_modes_without_a_server(mode):
    assert read(mode=mode).local


@pytest.mark.parametrize(
    ("args", "keywords", "words"),
    [
        (None, {"compresion_rate": 0.1}, ["compresion_rate", "did you mean compression_rate?"]),
        ({"nbworkers": 2}, {}, ["did you mean nb_workers?"]),
        (["--nbworkers=2"], {}, ["nbworkers"]),
        (["nb_workers=2"], {}, ["nb_workers=2", "--nb_workers=2"]),
        (argparse.Namespace(nb_worker=2), {}, ["args.nb_worker", "--nb_workers"]),
        ("--nb_workers=2", {}, ["split the string"]),
        (7, {}, ["int", "namespace"]),
        (None, {"mode": "dsg"}, ["'dsg'", "dgs"]),
        ({"mode": "dgs"}, {"method": "gd"}, ["differ"]),
        (None, {"nb_workers": "many"}, ["nb_workers", "many"]),
        (None, {"nb_workers": 0}, ["nb_workers"]),
        (None, {"compression_rate": 0}, ["compression_rate", "above 0"]),
        (None, {"network": "lenet"}, ["network", "own model"]),
        (None, {"device": "cpu"}, ["device", "CUDA_VISIBLE_DEVICES"]),
        (None, {"slowdown": 2}, ["slowdown"]),
        (None, {"method": "bsp", "collective": "ring"}, ["collective", "main.py"]),
    ],
)
def test_what_is_refused(args, keywords, words):
    with pytest.raises(ConfigurationError) as error:
        read(args, **keywords)
    for word in words:
        assert word in str(error.value)


def test_momentum_is_the_methods_own():
    def momentum_of(mode):
        chosen = read_settings(None, {"mode": mode}, type_node="Worker", momentum=0.3)
        return dict(chosen.run.method.fingerprint())

    assert momentum_of("dgs") != dict(read(mode="dgs").run.method.fingerprint())
    assert momentum_of("dgc") != dict(read(mode="dgc").run.method.fingerprint())
    with pytest.raises(ConfigurationError, match=r"momentum=0\.3: mode asgd"):
        momentum_of("asgd")


def test_an_id_out_of_range_is_refused():
    with pytest.raises(ConfigurationError, match="id_worker=3"):
        read(nb_workers=2, id_worker=3).worker()


def test_tf_config_fills_in_what_is_not_said(monkeypatch):
    cluster = {"ps": ["10.0.0.1:7"], "worker": ["a:1", "b:1", "c:1"]}
    task = {"type": "worker", "index": 2}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    settings = read(method="asgd")
    assert settings.worker().id_worker == 3
    assert settings.run.nb_workers == 3
    assert settings.run.addresses == ("10.0.0.1:7",)
    assert read(method="asgd", id_worker=1).worker().id_worker == 1
