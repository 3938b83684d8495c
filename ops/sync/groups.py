"""Groups of workers: read, written, compared, and proposed from measured speeds.

All functions are pure. `thinwire.runtime.run.groups_file` writes proposals into files; the PS
measures speeds and decides when groups change.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from thinwire.ops.types import ConfigurationError

#: Every worker id once.
Groups = tuple[tuple[int, ...], ...]

#: The members that a group's name counts.
_MOST_NAMED = 100
#: The largest group has so many times the smallest one's members: worth a warning.
_UNEVEN = 4
#: Nobody may be more than so many times as fast as the slowest of its proposed group.
_LIKE_SPEED = 1.4
#: Groups change while a run goes on only for a gain above this.
_LEAST_GAIN = 0.10


@dataclasses.dataclass(frozen=True)
class AutoGroups:
    """Groups are formed from measured speeds, and formed anew when speeds change.

    Attributes:
        groups_warmup_updates: Updates of the warm-up, in which everybody is alone.
        regroup_interval_seconds: Least time between two changes of groups; 0: form them once.
    """

    groups_warmup_updates: int
    regroup_interval_seconds: float = 60.0

    def __post_init__(self) -> None:
        """Refuse a warm-up without updates, and intervals that are none."""
        if self.groups_warmup_updates < 1:
            raise ConfigurationError(
                f"--groups_warmup_updates={self.groups_warmup_updates}: expected 1 or more."
            )
        if not 0 <= self.regroup_interval_seconds < math.inf:
            raise ConfigurationError(
                f"--regroup_interval_seconds={self.regroup_interval_seconds:g}: expected a finite "
                "number of seconds, or 0 to form groups only once."
            )


def one_group(nb_workers: int) -> Groups:
    """Return one group of all workers."""
    return (tuple(range(1, nb_workers + 1)),)


def groups_of_one(nb_workers: int) -> Groups:
    """Return a group for each worker."""
    return tuple((worker,) for worker in range(1, nb_workers + 1))


def parse_groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Read ``"1,2|3,4"``.

    >>> parse_groups("1, 2|3")
    ((1, 2), (3,))

    Raises:
        ConfigurationError: A token is not a worker id.
    """
    try:
        return tuple(
            tuple(sorted(int(token) for token in group.replace(",", " ").split()))
            for group in text.split("|")
        )
    except ValueError as error:
        raise ConfigurationError(
            f"--groups={text!r}: expected worker ids like '1,2|3,4' ({error})."
        ) from error


def parse_groups_file(text: str, path: str) -> tuple[tuple[int, ...], ...]:
    """Read one group a line; ``#`` starts a comment, blank lines are skipped.

    Raises:
        ConfigurationError: The file has no group, or a token is not a worker id.
    """
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    groups = "|".join(line for line in lines if line)
    if not groups:
        raise ConfigurationError(f"--groups_file={path}: holds no group; one line of ids a group.")
    return parse_groups(groups)


def format_groups(groups: Iterable[Iterable[int]]) -> str:
    """Write groups as parse_groups reads them."""
    return "|".join(",".join(map(str, group)) for group in groups)


def name_of(group: Sequence[int]) -> str:
    """Return a group's name in figures and files: its ids, but of a large one not all.

    >>> name_of((1, 2, 4)), name_of(tuple(range(3, 301)))
    ('1,2,4', '3,4,...,300')
    """
    if len(group) <= _MOST_NAMED:
        return format_groups([group])
    return f"{group[0]},{group[1]},...,{group[-1]}"


def uneven(groups: Groups) -> str | None:
    """Return a warning where one update stands for far more workers than another."""
    smallest, largest = min(groups, key=len), max(groups, key=len)
    if len(largest) < _UNEVEN * len(smallest):
        return None
    return (
        f"group {format_groups([largest])} has {len(largest)} workers, group "
        f"{format_groups([smallest])} {len(smallest)}: an update is the mean of its group, so each "
        f"of the {len(largest)} counts {len(largest) / len(smallest):.3g} times less than one of "
        f"the {len(smallest)}."
    )


def propose_groups(speeds: Mapping[int, float], nb_workers: int) -> Groups:
    """Group workers of like speed; the number of groups follows from the speeds.

    The logarithms of the speeds are clustered by optimal one-dimensional k-means, k being the
    smallest number for which nobody is more than 1.4 times as fast as the slowest of its group:
    nobody waits for more than 29 % of a round. With like speeds there is one group.

    Args:
        speeds: Worker -> samples per second, above 0. Who is missing gets a group of its own.
        nb_workers: n; groups are of workers 1..n.

    Returns:
        Groups in the order of their lowest member, members ascending.

    Source: Jiang et al. (CCGrid 2019): groups by clustering of measured speeds.
    Differences: their code always makes three groups, and its clusters depend on where it starts.
    """
    ranked = sorted(speeds, key=lambda worker: (speeds[worker], worker))
    groups = [[worker] for worker in range(1, nb_workers + 1) if worker not in speeds]
    if ranked:
        logs = [math.log(speeds[worker]) for worker in ranked]
        cuts = _clusters(logs, math.log(_LIKE_SPEED))
        groups += [ranked[start:stop] for start, stop in itertools.pairwise(cuts)]
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _clusters(values: Sequence[float], width: float) -> list[int]:
    """Return where ascending values are cut into the fewest k-means clusters within `width`.

    Dynamic programming: with f_k(p) the least sum of squares of the first p values in k clusters,
    ``f_k(p) = min over q < p of f_(k-1)(q) + squares(q, p)``.

    Returns:
        [k + 1] cuts, from 0 to the number of values.
    """
    import numpy as np

    size = len(values)
    ascending = np.asarray(values, np.float64) - values[0]
    sums = np.concatenate([[0.0], np.cumsum(ascending)])
    square_sums = np.concatenate([[0.0], np.cumsum(ascending**2)])
    count = np.arange(size + 1)[None, :] - np.arange(size + 1)[:, None]  # [q, p]
    totals = sums[None, :] - sums[:, None]
    squares = square_sums[None, :] - square_sums[:, None] - totals**2 / np.maximum(count, 1)
    squares = np.where(count > 0, np.maximum(squares, 0.0), np.inf)
    least, choices = squares[0], [np.zeros(size + 1, np.int64)]
    while True:
        cuts = [size]
        for chosen in reversed(choices):
            cuts.append(int(chosen[cuts[-1]]))
        cuts.reverse()
        widths = [values[stop - 1] - values[start] for start, stop in itertools.pairwise(cuts)]
        if max(widths) <= width or len(choices) == size:
            return cuts
        costs = least[:, None] + squares
        choices.append(costs.argmin(axis=0))
        least = costs.min(axis=0)


def throughput(groups: Groups, speeds: Mapping[int, float]) -> float:
    """Return samples per second of all groups: in each, everybody is as fast as the slowest."""
    known = [[speeds[worker] for worker in group if worker in speeds] for group in groups]
    return sum(len(group) * min(group) for group in known if group)


def gain(current: Groups, proposed: Groups, speeds: Mapping[int, float]) -> float:
    """Predict what a change of groups is worth, as a fraction; 0 is nothing.

    It is the gain in samples per second; or, where these fall by no more than what would make the
    change back worth while, the gain in freshness: the mean Y over all updates is the number of
    groups.
    """
    before, after = throughput(current, speeds), throughput(proposed, speeds)
    if not before or not after:
        return 0.0
    faster = after / before - 1.0
    if before / after - 1.0 > _LEAST_GAIN:
        return faster
    counts = [
        sum(any(w in speeds for w in group) for group in each) for each in (current, proposed)
    ]
    return max(faster, counts[0] / counts[1] - 1.0)


def is_worth_changing(current: Groups, proposed: Groups, speeds: Mapping[int, float]) -> bool:
    """Return whether groups should change in the middle of a run."""
    return current != proposed and gain(current, proposed, speeds) > _LEAST_GAIN


def shares(groups: Groups, speeds: Mapping[int, float]) -> dict[int, float]:
    """Return each worker's part of the training set, so that all groups end together.

    ``p_w = s_g / sum over h of n_h s_h`` with s_g the lowest speed in group g: equal within a
    group. A group nobody of which was measured counts as the slowest.

    Source: Jiang et al. (CCGrid 2019) and their published code.
    Differences: nothing is rounded, so that nothing is lost.
    """
    slowest = min(speeds.values(), default=1.0)
    paces = {
        worker: min((speeds[each] for each in group if each in speeds), default=slowest)
        for group in groups
        for worker in group
    }
    total = math.fsum(paces.values())
    return {worker: paces[worker] / total for worker in sorted(paces)}


def format_shares(parts: Mapping[int, float]) -> str:
    """Write shares as --data_sharding_file reads them: a line per worker, in order of id."""
    edges = [math.fsum(list(parts.values())[:count]) for count in range(len(parts))] + [1.0]
    return "".join(f"{start!r} {end!r}\n" for start, end in itertools.pairwise(edges))
