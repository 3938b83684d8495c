"""Plans of faults cover every possible pair, stay inside the run and repeat by seed."""

import itertools

from tests.chaos.faults import IMPOSSIBLE, POSSIBLE, Fault, Victim, plans


def test_a_pair_is_possible_or_has_a_reason_not_to_be():
    assert set(POSSIBLE) | set(IMPOSSIBLE) == set(itertools.product(Fault, Victim))
    assert not set(POSSIBLE) & set(IMPOSSIBLE)
    assert all(IMPOSSIBLE.values())


def test_every_pair_comes_in_turn_and_inside_the_run():
    found = list(plans(3, 2 * len(POSSIBLE)))
    assert [(plan.fault, plan.victim) for plan in found] == [*POSSIBLE, *POSSIBLE]
    assert all(0 < plan.instant < 1 for plan in found)
    assert len({plan.seed for plan in found}) == len(found)


def test_a_seed_repeats_its_plans():
    assert list(plans(5, 30)) == list(plans(5, 60))[:30]
    assert list(plans(5, 30)) != list(plans(6, 30))
    first = next(plans(5, 1))
    assert first.rng().integers(1 << 62) == first.rng().integers(1 << 62)
