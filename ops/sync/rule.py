"""BSP, ASP, SSP and GSP as one synchronization rule with groups and a staleness bound.

Source: Jiang et al. (CCGrid 2019) for groups, Ho et al. (NIPS 2013) for the bound;
docs/methods/grouping_sgd.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from thinwire.ops.options import integer, words
from thinwire.ops.policy import configured, options_of, setting
from thinwire.ops.sync.base import Agreement, Ready, RoundsView, SyncRule, complete_rounds
from thinwire.ops.sync.groups import (
    AutoGroups,
    Groups,
    format_groups,
    groups_of_one,
)
from thinwire.ops.sync.quorum import Quorum
from thinwire.ops.types import ConfigurationError


@dataclasses.dataclass(frozen=True)
class GroupSync(SyncRule):
    """BSP, ASP, SSP or GSP: a rule with worker groups that step together, and a staleness bound.

    Attributes:
        groups: Worker groups; each worker id of 1..n is in exactly one group. One group of all
            workers makes the rule BSP, and groups of one worker make the rule ASP.
        bound: Staleness bound. A worker that has finished c iterations may start its next iteration
            while ``c - min(c of live workers) <= bound``; None lets every worker proceed.
        auto: Settings for forming worker groups from speeds measured in a warm-up; None if the
            worker groups do not change.
    """

    agreement: ClassVar[Agreement] = Agreement.JOINERS
    groups: Groups
    bound: int | None = None
    auto: AutoGroups | None = None

    def ready(self, rounds: RoundsView, now: float) -> Ready:
        """Return the members' oldest pushes of each worker group whose live members all pushed."""
        return complete_rounds(rounds, rounds.changed)


@dataclasses.dataclass(frozen=True)
class ClosedGroupSync(GroupSync):
    """Rule for one worker group whose members exchange data during a round, not only at its end.

    A worker that joins a ClosedGroupSync becomes live when a round is released, never during one.
    """

    admits_in_round: ClassVar[bool] = False


_BOUND = integer(
    "staleness_bound",
    None,
    "Largest number of iterations by which a worker may be ahead of the slowest worker.",
    "iterations",
    low=0,
    unset="3 for ssp, none for gsp",
)


@dataclasses.dataclass(frozen=True)
class Asp(GroupSync):
    """ASP: every worker is a group of its own, and no worker waits for another worker."""

    @classmethod
    def form(cls, nb_workers: int) -> Groups:
        """Return groups of one worker each."""
        return groups_of_one(nb_workers)


@dataclasses.dataclass(frozen=True)
class Ssp(Asp):
    """SSP: like ASP, but no worker is more than `bound` iterations ahead of the slowest worker."""

    bound: int | None = setting(_BOUND, 3, shown=True)


@dataclasses.dataclass(frozen=True)
class Gsp(GroupSync):
    """GSP: worker groups of the user, with or without a staleness bound."""

    groups: Groups = setting(
        words(
            "groups",
            None,
            "Worker groups of --sync=gsp, such as '1,2|3,4'; auto: group workers by measured "
            "speed.",
            "groups of workers",
            unset="none",
        ),
        dataclasses.MISSING,
        shown=True,
    )
    bound: int | None = setting(_BOUND, shown=True)


#: Value of the flag --sync -> class of the synchronization rule.
SYNC_RULES: dict[str, type[SyncRule]] = {
    "bsp": GroupSync,
    "asp": Asp,
    "ssp": Ssp,
    "gsp": Gsp,
    "quorum": Quorum,
}


def make_rule(
    name: str,
    nb_workers: int,
    values: Mapping[str, Any] | None = None,
    auto: AutoGroups | None = None,
    seed: int = 0,
) -> SyncRule:
    """Make a synchronization rule from the values of flags.

    Args:
        name: Value of --sync, a key of SYNC_RULES.
        nb_workers: Number of workers of the run; worker ids are 1..nb_workers.
        values: Flag -> its value; the value of "groups" is a tuple of worker groups.
        auto: Settings for forming worker groups from measured speeds; None if the worker groups do
            not change.
        seed: Random seed of the run, for a rule with a field `seed`.

    Raises:
        ConfigurationError: A flag's value is illegal, or the worker groups are not a partition of
            the ids 1..nb_workers.
    """
    policy, values = SYNC_RULES[name], values or {}
    takes_groups = "groups" in options_of(policy)
    given = values.get("groups") if takes_groups else None
    others: dict[str, Any] = {"groups": given or policy.form(nb_workers)}
    if auto is not None:
        if not takes_groups:
            raise ConfigurationError(
                f"--groups=auto is for a rule with --groups, such as --sync=gsp, but this run has "
                f"--sync={name}; change one of the two flags."
            )
        others = {"groups": groups_of_one(nb_workers), "auto": auto}
    if any(field.name == "seed" for field in dataclasses.fields(policy)):
        others["seed"] = seed
    rule = configured(policy, values, **others)
    members = sum(len(group) for group in rule.groups)
    if members != nb_workers:
        raise ConfigurationError(
            f"groups {format_groups(rule.groups)!r} name {members} workers, but "
            f"--nb_workers={nb_workers}; expected every worker in exactly one group."
        )
    return rule
