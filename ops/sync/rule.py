"""BSP, ASP, SSP and GSP as one synchronization rule with groups and a staleness bound.

Source: Jiang et al. (CCGrid 2019) for groups, Ho et al. (NIPS 2013) for the bound;
docs/methods/grouping_sgd.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

from thinwire.ops.sync.base import Agreement, Ready, RoundsView, SyncRule, complete_rounds
from thinwire.ops.sync.groups import (
    AutoGroups,
    Groups,
    format_groups,
    groups_of_one,
    one_group,
)
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

    def __post_init__(self) -> None:
        """Raise an error if `groups` is no partition of the ids 1..n, or `bound` is negative."""
        ids = sorted(worker for group in self.groups for worker in group)
        if any(not group for group in self.groups):
            raise ConfigurationError(
                f"worker groups {format_groups(self.groups)!r} contain an empty group."
            )
        if ids != list(range(1, len(ids) + 1)):
            raise ConfigurationError(
                f"groups {format_groups(self.groups)!r} name the workers {ids}; expected each "
                f"worker of 1..{max(len(ids), 1)} in exactly one group (--groups, --groups_file)."
            )
        if self.bound is not None and self.bound < 0:
            raise ConfigurationError(
                f"--staleness_bound={self.bound}: expected 0 (lockstep) or more iterations."
            )

    def ready(self, rounds: RoundsView, now: float) -> Ready:
        """Return the members' oldest pushes of each worker group whose live members all pushed."""
        return complete_rounds(rounds, rounds.changed)


@dataclasses.dataclass(frozen=True)
class ClosedGroupSync(GroupSync):
    """Rule for one worker group whose members exchange data during a round, not only at its end.

    A worker that joins a ClosedGroupSync becomes live when a round is released, never during one.
    """

    admits_in_round: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class SyncChoice:
    """What a value of the flag --sync means: its worker groups, and the other flags it accepts."""

    groups: Callable[[int], Groups]
    takes_groups: bool
    takes_bound: bool
    needs_bound: bool = False


#: Value of the flag --sync (bsp, asp, ssp, gsp) -> how `make_rule` makes a GroupSync for the value.
SYNC_RULES: dict[str, SyncChoice] = {
    "bsp": SyncChoice(one_group, takes_groups=False, takes_bound=False),
    "asp": SyncChoice(groups_of_one, takes_groups=False, takes_bound=False),
    "ssp": SyncChoice(groups_of_one, takes_groups=False, takes_bound=True, needs_bound=True),
    "gsp": SyncChoice(one_group, takes_groups=True, takes_bound=True),
}


def make_rule(
    name: str,
    nb_workers: int,
    groups: Groups | None = None,
    bound: int | None = None,
    auto: AutoGroups | None = None,
) -> GroupSync:
    """Make the synchronization rule that --sync, --groups and --staleness_bound describe.

    Raises:
        ConfigurationError: Worker groups or a staleness bound are given for a --sync value that
            accepts none, a required staleness bound is missing, or the worker groups are not a
            partition of the ids 1..nb_workers.
    """
    choice = SYNC_RULES[name]
    if (groups is not None or auto is not None) and not choice.takes_groups:
        raise ConfigurationError(
            f"--groups was given, but --sync={name} has no groups; use --sync=gsp."
        )
    if bound is not None and not choice.takes_bound:
        raise ConfigurationError(
            f"--staleness_bound={bound} was given, but --sync={name} has no staleness bound; use "
            "--sync=ssp or --sync=gsp."
        )
    if choice.needs_bound and bound is None:
        raise ConfigurationError(f"--sync={name} needs --staleness_bound (iterations, 0 or more).")
    form = choice.groups if auto is None else groups_of_one
    rule = GroupSync(groups or form(nb_workers), bound, auto)
    members = sum(len(group) for group in rule.groups)
    if members != nb_workers:
        raise ConfigurationError(
            f"groups {format_groups(rule.groups)!r} name {members} workers, but "
            f"--nb_workers={nb_workers}; expected every worker in exactly one group."
        )
    return rule
