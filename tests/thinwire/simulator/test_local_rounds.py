"""Guards, robust aggregates and differential privacy with each method of local steps."""

import numpy as np
import pytest

from tests.thinwire.simulator.toy import simulated
from tests.virtual.toy import Softmax
from thinwire.ops.aggregation.outliers import Guards
from thinwire.ops.methods.builder import Choices, compose
from thinwire.ops.methods.method import METHODS
from thinwire.ops.types import ConfigurationError

#: Methods with rounds of a fixed length, and methods with sparse updates.
ROWS = [name for name, row in METHODS.items() if row["pacer"] == "fixed"]


def ordinarily(names, *kept):
    """Leave all but some to make product."""
    product = [pytest.mark.product]
    return [pytest.param(name, marks=product * (name not in kept)) for name in names]


def is_sparse(name):
    return compose(Choices.of(name, 4, local_steps=2)).codec.sends_fraction


DENSE = [name for name in ROWS if not is_sparse(name)]
#: Rates at which the toy problem is learnt with few rounds, by the local optimizer.
CHOICES = {
    "fedopt": {"global_lr": 0.1},
    "diloco": {"local_optimizer": "sgd"},
    "sparseloco": {"local_optimizer": "sgd", "compression_rate": 0.5},
}


def play(name, nb_workers=4, choices=None, **settings):
    chosen = {"local_steps": 3} | CHOICES.get(name, {}) | (choices or {})
    steps = "lognormal:0.2,0.3"
    run = simulated(name, nb_workers, steps=steps, choices=chosen, iter_max=80, **settings)
    run.play(lambda now: None, lambda: False)
    assert run.end == "iter_max"
    return run


def accuracy(run):
    return Softmax().accuracy(run.shards[0].core.model.theta)


def test_there_are_rows():
    assert {"fedavg", "fedopt", "fedprox", "diloco"} <= set(ROWS)


@pytest.mark.parametrize("name", ordinarily(ROWS, "diloco", "sparseloco"))
def test_a_worker_of_garbage_is_refused(name):
    guarded = play(name, garbage={4: 1e6}, guards=Guards(max_update_norm=50.0))
    assert accuracy(guarded) > 0.6
    assert set(guarded.shards[0].core.guard_summary()["refused"]["outlier"]) == {"4"}


@pytest.mark.parametrize("name", ordinarily(ROWS, "fedavg"))
def test_a_worker_of_garbage_is_quarantined(name):
    guards = Guards(update_norm_factor=8.0, quarantine_after=2, quarantine_seconds=5.0)
    guarded = play(name, garbage={4: 1e6}, guards=guards)
    summary = guarded.shards[0].core.guard_summary()
    assert set(summary["quarantines"]) == {"4"}
    assert np.isfinite(guarded.shards[0].core.model.theta).all()


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
@pytest.mark.parametrize("name", ordinarily(DENSE, "fedopt"))
def test_a_robust_rule_outvotes_it(name, rule):
    robust = play(name, choices={"aggregate": rule}, garbage={4: 1e6})
    assert accuracy(robust) > 0.6


@pytest.mark.parametrize("name", sorted(set(ROWS) - set(DENSE)))
def test_a_robust_rule_is_refused_for_sparse_updates(name):
    with pytest.raises(ConfigurationError, match="--aggregate=median with --codec="):
        play(name, choices={"aggregate": "median"})


@pytest.mark.parametrize("name", ordinarily(ROWS, "diloco"))
def test_every_row_is_private_if_asked(name):
    """Little noise and a wide clip do not reduce quality; the report covers all releases."""
    choices = {"dp_clip": 20.0, "dp_noise": 1e-4, "overrides": {"weighting": "none"}}
    assert accuracy(play(name, choices=choices)) > 0.6
    drowned = play(name, choices=choices | {"dp_noise": 100.0})
    assert accuracy(drowned) < 0.6
