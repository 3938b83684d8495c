"""DC-ASGD equals ten lines of numpy in any order of events, and equals ASGD at lambda 0."""

import dataclasses

import numpy as np
import pytest

from tests.virtual.run import MiniRun
from tests.virtual.toy import Softmax, method
from thinwire.ops.downlink.replicas import BackupWeights
from thinwire.ops.kernels import load_kernels
from thinwire.ops.types import ConfigurationError, Update
from thinwire.ops.weighting.base import Arrival, ReleaseContext
from thinwire.ops.weighting.dc_asgd import DcAsgd
from thinwire.ps.core import events
from thinwire.ps.core.model import ShardModel
from thinwire.runtime.persistence.checkpoint import Checkpoints

RATE = 0.3  # large, so that delays matter
VARIANTS = [("constant", 0.04), ("constant", 5.0), ("adaptive", 2.0)]
BACKUPS = ["per_worker", "global_prev"]
BODIES = load_kernels("numpy")


def compensated(name="dcasgd", nb_workers=3, **choices):
    return method(name, nb_workers=nb_workers, **choices)


def by_hand(run, variant, strength, backup, decay=0.95):
    """Every worker's backup and mean square in plain numpy, over the run's order of steps."""
    w = np.random.default_rng(run.seed).normal(size=28).astype(np.float32) * np.float32(0.1)
    handed = dict.fromkeys(run.workers, w)
    previous, mean_squares, problem = w, {}, Softmax()
    for worker, batch in run.log[: run.settings.budget.iter_max]:
        g = problem.gradient(handed[worker], batch)[1].astype(np.float64)
        owner = worker if backup == "per_worker" else "all"
        mean_squares[owner] = decay * mean_squares.get(owner, 0.0) + (1 - decay) * g * g
        root = np.sqrt(mean_squares[owner] + 1e-7) if variant == "adaptive" else 1.0
        base = handed[worker] if backup == "per_worker" else previous
        previous = w
        w = (w - RATE * (g + strength / root * g * g * (w - base))).astype(np.float32)
        handed[worker] = w
    return w


@pytest.mark.parametrize("nb_ps", [1, 3])
@pytest.mark.parametrize("backup", BACKUPS)
@pytest.mark.parametrize(("variant", "strength"), VARIANTS)
def test_equals_plain_numpy(variant, strength, backup, nb_ps):
    chosen = compensated(
        dcasgd_variant=variant, dcasgd_lambda=strength, dcasgd_backup=backup, nb_workers=4
    )
    run = MiniRun(chosen, iter_max=60, nb_ps=nb_ps, rate=RATE).run()
    delays = run.shards[0].counters.staleness
    assert len(delays) > 3  # a random order: some are fresh, some far behind
    np.testing.assert_allclose(run.theta, by_hand(run, variant, strength, backup), atol=2e-6)
    plain = MiniRun(compensated("asgd", nb_workers=4), iter_max=60, nb_ps=nb_ps, rate=RATE).run()
    assert np.abs(run.theta - plain.theta).max() > 1e-4  # and compensation makes a difference


@pytest.mark.parametrize("backup", BACKUPS)
@pytest.mark.parametrize("variant", ["constant", "adaptive"])
def test_lambda_zero_is_asgd_bit_for_bit(variant, backup):
    chosen = compensated(dcasgd_lambda=0.0, dcasgd_variant=variant, dcasgd_backup=backup)
    run = MiniRun(chosen, iter_max=40, rate=RATE).run()
    plain = MiniRun(compensated("asgd"), iter_max=40, rate=RATE).run()
    np.testing.assert_array_equal(run.theta, plain.theta)
    assert run.shards[0].model.memory() == {"copies": 0, "bytes": 0}


@pytest.mark.parametrize("name", ["asgd", "bsp"])
def test_nobody_stale_nothing_compensated(name):
    nb_workers = 1 if name == "asgd" else 3
    overrides = {"weighting": "dc_asgd"}
    run = MiniRun(compensated(name, nb_workers, overrides=overrides), iter_max=20, rate=RATE).run()
    plain = MiniRun(compensated(name, nb_workers), iter_max=20, rate=RATE).run()
    np.testing.assert_array_equal(run.theta, plain.theta)


def test_members_of_a_group_share_one_copy():
    groups = ((1, 2, 3), (4,))
    chosen = compensated("gsp", 4, groups=groups, overrides={"weighting": "dc_asgd"})
    run = MiniRun(chosen, iter_max=30, rate=RATE)
    run.join_all()
    while run.turn():
        assert run.shards[0].model.memory()["copies"] <= 2
    plain = MiniRun(
        compensated("gsp", 4, groups=groups, overrides={"weighting": "none"}),
        iter_max=30,
        rate=RATE,
    ).run()
    assert not np.array_equal(run.theta, plain.theta)


@pytest.mark.parametrize("name", ["ssp", "adacomp"])
def test_other_modes_and_sparse_updates(name):
    overrides = {"weighting": "dc_asgd"}
    chosen = compensated(name, overrides=overrides, compression_rate=0.3, dcasgd_variant="adaptive")
    run = MiniRun(chosen, iter_max=60, nb_ps=2, rate=0.1).run()
    assert run.problem.accuracy(run.theta) > 0.6
    assert run.shards[0].model.memory()["copies"] > 0


# -- the policy alone --------------------------------------------------------------------------

THETA = np.array([1, 2, 3, 4], np.float32)
BASE = np.array([0, 2, 5, 4.5], np.float32)
GRADIENT = np.array([2, -1, 3, -4], np.float32)


def context(version=7, copies=None, theta=THETA):
    return ReleaseContext(version, 0, BODIES, theta, copies or {})


def test_a_vector_by_hand():
    arrivals = [Arrival(2, Update(None, GRADIENT), 5)]
    got, _ = DcAsgd(0.5).weigh(arrivals, context(copies={5: BASE}), DcAsgd(0.5).init(4))
    np.testing.assert_array_equal(got[0].update.values, [4, -1, -6, -8])
    np.testing.assert_array_equal(arrivals[0].update.values, [2, -1, 3, -4])


@pytest.mark.parametrize("variant", ["constant", "adaptive"])
def test_of_a_sparse_update_the_entries_sent_are_compensated(variant):
    policy = DcAsgd(0.5, variant)
    indices = np.array([0, 3])
    contexts = context(copies={5: BASE})
    whole, _ = policy.weigh([Arrival(1, Update(None, GRADIENT), 5)], contexts, policy.init(4))
    sparse = Arrival(1, Update(indices, GRADIENT[indices]), 5)
    some, state = policy.weigh([sparse], contexts, policy.init(4))
    np.testing.assert_array_equal(some[0].update.indices, indices)
    np.testing.assert_array_equal(some[0].update.values, whole[0].update.values[indices])
    for mean in state["mean_squares"].values():
        np.testing.assert_allclose(mean, [0.2, 0, 0, 0.8], rtol=1e-6)


def test_the_mean_square_is_a_worker_s_own():
    policy = DcAsgd(dcasgd_variant="adaptive", dcasgd_decay=0.5)
    state = policy.init(4)
    for worker in (1, 1, 2):
        _, state = policy.weigh([Arrival(worker, Update(None, GRADIENT), 7)], context(), state)
    squares = GRADIENT * GRADIENT
    np.testing.assert_array_equal(state["mean_squares"]["1"], 0.75 * squares)
    np.testing.assert_array_equal(state["mean_squares"]["2"], 0.5 * squares)


def test_one_previous_copy_is_from_before_the_latest_step():
    policy = DcAsgd(1.0, dcasgd_backup="global_prev")
    assert not policy.needs_copies
    push = [Arrival(1, Update(None, GRADIENT), 0)]
    got, state = policy.weigh(push, context(0), policy.init(4))
    np.testing.assert_array_equal(got[0].update.values, GRADIENT)  # w0: nothing to compensate
    later = THETA + np.float32(1)
    got, state = policy.weigh(push, context(1, theta=later), state)
    np.testing.assert_array_equal(got[0].update.values, GRADIENT + GRADIENT * GRADIENT)
    np.testing.assert_array_equal(state["previous"], later)
    got, _ = policy.weigh(push * 2, context(2, theta=later), state)  # both of a round see the same
    np.testing.assert_array_equal(got[0].update.values, got[1].update.values)


def test_an_unknown_base_counts_as_it_is():
    policy = DcAsgd()
    arrivals = [Arrival(1, Update(None, GRADIENT), 3)]
    got, _ = policy.weigh(arrivals, context(), policy.init(4))
    assert got == arrivals


# -- copies stored for a worker ----------------------------------------------------------------


def test_copies_are_kept_while_somebody_holds_them():
    theta, kept = np.zeros(4, np.float32), BackupWeights()
    for worker, version in ((1, 0), (2, 0), (1, 1), (3, 1)):
        theta[:] = version
        kept.record(worker, version, theta)
    theta[:] = 9
    assert sorted(kept.copies) == [0, 1] and kept.num_bytes == 32
    np.testing.assert_array_equal(kept.copies[1], 1)
    with pytest.raises(ValueError, match="read-only"):
        kept.copies[0][0] = 1
    kept.forget(2)
    kept.forget(2)
    assert list(kept.copies) == [1]


def test_a_leaving_worker_s_copy_goes_and_a_pull_renews_it():
    run = MiniRun(compensated(), iter_max=1000, rate=RATE)
    run.join_all()
    core, model = run.shards[0], run.shards[0].model
    assert model.memory() == {"copies": 1, "bytes": 112}  # w0 for all three
    for _ in range(30):
        run.turn()
    worker = run.workers[2]
    worker.alive = False
    held = core._members[2].base_version
    run.feed(0, events.Leave(2, worker.incarnation, "farewell"))
    assert held == core.version or held not in model.downlink.backups.copies
    worker.join()
    np.testing.assert_array_equal(model.downlink.backups.copies[core.version], model.theta)
    while core.version < 60:
        assert run.turn()


@pytest.mark.parametrize("backup", BACKUPS)
@pytest.mark.parametrize("variant", ["constant", "adaptive"])
def test_a_restored_shard_goes_on_bit_for_bit(variant, backup, tmp_path):
    """At the same point of the same asynchronous run, mid-flight: no worker pulls again."""
    chosen = compensated(dcasgd_variant=variant, dcasgd_backup=backup)

    def trained(breaks):
        run = MiniRun(chosen, iter_max=60, rate=RATE)
        run.join_all()
        while run.shards[0].version < 25:
            run.turn()
        if breaks:
            Checkpoints.in_folder(tmp_path).save(1, run.shards[0].model.state_dict(soft=False))
            old = run.shards[0].model
            fresh = ShardModel(
                chosen, np.zeros(28, np.float32), BODIES, old.budget, old.optimizer.schedule
            )
            fresh.load_state_dict(Checkpoints.in_folder(tmp_path).load_latest()[1], soft=False)
            assert fresh.memory() == old.memory()
            run.shards[0].model = fresh
        while run.turn():
            pass
        return run.theta

    np.testing.assert_array_equal(trained(True), trained(False))


# -- choices --------------------------------------------------------------------------------------


def test_defaults_follow_the_variant():
    assert (DcAsgd().strength, DcAsgd(dcasgd_variant="adaptive").strength) == (0.04, 2.0)
    assert compensated().weighting == DcAsgd()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"dcasgd_lambda": -1.0}, "--dcasgd_lambda=-1.0: expected"),
        ({"dcasgd_lambda": float("inf")}, "--dcasgd_lambda=inf: expected"),
        ({"dcasgd_variant": "a"}, "--dcasgd_variant=a: expected one of constant, adaptive"),
        ({"dcasgd_backup": "one"}, "--dcasgd_backup=one: expected one of per_worker"),
        ({"dcasgd_variant": "adaptive", "dcasgd_decay": 1.0}, "--dcasgd_decay=1.0: expected"),
        ({"dcasgd_decay": 0.9}, "--dcasgd_decay=0.9 is for --dcasgd_variant=adaptive"),
    ],
)
def test_bad_choices_are_refused(choices, message):
    with pytest.raises(ConfigurationError, match=message):
        compensated(**choices)


def test_what_another_weighting_would_not_heed_is_refused():
    with pytest.raises(ConfigurationError, match="--dcasgd_lambda=2.0 is for --weighting=dc_asgd"):
        compensated("asgd", dcasgd_lambda=2.0)


def test_check_knows_what_cannot_work_and_what_has_no_effect():
    assert compensated().warnings == ()
    assert "--weighting=dc_asgd" in compensated(nb_workers=1).warnings[0]
    assert "nothing is compensated" in compensated(dcasgd_lambda=0.0).warnings[0]
    assert compensated(nb_workers=1, dcasgd_backup="global_prev").warnings == ()
    with pytest.raises(
        ConfigurationError, match="dc_asgd compensates gradients, but --pacer=fixed"
    ):
        compensated(local_steps=3, overrides={"pacer": "fixed"})


def test_strength_and_backup_are_part_of_the_fingerprint():
    names = {name for name, _ in compensated().fingerprint()}
    assert {f"weighting.{field.name}" for field in dataclasses.fields(DcAsgd)} <= names
