"""Methods: named compositions of the six policies. A method is data.

Adding one is a row in METHODS; adding a policy is a class and a row in its seam's REGISTRY.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from thinwire.ops.aggregation import base as aggregation_base
from thinwire.ops.codecs.registry import coding_of
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.downlink.base import DownCodec
from thinwire.ops.downlink.exact import DownDelta
from thinwire.ops.methods import validation as methods_validation
from thinwire.ops.optimizers.local import LocalUpdate
from thinwire.ops.optimizers.server import ServerUpdate
from thinwire.ops.pacing import pacers
from thinwire.ops.routing.registry import Router
from thinwire.ops.sharding import placement
from thinwire.ops.sync.base import SyncPolicy
from thinwire.ops.sync.groups import uneven
from thinwire.ops.types import ConfigurationError, Kind, describe
from thinwire.ops.weighting import base as weighting_base
from thinwire.ops.weighting.dc_asgd import DcAsgd

#: Names of the seams, in the order of the fingerprint; each is also a flag.
SEAMS = ("pacer", "codec", "down_codec", "router", "sync", "weighting", "server_optimizer")

_DENSE_ASP = {
    "pacer": "every",
    "codec": "dense",
    "down_codec": "dense",
    "router": "reliable",
    "sync": "asp",
    "weighting": "none",
    "server_optimizer": "sgd",
}

#: --method value -> the seam values it stands for.
METHODS: dict[str, dict[str, str]] = {
    # AdaComp: top-k per tensor, rest dropped; eta / max(1, sigma) per entry.
    # Hardy et al., arXiv 1702.04683.
    "adacomp": _DENSE_ASP | {"codec": "topk", "down_codec": "delta", "weighting": "per_entry"},
    # Asynchronous SGD: every push is one step.
    "asgd": _DENSE_ASP,
    # Asynchronous SGD with delay compensation. Zheng et al., ICML 2017.
    "dcasgd": _DENSE_ASP | {"weighting": "dc_asgd"},
    # Bulk synchronous: one update per round of all workers.
    "bsp": _DENSE_ASP | {"sync": "bsp"},
    "ssgd": _DENSE_ASP | {"sync": "bsp"},
    # Stale synchronous: nobody runs more than the bound ahead. Ho et al., NIPS 2013.
    "ssp": _DENSE_ASP | {"sync": "ssp"},
    # Grouping-SGD: synchronous groups, asynchronous among each other, 1/Y.
    # Jiang et al., CCGrid 2019.
    "gsp": _DENSE_ASP | {"sync": "gsp", "weighting": "inverse"},
    # Dual-Way Gradient Sparsification: a momentum that lives in the residual. ICPP 2020.
    "dgs": _DENSE_ASP | {"codec": "dgs", "down_codec": "auto"},
    # Deep Gradient Compression: momentum correction, factor masking, warm-up.
    # Lin, Han et al., ICLR 2018.
    "dgc": _DENSE_ASP | {"codec": "dgc", "down_codec": "auto"},
    # Gradient Dropping: what is not sent is kept for later. Aji and Heafield, EMNLP 2017.
    "gd": _DENSE_ASP | {"codec": "gd", "down_codec": "auto"},
    # ESync: fast workers take extra local steps while the slowest finishes its one.
    # Li, Zhou et al., IEEE TSC 15(4).
    "esync": _DENSE_ASP | {"pacer": "esync", "sync": "bsp"},
    # DGT: blocks that contribute much travel reliably, the rest in datagrams by priority.
    # Zhou et al., Future Generation Computer Systems 121, 2021.
    "dgt": _DENSE_ASP | {"router": "dgt", "sync": "bsp"},
}

#: Field of LocalUpdate -> its flag.
LOCAL_FLAGS = {
    "optimizer": "local_optimizer",
    "momentum": "local_momentum",
    "opt_state": "local_opt_state",
    "rate_factor": "local_lr",
}


@dataclasses.dataclass(frozen=True)
class Method:
    """Six policies that together train a model."""

    name: str
    pacer: pacers.Pacer
    codec: Any
    down_codec: DownCodec
    router: Router
    sync: SyncPolicy
    weighting: weighting_base.Weighting
    server: ServerUpdate
    seams: Mapping[str, str]  # seam -> value, for people and summary.json
    placement: placement.Placement
    local: LocalUpdate  # between two exchanges, where changes of weights travel
    bn_sync: bool  # BatchNorm's moving statistics are averaged over the workers
    collective: str = (
        THROUGH_PS  # who sums: the PS, or the workers by one of thinwire.ops.collectives
    )
    overlap: bool = False  # workers compute the next gradient while an exchange is under way
    # What the updates of one release are merged into.
    aggregate: aggregation_base.Aggregate = dataclasses.field(default_factory=aggregation_base.Mean)

    @property
    def kind(self) -> Kind:
        """What updates mean on the wire."""
        return Kind.DELTA if Kind.DELTA in (self.pacer.kind, self.codec.kind) else Kind.GRADIENT

    @property
    def takes_local_steps(self) -> bool:
        """Whether workers step on their own weights, whose changes then are what is coded."""
        return self.pacer.kind is Kind.DELTA

    def num_averaged(self, num_parameters: int) -> int:
        """Return how many values of the local optimizer's state are averaged by shard 0."""
        return self.local.num_averaged(num_parameters) if self.takes_local_steps else 0

    def check(self) -> list[str]:
        """Refuse what cannot work; return warnings about what has no effect.

        Raises:
            ConfigurationError: The pacer's updates are not what the codec sends, or the
                weighting cannot weigh them, the rule of release cannot merge them, or the PS
                cannot step with them.
        """
        if self.codec.kind is Kind.DELTA and self.takes_local_steps:
            raise ConfigurationError(
                f"--codec={self.seams['codec']} makes its own weight change of every gradient; "
                f"--pacer={self.seams['pacer']} already sends changes of weights."
            )
        if isinstance(self.weighting, DcAsgd) and self.kind is Kind.DELTA:
            raise ConfigurationError(
                f"--weighting=dc_asgd compensates gradients; --pacer={self.seams['pacer']} with "
                f"--codec={self.seams['codec']} sends changes of weights. Take another weighting, "
                "or --pacer=every with a codec of gradients."
            )
        methods_validation.check(self)
        self._refuse_overlap()
        self.router.check(coding_of(self.codec).value_dtype)
        self._refuse_server_choices()
        self._refuse_local_choices()
        found = [text for empty, text in self._empty_choices() if empty]
        found += aggregation_base.check(self)
        warning = uneven(self.sync.groups)
        return [*found, warning] if warning else found

    def _refuse_overlap(self) -> None:
        """Refuse to compute ahead where the next step must start from the answer."""
        if not self.overlap:
            return
        reasons = (
            (
                self.takes_local_steps,
                f"--pacer={self.seams['pacer']}, whose local steps start from the answer",
            ),
            (
                self.collective != THROUGH_PS,
                f"--collective={self.collective}, where every worker steps the model itself",
            ),
            (
                self.weighting.needs_copies,
                f"--weighting={self.seams['weighting']}, which needs the "
                "model that a gradient was computed at, and the PS keeps the one that it last gave",
            ),
        )
        for holds, what in reasons:
            if holds:
                raise ConfigurationError(
                    f"--overlap computes the next gradient before an exchange is answered; this is "
                    f"{what}. Leave one of them out."
                )

    def _refuse_server_choices(self) -> None:
        """Refuse an optimizer on the PS where changes of weights are simply added."""
        if self.kind is Kind.GRADIENT or self.server.feeds_deltas or self.server.keeps_sparse:
            return
        if self.takes_local_steps:
            way_out = "give --server_optimizer too, or take --local_momentum"
        else:
            way_out = "the codec has its own momentum; for decay there is --worker_weight_decay"
        raise ConfigurationError(
            f"--server_optimizer={self.server.optimizer} with --momentum={self.server.momentum:g} "
            f"and --weight_decay={self.server.weight_decay:g}: with --pacer={self.seams['pacer']} "
            f"and --codec={self.seams['codec']} the PS adds changes of weights, which hold the "
            f"learning rate already. Leave these out ({way_out})."
        )

    def _refuse_local_choices(self) -> None:
        """Refuse settings of local steps where no local steps are taken."""
        usual = describe(LocalUpdate())
        given = [
            LOCAL_FLAGS[name]
            for name, value in describe(self.local).items()
            if value != usual[name]
        ]
        if given and not self.takes_local_steps:
            raise ConfigurationError(
                f"--{', --'.join(given)}: a worker takes local steps only with --pacer=esync, or "
                f"with --pacer=fixed and --local_steps above 1; this is --pacer="
                f"{self.seams['pacer']}. Leave out, or change the pacer."
            )

    def _empty_choices(self) -> list[tuple[bool, str]]:
        """Return (applies, warning) for each choice that cannot make a difference."""
        one_group = len(self.sync.groups) == 1
        delays = self.weighting if isinstance(self.weighting, DcAsgd) else None
        blind = delays is not None and delays.shares_backup  # acts on fresh updates too
        alone = (
            one_group and not blind and not isinstance(self.weighting, weighting_base.Unweighted)
        )
        coding = coding_of(self.codec)
        dense_up = not coding.sends_fraction
        per_entry = isinstance(self.weighting, weighting_base.PerEntry)
        delta_down = isinstance(self.down_codec, DownDelta)
        return [
            *self.router.empty_choices(coding_of(self.codec)),
            (
                alone,
                f"--weighting={self.seams['weighting']} does nothing with one group: "
                "nobody is stale.",
            ),
            (
                delays is not None and delays.strength == 0,
                "--dcasgd_lambda=0: nothing is compensated.",
            ),
            (
                not dense_up and coding.compression_rate > 1,
                "--compression_rate above 1: it is the "
                "fraction of entries kept, not how many times fewer are sent. All are sent, as "
                "by 1.",
            ),
            (
                per_entry and dense_up and not alone,
                "--weighting=per_entry with dense updates: every entry has the same staleness.",
            ),
            (
                delta_down and dense_up,
                "--down_codec=delta with dense updates: every entry changes, replies are dense.",
            ),
            (
                delta_down and not dense_up and not self.server.keeps_sparse,
                "--down_codec=delta with momentum, adam or weight decay on the PS: every entry "
                "changes, replies are dense.",
            ),
            (
                self.pacer.asks and not (self.sync.waits_for_start or self.sync.auto),
                f"--pacer={self.seams['pacer']} "
                "with groups of one: nobody waits, so every worker takes one local step.",
            ),
            (
                self.local.opt_state != "keep" and not self.local.has_slots,
                f"--local_opt_state={self.local.opt_state} with plain SGD: it keeps no state.",
            ),
            (
                one_group and self.sync.bound is not None,
                "--staleness_bound with one group: nobody can run ahead.",
            ),
        ]

    def fingerprint(self) -> list[tuple[str, str]]:
        """Return (name, value) of everything two nodes must agree on."""
        policies = (
            ("pacer", self.pacer),
            ("codec", self.codec),
            ("down_codec", self.down_codec),
            ("router", self.router),
            ("sync", self.sync),
            ("weighting", self.weighting),
            ("server", self.server),
            ("local", self.local),
            ("placement", self.placement),
            ("aggregate", self.aggregate),
        )
        rows = [(seam, self.seams[seam]) for seam in SEAMS]
        rows.append(("bn_sync", str(self.bn_sync)))
        rows.append(("placement", self.placement.name))
        rows.append(("collective", self.collective))
        rows.append(("overlap", str(self.overlap)))
        rows.append(("aggregate", self.aggregate.name))
        rows += [
            (f"{seam}.{name}", str(value))
            for seam, policy in policies
            for name, value in describe(policy).items()
        ]
        return rows
