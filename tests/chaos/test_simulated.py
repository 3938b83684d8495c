"""Each pair of fault and victim in a simulated run; tests.chaos.simulated plays more runs.

A failing test names the case and the plan that repeat the failure.
"""

import dataclasses

import pytest

from tests.chaos import simulated
from tests.chaos.faults import IMPOSSIBLE, POSSIBLE, Fault, Plan, Victim
from tests.chaos.recorder import Recorder
from tests.chaos.simulated import CASES, DRAWN, played, possible, quiet_seconds, sample
from tests.chaos.simulated_faults import NOT_SIMULATED, SIMULATED
from tests.chaos.simulated_run import Case, ChaoticRun
from thinwire.runtime.persistence.checkpoint import Checkpoints

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
    # Each name meets two of these faults, and each fault one name with two shards or datagrams.
    pair = ("adacomp", "dgs") if fault in DEATHS[:2] else ("gsp", "dgt")
    for number, name in enumerate(pair):
        plan = Plan(fault, Victim.SHARD_0, 0.3 + 0.1 * number, 5 + number)
        outcome = played(case_of(name, nb_ps=2 if name == "dgs" else 1), plan)
        assert not outcome.error, f"{name} | {plan!r}\n{outcome.error}"
        assert outcome.struck and outcome.restarts == 1
        assert outcome.lost_updates == 0


@pytest.mark.parametrize("fault", [Fault.REORDERED, Fault.GARBLED], ids=lambda fault: fault.value)
def test_a_push_with_datagrams_is_struck_as_well(fault):
    """The push's stream brings parts, which become a push only at the shard."""
    outcome = played(case_of("dgt"), Plan(fault, Victim.WORKER, 0.4, 7))
    assert not outcome.error and outcome.struck


@pytest.mark.parametrize("name", ["dgt", "bsp", "dgs"])
def test_a_following_shard_whose_disk_is_full_ends_the_run(name):
    """It answers no push that it will not apply; shard 0 ends the run, and the same run resumes."""
    plan = Plan(Fault.DISK_FULL, Victim.OTHER_SHARD, 0.478582644474096, 1673119991)
    outcome = played(case_of(name, nb_ps=2), plan)
    assert not outcome.error, f"{name} | {plan!r}\n{outcome.error}"
    assert outcome.struck and outcome.restarts


OVERLAPPED = Case("bsp", nb_ps=2, nb_workers=4, choices=(("overlap", True),), iter_max=18, seed=1)


@pytest.mark.parametrize(
    ("case", "plans"),
    [
        # Worker 2's push was applied by shard 1 alone before it was expelled, and waited at shard 0
        # for others that waited for it at shard 1.
        (OVERLAPPED, [Plan(Fault.CUT, Victim.SHARD_0, 0.23503870576718072, 1327474084)]),
        # A worker that died inside its push continued with its next mini-batch for ever.
        (OVERLAPPED, [Plan(Fault.KILL_BEFORE_PUSH, Victim.WORKER, 0.5850584166821315, 164867038)]),
        # A shard that died while a worker dialled it was never found again.
        (
            Case("gsp", choices=(("groups", ((1, 2), (3,))),), iter_max=3),
            [
                Plan(Fault.KILL_AFTER_PUSH, Victim.SHARD_0, 0.1126, 468714525),
                Plan(Fault.SLOW, Victim.SHARD_0, 0.0972, 368821028),
            ],
        ),
        # Nobody opened the stream to shard 0 while shard 1, which had died as well, was waited for.
        (
            Case("dgc", 2, nb_workers=2, choices=(("compression_rate", 0.3),), iter_max=14),
            [
                Plan(Fault.KILL_IN_JOURNAL, Victim.SHARD_0, 0.2814, 1669359070),
                Plan(Fault.KILL_IN_JOURNAL, Victim.OTHER_SHARD, 0.1113, 1064137626),
            ],
        ),
        # The restarted state server let no worker push: it did not know that one had pushed
        # to shard 1 and waited there for the other workers' pushes.
        (
            Case("esync", 2, nb_workers=2, iter_max=5, seed=1073220346),
            [
                Plan(Fault.KILL_IN_JOURNAL, Victim.SHARD_0, 0.5741, 296074683),
                Plan(Fault.HALF_OPEN, Victim.WORKER, 0.2426, 1641344563),
            ],
        ),
        (
            Case("esync", 2, iter_max=3, seed=842108985),
            [
                Plan(Fault.HALF_OPEN, Victim.SHARD_0, 0.3889, 565176043),
                Plan(Fault.KILL_AFTER_PUSH, Victim.SHARD_0, 0.6281, 1045536176),
            ],
        ),
        # A following shard mistook a push that shard 0 had applied before for a new draw's push.
        (
            Case("bsp", 2, nb_workers=2, journal="auto", choices=DRAWN, iter_max=5, seed=474341766),
            [
                Plan(Fault.HALF_OPEN, Victim.WORKER, 0.07917636045360485, 175296909),
                Plan(Fault.CUT, Victim.SHARD_0, 0.6903665388798127, 1480423361),
            ],
        ),
        # Shard 0 waited for another push of a worker; only the other shard had taken its last one.
        (
            Case("bsp", 2, nb_workers=2, choices=DRAWN, seed=461015596),
            [
                Plan(Fault.CUT, Victim.OTHER_SHARD, 0.20440650554786255, 2054122375),
                Plan(Fault.KILL_AFTER_PUSH, Victim.SHARD_0, 0.5428716778212269, 1340998153),
                Plan(Fault.HALF_OPEN, Victim.SHARD_0, 0.5477385533429674, 1794307347),
            ],
        ),
        # Only the journal knew of the end: shard 0 did not come back to announce it.
        (
            Case("bsp", 2, nb_workers=2, iter_max=1, seed=511924985),
            [Plan(Fault.KILL_AFTER_PUSH, Victim.SHARD_0, 0.7492912116077457, 1097704918)],
        ),
    ],
)
def test_nobody_waits_for_ever(case, plans):
    outcome = played(case, *plans)
    assert not outcome.error and outcome.reason == "iter_max"


@pytest.mark.parametrize("name", ["bsp", "ssp", "dcasgd"])
def test_without_one_the_summary_counts_what_was_lost(name):
    lost = []
    for number, fault in enumerate(DEATHS):
        plan = Plan(fault, Victim.SHARD_0, 0.35 + 0.1 * number, 21 + number)
        outcome = played(case_of(name, journal="auto"), plan)
        assert not outcome.error, f"{name} | {plan!r}\n{outcome.error}"
        assert outcome.struck and outcome.restarts == 1
        lost.append(outcome.lost_updates)
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


def test_a_snapshot_that_was_half_written_is_not_taken(tmp_path):
    """A death leaves in the folder no snapshot, or a complete one."""
    for number, stage in enumerate(("arrays", "manifest", "unnamed", "unpruned", "saved")):
        folder = tmp_path / stage
        run = ChaoticRun(case_of("adacomp"), folder, Recorder(lambda record: None))
        run._schedule()
        while run.shards[0].core.version < 5:
            run._advance()
        run.disks[0].dies_at = stage
        while run.shards[0].alive:
            run._advance()
        assert Checkpoints.in_folder(folder / "checkpoints" / "ps-0").load_latest() is not None, (
            number
        )


def test_the_command_prints_a_table(capsys):
    assert simulated.main(["--runs", "2", "--method", "adacomp", "--fault", "slow"]) == 0
    printed = capsys.readouterr().out
    assert "2 runs in" in printed and "0 failed" in printed
    assert quiet_seconds(case_of("adacomp")) > 1
