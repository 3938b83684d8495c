"""Noise added by the PS: its size, its place, its secret seed, and incompatible flags."""

import dataclasses

import numpy as np
import pytest

from tests.ops.privacy.test_contribution import private
from tests.virtual.run import MiniRun
from tests.virtual.toy import method
from thinwire.ops.aggregation.outliers import Guards
from thinwire.ops.downlink import relay
from thinwire.ops.methods.validation import check_averages, check_guards
from thinwire.ops.privacy.central import CentralPrivacy, Privacy, privacy_of
from thinwire.ops.types import ConfigurationError, Update

SECRET = bytes(range(32))
SIZE = 400_000


def released(privacy, mean, count, version=0, secret=SECRET, size=SIZE):
    return privacy.release(mean, count, size, version, privacy.init(secret))


@pytest.mark.parametrize("count", [1, 4, 100])
def test_the_noise_has_the_deviation_of_the_mechanism(count):
    mean = Update(None, np.full(SIZE, 3.0, np.float32))
    noise = released(CentralPrivacy(2.0, 1.5), mean, count).values - 3.0
    assert noise.std() == pytest.approx(1.5 * 2.0 / count, rel=0.01)
    assert abs(noise.mean()) < 5 * noise.std() / SIZE**0.5
    beyond = np.mean(np.abs(noise) > 2 * noise.std())  # 4.55 % of a Gaussian's
    assert beyond == pytest.approx(0.0455, rel=0.05)


def test_a_sparse_mean_is_noised_in_every_entry():
    mean = Update(np.array([3, 7]), np.array([1, -1], np.float32))
    found = released(CentralPrivacy(1.0, 1.0), mean, 1, size=1000)
    assert found.indices is None
    assert np.count_nonzero(found.values) == 1000
    np.testing.assert_array_equal(mean.values, [1, -1])


def test_the_same_release_draws_the_same_noise_and_no_other_does():
    privacy = CentralPrivacy(1.0, 1.0)
    mean = Update(None, np.zeros(1000, np.float32))
    first = released(privacy, mean, 2, size=1000).values
    np.testing.assert_array_equal(released(privacy, mean, 2, size=1000).values, first)
    moved = Update(None, np.zeros(1000, np.float32))
    moved.values[0] = 1e-7  # a round repeated after a crash, with other updates
    others = [
        released(privacy, mean, 2, version=1, size=1000).values,
        released(privacy, mean, 2, secret=bytes(32), size=1000).values,
        released(privacy, moved, 2, size=1000).values,
    ]
    for other in others:
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.15


def test_every_shard_and_run_has_a_secret_of_its_own():
    run = MiniRun(private(dp_noise=1.0), nb_ps=2)
    keys = [core.state_dict()["model"]["privacy"]["key"].tobytes() for core in run.shards]
    keys.append(MiniRun(run.method).shards[0].state_dict()["model"]["privacy"]["key"].tobytes())
    assert len(set(keys)) == 3
    assert all(len(key) == 32 for key in keys)


def test_what_single_workers_sent_is_not_relayed(monkeypatch):
    monkeypatch.setattr(relay, "_DESCRIPTION_BYTES", 0)  # the model is small
    settings = {"local_steps": 2, "local_optimizer": "sgd", "chunk": 8, "chunk_k": 1}
    plain = MiniRun(method("sparseloco", 3, **settings), iter_max=20).run()
    private = method("sparseloco", 3, dp_clip=0.5, dp_noise=1.0, **settings)
    noised = MiniRun(private, iter_max=20).run()
    assert plain.shards[0].model.downlink.summary()["relay"] > 0
    assert noised.shards[0].model.downlink.summary()["relay"] == 0


@pytest.mark.parametrize("nb_ps", [1, 2])
def test_weights_are_the_mean_and_the_noise_that_the_key_draws(nb_ps):
    """Clip far above, noise far below what rounds change: the run is that without either."""
    plain = MiniRun(private(dp_clip=0.0), iter_max=20, nb_ps=nb_ps).run()
    noised = MiniRun(private(dp_clip=1e3, dp_noise=1e-9), iter_max=20, nb_ps=nb_ps).run()
    assert not np.array_equal(noised.theta, plain.theta)
    np.testing.assert_allclose(noised.theta, plain.theta, atol=1e-4)


def test_noise_moves_every_weight_by_its_deviation():
    run = MiniRun(private(dp_clip=1e-6, dp_noise=1e6), iter_max=400)
    before = run.theta
    run.run()
    moved = run.theta - before  # 400 rounds of deviation 1 / 2 workers
    assert moved.std() == pytest.approx(400**0.5 / 2, rel=0.4)


def test_without_flags_nothing_is_bounded():
    assert privacy_of(0.0, 0.0) == Privacy()
    plain = method("bsp")
    assert not [name for name, _ in plain.fingerprint() if name.startswith("privacy")]


def test_both_sides_must_agree():
    rows = dict(private(dp_noise=1.0).fingerprint())
    assert (rows["privacy.clip"], rows["privacy.noise"]) == ("0.5", "1.0")
    assert rows["codec.Clip.norm"] == "0.5"


@pytest.mark.parametrize(
    ("choices", "flags"),
    [
        ({"dp_clip": 0.0, "dp_noise": 1.0}, ["--dp_noise=1", "--dp_clip"]),
        ({"dp_clip": -1.0}, ["--dp_clip=-1"]),
        ({"dp_clip": float("inf")}, ["--dp_clip=inf"]),
        ({"overrides": {"pacer": "every"}, "local_steps": 1}, ["--local_steps", "--pacer=every"]),
        ({"overrides": {"codec": "dgs"}}, ["--codec=dgs"]),
        ({"collective": "mesh"}, ["--collective"]),
        ({"overrides": {"router": "dgt"}}, ["--router=reliable"]),
        ({"overrides": {"weighting": "samples"}}, ["--weighting=samples", "--weighting=none"]),
        ({"overrides": {"weighting": "inverse"}}, ["--weighting=inverse", "--weighting=none"]),
        ({"aggregate": "median", "nb_workers": 3}, ["--aggregate=median", "--aggregate=mean"]),
        (
            {"aggregate": "trimmed_mean", "nb_workers": 3},
            ["--aggregate=trimmed_mean", "--aggregate=mean"],
        ),
        (
            {"local_optimizer": "adam", "local_opt_state": "average"},
            ["--local_opt_state=average", "--local_opt_state=keep"],
        ),
    ],
)
def test_what_breaks_the_bound_is_refused_by_name(choices, flags):
    with pytest.raises(ConfigurationError) as error:
        private(**{"dp_noise": 1.0} | choices)
    assert all(flag in str(error.value) for flag in flags)


@pytest.mark.parametrize("weighting", ["samples", "inverse"])
def test_a_clip_without_noise_goes_with_any_weighting(weighting):
    assert private(overrides={"weighting": weighting}).privacy.clip == 0.5


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
def test_a_clip_without_noise_goes_with_robust_aggregates(name):
    assert private(3, aggregate=name).aggregate.name == name


def test_a_server_optimizer_steps_with_what_is_released():
    overrides = {"server_optimizer": "momentum"}
    run = MiniRun(private(dp_noise=0.01, overrides=overrides), iter_max=30)
    assert np.isfinite(run.run().theta).all()
    assert run.shards[0].version == 30


@pytest.mark.parametrize(
    ("guards", "flag"),
    [
        (Guards(update_norm_factor=3), "--update_norm_factor=3"),
        (Guards(max_update_norm=0.4), "--max_update_norm=0.4"),
        (Guards(update_peak_factor=1.5), "--update_peak_factor=0"),
    ],
)
def test_guards_that_let_one_worker_decide_on_another_are_refused(guards, flag):
    clip = 2.0 if guards.update_peak_factor < 2 else 0.5
    with pytest.raises(ConfigurationError, match=flag):
        check_guards(private(dp_clip=clip, dp_noise=1.0), guards)
    check_guards(private(dp_clip=clip), guards)


def test_guards_that_no_clipped_update_reaches_are_kept():
    check_guards(private(dp_noise=1.0), Guards(max_update_norm=0.5, quarantine_after=3))


def test_averages_beside_the_weights_are_refused():
    with pytest.raises(ConfigurationError, match="--nobn_sync"):
        check_averages(private(dp_noise=1.0), 4)
    check_averages(private(), 4)


def test_a_warning_where_replies_become_dense():
    overrides = {"codec": "topk", "down_codec": "delta"}
    sparse = private(overrides=overrides, compression_rate=0.1)
    noised = private(overrides=overrides, compression_rate=0.1, dp_noise=1.0)
    assert not [text for text in sparse.warnings if "--dp_noise" in text]
    assert [text for text in noised.warnings if "--dp_noise" in text]


def test_the_policy_is_plain_data():
    privacy = CentralPrivacy(1.0, 2.0)
    assert dataclasses.asdict(privacy) == {"clip": 1.0, "noise": 2.0}
