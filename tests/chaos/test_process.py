"""After kill -9 of real shards no acknowledged update is lost and none is applied twice."""

import pytest

from tests.chaos.faults import plans
from tests.chaos.process import METHODS, SHARDS, plans_of_kills
from tests.chaos.process_cast import Cast
from tests.chaos.process_faults import Faults, pairs
from tests.chaos.process_search import ProcessTrial, play
from tests.chaos.process_trial import Trial

pytestmark = [pytest.mark.timeout(900), pytest.mark.processes]


def kill(folder, method, kills, nb_ps, seed):
    """Return the summary of a run after this many kills of its shards, and the results."""
    flags = (f"--method={method}", "--dataset=synthetic", *METHODS[method])
    cast = Cast(folder, flags, nb_workers=2, nb_ps=nb_ps, seed=seed)
    trial = Trial(cast, seed)
    try:
        trial.begin(supervisor=False)
        for plan in plans_of_kills(seed, kills, nb_ps):
            trial.strike(plan)
        return trial.end(), trial
    finally:
        cast.close()


@pytest.mark.product
def test_a_shard_that_is_killed_three_times(tmp_path):
    summary, trial = kill(tmp_path, "adacomp", kills=3, nb_ps=1, seed=3)
    assert len(trial.kills) == 3
    assert summary["journal"]["replayed"] >= sum(each.events for each in trial.kills)
    assert trial.num_told <= sum(worker["pushes"] for worker in summary["workers"])


@pytest.mark.product
@pytest.mark.parametrize("method", METHODS)
def test_shards_that_are_killed_in_every_way(tmp_path, method):
    summary, trial = kill(tmp_path, method, kills=8, nb_ps=2, seed=1)
    assert {each.shard for each in trial.kills} == {0, 1}
    assert sum(each.compared for each in trial.kills) >= 4
    assert any(each.torn for each in trial.kills)
    # The summary has the journal of shard 0. Nothing is torn if a snapshot has just emptied it.
    is_torn = any(each.torn for each in trial.kills if each.shard == 0)
    assert summary["journal"]["cuts"] or not is_torn


@pytest.mark.product
@pytest.mark.parametrize(("method", "protected"), [("dgt", False), ("adacomp", True)])
def test_whatever_befalls_a_node_the_run_goes_on(tmp_path, method, protected):
    flags = (f"--method={method}", "--dataset=synthetic", *METHODS[method])
    cast = Cast(tmp_path, flags, nb_workers=2, nb_ps=2, protected=protected)
    trial = Trial(cast, 1)
    tried = pairs(protected)
    try:
        trial.begin(supervisor=True)
        faults = Faults(trial)
        for plan in plans(1, len(tried), tried):
            faults.befall(plan)
        summary = trial.end()
    finally:
        cast.close()
    kills = sum(fault.kills and victim in SHARDS for fault, victim in tried)
    assert len(trial.kills) == kills
    assert summary["test_accuracy"] > 0.5


@pytest.mark.product
@pytest.mark.parametrize("number", range(12))
def test_histories_of_random_faults_break_no_promise(number):
    """A run of each method; `make chaos` has more."""
    trial = ProcessTrial.of(3, number)
    violations = play(trial).violations
    assert not violations, f"{trial.command}\n" + "\n".join(map(str, violations))
