"""Read, write, compare and propose groups of workers that step together.

The functions of `thinwire.ops.sync.groups` are pure (without side effects). `propose_groups` forms
groups of workers from measured speeds. The module `thinwire.runtime.run.sync_files` writes
proposed groups of workers to files. The parameter server measures the workers' speeds and decides
when groups change.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from thinwire.ops.options import integer, number
from thinwire.ops.policy import Policy, setting
from thinwire.ops.types import ConfigurationError

#: Groups of worker ids. Each id is in exactly one group.
Groups = tuple[tuple[int, ...], ...]

#: Largest number of workers that a group's name lists in full.
_MOST_NAMED = 100
#: Least ratio of group sizes, largest group to smallest group, for which `uneven` returns a
#: warning.
_UNEVEN = 4
#: Largest ratio of worker speeds, fastest to slowest worker, in a proposed group.
_LIKE_SPEED = 1.4
#: Groups of workers change during a run only if the predicted relative gain in speed or freshness
#: (`gain`) exceeds this fraction.
_LEAST_GAIN = 0.10


@dataclasses.dataclass(frozen=True)
class AutoGroups(Policy):
    """Settings of worker groups that are formed from measured worker speeds.

    Attributes:
        groups_warmup_updates: Number of weight updates during which speeds are measured and every
            worker is a group of one.
        regroup_interval_seconds: Least time between two changes of the worker groups, in seconds;
            0: groups are formed only once.
    """

    groups_warmup_updates: int = setting(
        integer(
            "groups_warmup_updates",
            None,
            "Number of updates after which --groups=auto first groups the workers by speed.",
            "updates",
            low=1,
            unset="10 per worker",
        ),
        dataclasses.MISSING,
    )
    regroup_interval_seconds: float = setting(
        number(
            "regroup_interval_seconds",
            None,
            "Shortest time between two changes of the groups by --groups=auto; 0: form groups "
            "once.",
            "seconds",
            low=0.0,
            unset="60",
        ),
        60.0,
    )


def one_group(nb_workers: int) -> Groups:
    """Return groups that consist of one group with all workers 1..nb_workers."""
    return (tuple(range(1, nb_workers + 1)),)


def groups_of_one(nb_workers: int) -> Groups:
    """Return a group of one worker for each of the workers 1..nb_workers."""
    return tuple((worker,) for worker in range(1, nb_workers + 1))


def parse_groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Read groups of worker ids from text like ``"1,2|3,4"``.

    >>> parse_groups("1, 2|3")
    ((1, 2), (3,))

    Raises:
        ConfigurationError: A token in the text of groups is not a worker id.
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
    """Read one group of worker ids per line; ``#`` starts a comment, blank lines are skipped.

    Raises:
        ConfigurationError: The groups file has no group, or a token in it is not a worker id.
    """
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    groups = "|".join(line for line in lines if line)
    if not groups:
        raise ConfigurationError(
            f"--groups_file={path} holds no group; expected one line of worker ids per group."
        )
    return parse_groups(groups)


def format_groups(groups: Iterable[Iterable[int]]) -> str:
    """Format groups of worker ids as text like ``"1,2|3,4"``, which `parse_groups` reads."""
    return "|".join(",".join(map(str, group)) for group in groups)


def name_of(group: Sequence[int]) -> str:
    """Return a group's name for metrics and files: its worker ids, abbreviated for large groups.

    >>> name_of((1, 2, 4)), name_of(tuple(range(3, 301)))
    ('1,2,4', '3,4,...,300')
    """
    if len(group) <= _MOST_NAMED:
        return format_groups([group])
    return f"{group[0]},{group[1]},...,{group[-1]}"


def uneven(groups: Groups) -> str | None:
    """Return a warning if one worker group has far more workers than another group, else None."""
    smallest, largest = min(groups, key=len), max(groups, key=len)
    if len(largest) < _UNEVEN * len(smallest):
        return None
    return (
        f"group {format_groups([largest])} has {len(largest)} workers, group "
        f"{format_groups([smallest])} has {len(smallest)}: an update is the mean of its group, so "
        f"the update of each worker of the larger group counts {len(largest) / len(smallest):.3g} "
        "times less than a worker of the smaller group."
    )


def propose_groups(speeds: Mapping[int, float], nb_workers: int) -> Groups:
    """Form groups of workers of similar speed, from the workers' measured speeds.

    The number of proposed groups follows from the workers' speeds.

    `propose_groups` clusters the logarithms of the worker speeds by optimal one-dimensional
    k-means, with the smallest k for which every worker is at most 1.4 times as fast as the slowest
    worker of its group, so no worker waits for more than 29 % of a round. If all workers have
    similar speeds, `propose_groups` forms one group.

    Args:
        speeds: Worker id -> measured training examples per second, above 0. A worker without a
            measured speed gets a group of one worker.
        nb_workers: Number n of workers; the proposed groups contain workers 1..n.

    Returns:
        Groups of worker ids in the order of their lowest member; members are ascending.

    Source: Jiang et al. (CCGrid 2019): groups by clustering of measured speeds. Differences: the
    published code always makes three groups, and its clusters depend on the start values.
    """
    ranked = sorted(speeds, key=lambda worker: (speeds[worker], worker))
    groups = [[worker] for worker in range(1, nb_workers + 1) if worker not in speeds]
    if ranked:
        logs = [math.log(speeds[worker]) for worker in ranked]
        cuts = _clusters(logs, math.log(_LIKE_SPEED))
        groups += [ranked[start:stop] for start, stop in itertools.pairwise(cuts)]
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _clusters(values: Sequence[float], width: float) -> list[int]:
    """Cut ascending values into the fewest k-means clusters that each span at most `width`.

    The search for clusters is dynamic programming: f_k(p) is the least sum of squared deviations of
    the first p values in k clusters, with
    ``f_k(p) = min over q < p of f_(k-1)(q) + squares(q, p)``.

    Returns:
        [k + 1] indices into `values` at which clusters begin or end, from 0 to len(values).
    """
    import numpy as np

    size = len(values)
    ascending = np.asarray(values, np.float64) - values[0]
    sums = np.concatenate([[0.0], np.cumsum(ascending)])
    square_sums = np.concatenate([[0.0], np.cumsum(ascending**2)])
    # the element [q, p] of `count` is the number of values from index q to index p - 1
    count = np.arange(size + 1)[None, :] - np.arange(size + 1)[:, None]
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
    """Return the examples per second of all groups; a group is as fast as its slowest worker."""
    known = [[speeds[worker] for worker in group if worker in speeds] for group in groups]
    return sum(len(group) * min(group) for group in known if group)


def gain(current: Groups, proposed: Groups, speeds: Mapping[int, float]) -> float:
    """Predict the gain from replacing `current` worker groups by `proposed`, as a fraction.

    The gain from new worker groups is the relative change in training examples per second. If new
    worker groups lower the training examples per second so far that changing back would be
    worthwhile, the result of `gain` is the relative change, which is negative. If new worker groups
    do not lower the training examples per second much, the result of `gain` is at least the gain in
    freshness: the mean staleness over all updates is the number of groups, so fewer groups make
    updates fresher.
    """
    before, after = throughput(current, speeds), throughput(proposed, speeds)
    if not before or not after:
        return 0.0
    faster = after / before - 1.0
    if before / after - 1.0 > _LEAST_GAIN:
        return faster
    counts = [
        sum(any(w in speeds for w in group) for group in groups) for groups in (current, proposed)
    ]
    return max(faster, counts[0] / counts[1] - 1.0)


def is_worth_changing(current: Groups, proposed: Groups, speeds: Mapping[int, float]) -> bool:
    """Return True if a run should replace its `current` groups of workers by `proposed`."""
    return current != proposed and gain(current, proposed, speeds) > _LEAST_GAIN


def shares(groups: Groups, speeds: Mapping[int, float]) -> dict[int, float]:
    """Return worker -> fraction of the training set for which all groups finish at the same time.

    Worker w in group g gets the fraction ``p_w = s_g / sum over h of n_h s_h`` of the training set,
    where s_h is the lowest speed of a worker in group h and n_h is the number of workers in group
    h. Workers of one group get equal fractions of the training set from `shares`. A worker group
    without a measured speed counts as being as slow as the slowest group.

    Source: Jiang et al. (CCGrid 2019) and their published code. Differences: the fractions are not
    rounded, so that no training data are left out.
    """
    slowest = min(speeds.values(), default=1.0)
    paces = {
        worker: min((speeds[member] for member in group if member in speeds), default=slowest)
        for group in groups
        for worker in group
    }
    total = math.fsum(paces.values())
    return {worker: paces[worker] / total for worker in sorted(paces)}


def format_shares(parts: Mapping[int, float]) -> str:
    """Format workers' fractions of the training set as text for --data_sharding_file."""
    edges = [math.fsum(list(parts.values())[:count]) for count in range(len(parts))] + [1.0]
    return "".join(f"{start!r} {end!r}\n" for start, end in itertools.pairwise(edges))
