"""The codec registry: codecs built from flags, and rejected flags."""

import math

import pytest

from tests.virtual.toy import method
from thinwire.ops.codecs.error_feedback import ErrorFeedback, coding_of
from thinwire.ops.codecs.registry import build_codec
from thinwire.ops.codecs.top_k import TopK
from thinwire.ops.codecs.wrappers import Clip, DenseBelow, RateAtSend, WarmUp
from thinwire.ops.methods.method import METHODS
from thinwire.ops.types import ConfigurationError


@pytest.mark.parametrize(
    ("name", "choices", "message"),
    [
        ("topk", {"dgs_momentum": 0.5}, "--dgs_momentum=0.5 is for --codec=dgs"),
        ("dgs", {"dgc_masking": False}, "--dgc_masking=False is for --codec=dgc, but.*--codec=dgs"),
        ("dgs", {"error_feedback": True}, "--error_feedback.*--codec=dgs"),
        ("random_k", {"selection": "carried"}, "--selection.*--codec=random_k"),
        ("dense", {"warmup_epochs": 3}, "--warmup_epochs.*--codec=dense"),
        ("dense", {"dense_below": 9}, "--dense_below.*--codec=dense"),
        ("dense", {"error_feedback": True}, "--codec=dense and --value_dtype=float32"),
        ("dgc", {"dgc_clip_scope": "tensor"}, "without --dgc_clip_norm"),
        ("dgc", {"dgc_clip_norm": -1.0}, "--dgc_clip_norm"),
        ("dgc", {"dgc_clip_norm": math.nan}, "--dgc_clip_norm"),
        ("dgc", {"dgc_clip_norm": 1.0, "dgc_clip_scope": "layer"}, "layer.*model, tensor"),
        ("dgc", {"dgc_momentum": 1.0}, "--dgc_momentum=1.0.*0.9999"),
        ("dgs", {"dgs_momentum": -0.1}, "--dgs_momentum=-0.1"),
        ("dgs", {"dgs_momentum": math.nan}, "--dgs_momentum=nan"),
        ("dgs", {"dgs_momentum": 1.5}, "--dgs_momentum=1.5"),
        ("topk", {"warmup_epochs": -1}, "--warmup_epochs=-1"),
        ("topk", {"dense_below": -1}, "--dense_below=-1"),
        ("topk", {"selection": "median"}, "--selection=median.*exact"),
        ("dgs", {"compression_rate": 0.0}, "--compression_rate=0.0"),
    ],
)
def test_nonsense_is_refused(name, choices, message):
    with pytest.raises(ConfigurationError, match=message):
        method("asgd", overrides={"codec": name}, **choices)


def test_what_dgc_is_built_of():
    choices = dict(dgc_clip_norm=3.0, dense_below=7)
    codec = build_codec("dgc", choices, nb_workers=9)
    assert isinstance(codec, WarmUp) and codec.epochs == 4
    assert isinstance(codec.inner, RateAtSend)
    assert codec.inner.inner == Clip(codec.inner.inner.inner, 1.0, "model")
    feedback = codec.inner.inner.inner.inner
    assert feedback == ErrorFeedback(DenseBelow(TopK(), 7))
    assert coding_of(codec) == TopK()
    assert isinstance(build_codec("dgc", dict(warmup_epochs=0)), RateAtSend)


@pytest.mark.parametrize("name", ["dgs", "dgc", "gd"])
def test_the_ps_adds_changes_of_weights(name):
    assert METHODS[name]["codec"] == name
    for refused in (
        {"overrides": {"pacer": "fixed"}, "local_steps": 2},
        {"overrides": {"pacer": "esync"}},
        {"overrides": {"weighting": "dc_asgd"}},
        {"overrides": {"server_optimizer": "momentum"}},
        {"overrides": {"server_optimizer": "adam"}},
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"overrides": {"sync": "bsp"}, "collective": "ring"},
    ):
        with pytest.raises(ConfigurationError, match=f"--codec={name}|momentum"):
            method(name, **refused)
    assert method(name, overrides={"server_optimizer": "sgd"}).server.traits.keeps_sparse


def test_with_local_steps_the_server_s_momentum_is_the_outer_one():
    chosen = {"overrides": {"pacer": "fixed"}, "local_steps": 2, "momentum": 0.5}
    plain = method("asgd", **chosen)
    chosen["overrides"] |= {"server_optimizer": "momentum"}
    assert plain.server.momentum == method("asgd", **chosen).server.momentum == 0.5
    assert plain.warnings == ()


def test_a_fraction_above_1_is_warned_of():
    assert method("dgs", compression_rate=1.0).warnings == ()
    for name in ("dgs", "adacomp"):
        assert "--compression_rate above 1" in method(name, compression_rate=100.0).warnings[0]
