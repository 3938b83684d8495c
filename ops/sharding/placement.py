"""Placement policies, which divide a model among shard servers evenly or by the servers' speeds.

Every node computes the placement (division of the model among shard servers) without communication,
from the model, the number of shard servers and the placement's settings. The settings of the
placement policy are part of the run's fingerprint.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from thinwire.ops.options import ARE_NUMBERS_OR_NONE, comma_list
from thinwire.ops.policy import Policy, setting
from thinwire.ops.sharding.split import MAX_SLICE_ENTRIES, place_tensors
from thinwire.ops.types import ConfigurationError, Float64, ModelSpec, ShardLayout, Slice

#: Number of positions per MAX_SLICE_ENTRIES entries at which a placement may cut a large tensor.
_CUTS_PER_SLICE = 16
#: Approximate limit of the number of cut points within tensors of the whole model: the time of the
#: search grows with the square of the number of cut points.
_MOST_CUTS = 512
#: Number of cut points that the search processes in one array operation. This number bounds the
#: memory of the search, because an untrusted client's model may have thousands of variables.
_POINTS_AT_A_TIME = 64


class Placement(Policy, Protocol):
    """Policy that divides a model among the shard servers."""

    @property
    def name(self) -> str:
        """Value of the flag --placement that selects the placement policy."""

    def place(self, spec: ModelSpec, num_shards: int, cuts: bool = True) -> tuple[ShardLayout, ...]:
        """Return one layout (list of variable slices) per shard server.

        Args:
            spec: Paths, shapes and dtypes of the model's variables.
            num_shards: Number of shard servers, 1 or more.
            cuts: True if the policy may cut a variable, so that a shard server holds only a part of
                the variable.

        Raises:
            ConfigurationError: A shard server would have no weights.
        """


@dataclasses.dataclass(frozen=True)
class ByHash(Policy):
    """Placement that cuts large tensors into equal slices and spreads small tensors evenly."""

    name: ClassVar[str] = "hash"

    def place(self, spec: ModelSpec, num_shards: int, cuts: bool = True) -> tuple[ShardLayout, ...]:
        """Return one layout (list of variable slices) per shard server."""
        return place_tensors(spec, num_shards, cuts)


@dataclasses.dataclass(frozen=True)
class BySpeed(Policy):
    """Placement that gives each shard a range of the model in layer order, fast shards first.

    The gradients of the first layers come last out of the backward pass, and their weights are
    needed first in the next forward pass. The placement by speed gives larger parts of the model to
    faster shard servers, so that the largest value of size / speed is minimal. Among divisions of
    the model with equal largest value of size / speed, the placement selects the one with the least
    sum of size^2 / speed. The placement by speed cuts only tensors of more than 1,000,000 entries.

    Attributes:
        ps_speeds: Speed of each shard server, in any common unit, from fast to slow. Empty means
            equal speeds.

    Source: Jiang et al. (CCGrid 2019): servers fast to slow hold lower to higher layers.
    Differences: the paper's code cuts equal ranges of keys and ignores sizes and speeds.
    """

    ps_speeds: tuple[float, ...] = setting(
        comma_list(
            "ps_speeds",
            "",
            "Relative speeds of the PS shards for --placement=speed, such as 4,2,1.",
            "numbers, one per shard",
            ARE_NUMBERS_OR_NONE,
            unset="equal",
        ),
        (),
    )
    name: ClassVar[str] = "speed"

    def __post_init__(self) -> None:
        """Raise an error if shard speeds are not positive and finite, or not descending."""
        super().__post_init__()
        written = ",".join(f"{speed:g}" for speed in self.ps_speeds)
        if any(not (0 < speed < math.inf) for speed in self.ps_speeds):
            raise ConfigurationError(
                f"--ps_speeds={written}: expected finite numbers above 0, for example 4,2,1."
            )
        if list(self.ps_speeds) != sorted(self.ps_speeds, reverse=True):
            raise ConfigurationError(
                f"--ps_speeds={written}: expected descending speeds. List the shards fast to slow, "
                "in --ps_hosts too; the first shard holds the layers near the input."
            )

    def place(self, spec: ModelSpec, num_shards: int, cuts: bool = True) -> tuple[ShardLayout, ...]:
        """Return one layout (list of variable slices) per shard server.

        Raises:
            ConfigurationError: The numbers of speeds and of shard servers differ, or the model
                cannot be cut into enough parts for all shard servers.
        """
        speeds = self.speeds(num_shards)
        points = _cut_points(spec, cuts)
        if len(points) - 1 < num_shards:
            raise ConfigurationError(
                f"--nb_ps={num_shards}: this model can be cut into only {len(points) - 1} pieces "
                f"for the shards; expected 1..{len(points) - 1} shards."
            )
        edges = [points[cut] for cut in best_cuts(points, speeds)]
        return tuple(_layout(spec, start, stop) for start, stop in itertools.pairwise(edges))

    def speeds(self, num_shards: int) -> tuple[float, ...]:
        """Return the speed of every shard server (equal speeds if none are set).

        Raises:
            ConfigurationError: The numbers of speeds and of shard servers differ.
        """
        if self.ps_speeds and len(self.ps_speeds) != num_shards:
            raise ConfigurationError(
                f"--ps_speeds has {len(self.ps_speeds)} values for {num_shards} PS shards "
                "(--nb_ps, --ps_hosts); expected one value per shard, or no values."
            )
        return self.ps_speeds or (1.0,) * num_shards


def best_cuts(points: Sequence[int], speeds: Sequence[float]) -> list[int]:
    """Cut a line (the flat model) into one non-empty block per shard server, by speed.

    The positions of the cuts depend only on the arguments of `best_cuts`, so that every node
    computes the same cuts.

    Args:
        points: [P + 1] ascending positions of the possible cuts, with both ends of the line.
        speeds: [S] speeds of the shard servers that hold the blocks, in order; S <= P.

    Returns:
        [S + 1] ascending indices into `points`, from 0 to P. The largest value of size / speed is
        minimal. Among cuts with the same largest value, the sum of size^2 / speed is minimal.
    """
    import numpy as np

    largest, _ = _cheapest(points, speeds, lambda sizes, speed: sizes / speed, np.maximum)
    return _cheapest(
        points,
        speeds,
        lambda sizes, speed: np.where(sizes / speed <= largest, sizes * sizes / speed, np.inf),
        np.add,
    )[1]


def _cheapest(
    points: Sequence[int],
    speeds: Sequence[float],
    cost: Callable[[Float64, float], Float64],
    join: Callable[[Float64, Float64], Float64],
) -> tuple[float, list[int]]:
    """Return the minimal cost of a division into blocks (costs joined by `join`), and its cuts.

    The search for cuts is dynamic programming, with f_j(p) the minimal cost of j blocks of the line
    up to point p:
    ``f_j(p) = min over q < p of join(f_(j-1)(q), cost(points[p] - points[q], speed_j))``.
    """
    import numpy as np

    at = np.asarray(points, np.float64)
    before: Float64 = np.full(len(at), np.inf)
    before[0] = 0.0
    choices = []
    for speed in speeds:
        least, chosen = np.empty_like(at), np.empty(len(at), np.int64)
        for start in range(0, len(at), _POINTS_AT_A_TIME):
            some = slice(start, start + _POINTS_AT_A_TIME)
            # The array [q, p] has the sizes of the blocks between cut points q and p.
            sizes = at[None, some] - at[:, None]
            forward = sizes > 0
            costs = np.where(forward, cost(np.where(forward, sizes, 0.0), speed), np.inf)
            costs = join(before[:, None], costs)
            chosen[some], least[some] = costs.argmin(axis=0), costs.min(axis=0)
        choices.append(chosen)
        before = least
    cuts = [len(at) - 1]
    for chosen in reversed(choices):
        cuts.append(int(chosen[cuts[-1]]))
    return float(before[-1]), cuts[::-1]


def _cut_points(spec: ModelSpec, cuts: bool) -> list[int]:
    """Return the positions, between and within tensors, where the flat model may be cut."""
    points = [0]
    step = max(1, MAX_SLICE_ENTRIES // _CUTS_PER_SLICE, spec.num_parameters // _MOST_CUTS)
    for start, tensor in zip(spec.offsets, spec.tensors, strict=False):
        if cuts and tensor.size > MAX_SLICE_ENTRIES:
            points += range(start + step, start + tensor.size, step)
        points.append(start + tensor.size)
    # `set` removes duplicates, because a tensor without entries repeats its neighbor's point
    return sorted(set(points))


def _layout(spec: ModelSpec, start: int, stop: int) -> ShardLayout:
    """Return the layout of a shard server that holds the entries start:stop of the flat model."""
    slices = []
    for number, (first, last) in enumerate(itertools.pairwise(spec.offsets)):
        begin, end = max(start, first), min(stop, last)
        if begin < end:
            slices.append(Slice(number, begin - first, end - first))
    return ShardLayout(tuple(slices))


def describe_shard(spec: ModelSpec, layout: ShardLayout) -> str:
    """Describe a shard server's weights in one line: their number, and first and last slice."""

    def name(piece: Slice) -> str:
        tensor = spec.tensors[piece.tensor]
        whole = piece.size == tensor.size
        return tensor.path if whole else f"{tensor.path}[{piece.start}:{piece.stop}]"

    ends = dict.fromkeys(name(piece) for piece in (layout.slices[0], layout.slices[-1]))
    share = 100 * layout.size / spec.num_parameters
    return (
        f"{len(layout.slices)} of {len(spec.tensors)} tensors, {layout.size:,} entries "
        f"({share:.1f} %), {' .. '.join(ends)}"
    )


#: Value of the flag --placement -> class of the policy that divides the model among shard servers.
REGISTRY: dict[str, type[Placement]] = {ByHash.name: ByHash, BySpeed.name: BySpeed}
