"""What a method may be whose workers sum and step among themselves (--collective)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.ops.codecs.dense import Dense
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.downlink.exact import DownDense
from thinwire.ops.routing.reliable import Reliable
from thinwire.ops.sync.rule import ClosedGroupSync, GroupSync
from thinwire.ops.types import ConfigurationError
from thinwire.ops.weighting.base import Unweighted

if TYPE_CHECKING:
    from thinwire.ops.methods.method import Method

#: Seam -> the one policy that leaves nothing for a parameter server to do.
_ONLY = {
    "codec": Dense,
    "down_codec": DownDense,
    "router": Reliable,
    "weighting": Unweighted,
}


def rule_for(rule: GroupSync, collective: str) -> GroupSync:
    """Return the rule with rounds closed to joiners, where a collective needs that."""
    plain = len(rule.groups) == 1 and rule == GroupSync(rule.groups)  # all that one group can be
    closes = plain and collective != THROUGH_PS
    return ClosedGroupSync(rule.groups) if closes else rule


def check(method: Method) -> None:
    """Refuse a collective with anything that only a parameter server can do.

    Raises:
        ConfigurationError: Not one synchronous group, or updates that are not plain and dense.
    """
    if method.collective == THROUGH_PS:
        return
    here = f"--collective={method.collective}"
    if not isinstance(method.sync, ClosedGroupSync):
        raise ConfigurationError(
            f"{here} sums over all workers in every round, and --sync={method.seams['sync']} does "
            "not wait for all of them; take --method=bsp or --method=esync, or --collective=ps."
        )
    for seam, policy in _ONLY.items():
        if not isinstance(getattr(method, seam), policy):
            raise ConfigurationError(
                f"{here} sends plain dense sums from worker to worker, and this is "
                f"--{seam}={method.seams[seam]}; leave --{seam} out, or take --collective=ps."
            )
    if method.codec.value_dtype != "float32":
        raise ConfigurationError(
            f"{here} sums float32, and this is --value_dtype={method.codec.value_dtype}; leave it "
            "out, or take --collective=ps."
        )


def check_shards(method: Method, nb_ps: int) -> None:
    """Refuse several shards where the workers step by themselves.

    Raises:
        ConfigurationError: There are several.
    """
    if method.collective != THROUGH_PS and nb_ps > 1:
        raise ConfigurationError(
            f"--collective={method.collective} leaves the PS only a copy of the model, and this "
            f"run has {nb_ps} shards (--nb_ps, --ps_hosts); take one."
        )
