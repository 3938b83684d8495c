"""Each pair of fault and victim once, on a virtual clock; tests.chaos.simulated has more.

A test that fails says which case and plan repeat it.
"""

import dataclasses

import pytest

from tests.chaos import simulated
from tests.chaos.faults import IMPOSSIBLE, POSSIBLE, Fault, Plan, Victim
from tests.chaos.simulated import CASES, played, possible, quiet_seconds, sample
from tests.chaos.simulated_faults import NOT_SIMULATED, SIMULATED
from tests.chaos.simulated_ledger import Fork, Ledger
from tests.chaos.simulated_run import ChaoticRun
from thinwire.ops.persistence.checkpoint import Checkpoints

SAMPLE = list(sample(seed=3))
DEATHS = (Fault.KILL_BEFORE_PUSH, Fault.KILL_AFTER_PUSH, Fault.KILL_IN_SNAPSHOT)


def case_of(name, nb_ps=1, journal="on"):
    return next(c for c in CASES if (c.name, c.nb_ps, c.journal) == (name, nb_ps, journal))


def test_what_is_not_simulated_has_a_reason():
    assert set(SIMULATED) | set(NOT_SIMULATED) | set(IMPOSSIBLE) == {
        (fault, victim) for fault in Fault for victim in Victim
    }
    assert set(NOT_SIMULATED) <= set(POSSIBLE) and all(NOT_SIMULATED.values())


@pytest.mark.parametrize(
    ("case", "plan"),
    SAMPLE,
    ids=[f"{plan.fault.value}, {plan.victim.value}" for _, plan in SAMPLE],
)
def test_a_fault_changes_nothing_that_was_acknowledged(case, plan):
    outcome = played(case, plan)
    assert not outcome.error, f"{case} | {plan!r}\n{outcome.error}"
    assert outcome.reason == "iter_max"
    assert outcome.models > 0


@pytest.mark.parametrize("fault", [*DEATHS, Fault.KILL_IN_JOURNAL], ids=lambda fault: fault.value)
def test_with_a_journal_nothing_is_lost(fault):
    for number, name in enumerate(("adacomp", "dgt", "gsp", "dgs")):
        plan = Plan(fault, Victim.SHARD_0, 0.3 + 0.1 * number, 5 + number)
        outcome = played(case_of(name, nb_ps=2 if name == "dgs" else 1), plan)
        assert not outcome.error, f"{name} | {plan!r}\n{outcome.error}"
        assert outcome.struck and outcome.restarts == 1
        assert outcome.lost_updates == (0, 0)


@pytest.mark.parametrize("fault", [Fault.REORDERED, Fault.GARBLED], ids=lambda fault: fault.value)
def test_a_push_with_datagrams_is_struck_as_well(fault):
    """Its stream brings parts, which become a push only at the shard."""
    outcome = played(case_of("dgt"), Plan(fault, Victim.WORKER, 0.4, 7))
    assert not outcome.error and outcome.struck


@pytest.mark.parametrize("name", ["dgt", "bsp", "dgs"])
def test_a_following_shard_whose_disk_is_full_ends_the_run(name):
    """It answers no push that it will not apply; shard 0 ends the run, and the same goes on."""
    for instant, seed in ((0.478582644474096, 1673119991), (0.7, 3)):
        plan = Plan(Fault.DISK_FULL, Victim.OTHER_SHARD, instant, seed)
        outcome = played(case_of(name, nb_ps=2), plan)
        assert not outcome.error, f"{name} | {plan!r}\n{outcome.error}"
        assert outcome.struck and outcome.restarts


@pytest.mark.parametrize("name", ["bsp", "ssp", "dcasgd"])
def test_without_one_the_summary_counts_what_was_lost(name):
    lost = []
    for number, fault in enumerate(DEATHS):
        plan = Plan(fault, Victim.SHARD_0, 0.35 + 0.1 * number, 21 + number)
        outcome = played(case_of(name, journal="auto"), plan)
        assert not outcome.error, f"{name} | {plan!r}\n{outcome.error}"
        assert outcome.struck and outcome.restarts == 1
        assert outcome.lost_updates[0] == outcome.lost_updates[1]
        lost.append(outcome.lost_updates[0])
    assert max(lost) > 0  # snapshots are rarer than updates


def test_the_same_plan_gives_the_same_run():
    case, plan = SAMPLE[0]
    one, two = played(case, plan), played(case, plan)
    assert dataclasses.asdict(one) == dataclasses.asdict(two)


def test_a_plan_befalls_only_whom_it_can():
    alone = case_of("adacomp")
    assert not possible(Plan(Fault.SLOW, Victim.OTHER_SHARD, 0.5, 1), alone)
    without = case_of("bsp", journal="auto")
    assert not possible(Plan(Fault.KILL_IN_JOURNAL, Victim.SHARD_0, 0.5, 1), without)
    assert possible(Plan(Fault.KILL_IN_JOURNAL, Victim.SHARD_0, 0.5, 1), alone)


# -- the harness itself: it must find what is wrong ---------------------------------------------


def test_a_push_that_is_applied_twice_is_found(monkeypatch):
    """A shard that forgets which steps it has taken applies what is sent again once more."""
    from thinwire.ps.core.core import PsCore
    from thinwire.ps.core.members import MemberTable

    state_dict = MemberTable.state_dict

    def forgetful(table, soft):
        state = state_dict(table, soft)
        return state if soft else state | {"steps": dict.fromkeys(state["steps"], 0)}

    monkeypatch.setattr(MemberTable, "state_dict", forgetful)
    monkeypatch.setattr(PsCore, "_usable_base", lambda core, event: event.base_version)
    plan = Plan(Fault.KILL_AFTER_PUSH, Victim.SHARD_0, 0.5, 4)
    assert "Fork" in played(case_of("adacomp"), plan).error


def test_a_lost_record_is_found(monkeypatch):
    """A journal that leaves out the last event loses what was acknowledged."""
    from thinwire.ps.persistence import journal_format

    bodies = journal_format.bodies
    monkeypatch.setattr(
        journal_format, "bodies", lambda data: list(bodies(data))[:-1] or bodies(data)
    )
    plan = Plan(Fault.KILL_AFTER_PUSH, Victim.SHARD_0, 0.5, 4)
    assert "Fork" in played(case_of("adacomp"), plan).error


def test_a_count_of_losses_that_is_wrong_is_found():
    ledger = Ledger(0, keeps_journal=False)
    ledger.check_losses(0)
    with pytest.raises(Fork, match="counts 1 lost updates"):
        ledger.check_losses(1)


def test_a_snapshot_that_was_half_written_is_not_taken(tmp_path):
    """What a death leaves in the folder is no snapshot, or a whole one."""
    for number, stage in enumerate(("arrays", "manifest", "unnamed", "unpruned", "saved")):
        folder = tmp_path / stage
        run = ChaoticRun(case_of("adacomp"), folder)
        run._schedule()
        while run.shards[0].core.version < 5:
            run._advance()
        run.disks[0].dies_at = stage
        while run.shards[0].alive:
            run._advance()
        assert Checkpoints(folder / "checkpoints" / "ps-0").load_latest() is not None, number


def test_the_command_prints_a_table(capsys):
    assert simulated.main(["--runs", "2", "--method", "adacomp", "--fault", "slow"]) == 0
    printed = capsys.readouterr().out
    assert "2 runs in" in printed and "0 failed" in printed
    assert quiet_seconds(case_of("adacomp")) > 1
