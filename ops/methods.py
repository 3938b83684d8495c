"""Methods: named compositions of the six policies. A method is data.

Adding one is a row in METHODS; adding a policy is a class and a row in its seam's REGISTRY.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ops import among_workers, codecs, down_codecs, pacing, placement, routing, sync, weighting
from ops.collectives import THROUGH_PS
from ops.dc_asgd import DcAsgd
from ops.grouping import AutoGroups, uneven
from ops.local_update import LocalUpdate
from ops.server_update import ServerUpdate
from ops.types import ConfigurationError, Kind, describe

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
}

#: Field of LocalUpdate -> its flag.
LOCAL_FLAGS = {
    "optimizer": "local_optimizer",
    "momentum": "local_momentum",
    "opt_state": "local_opt_state",
    "rate_factor": "local_lr",
}

#: Bound of --sync=ssp when neither flag nor method says otherwise.
DEFAULT_SSP_BOUND = 3


@dataclasses.dataclass(frozen=True)
class Method:
    """Six policies that together train a model."""

    name: str
    pacer: pacing.Pacer
    codec: Any
    down_codec: down_codecs.DownCodec
    router: routing.Reliable
    sync: sync.SyncRule
    weighting: weighting.Weighting
    server: ServerUpdate
    seams: Mapping[str, str]  # seam -> value, for people and summary.json
    placement: placement.Placement
    local: LocalUpdate  # between two exchanges, where changes of weights travel
    bn_sync: bool  # BatchNorm's moving statistics are averaged over the workers
    collective: str = THROUGH_PS  # who sums: the PS, or the workers by one of ops.collectives

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
                weighting cannot weigh them, or the PS cannot step with them.
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
        among_workers.check(self)
        self._refuse_server_choices()
        self._refuse_local_choices()
        found = [text for empty, text in self._empty_choices() if empty]
        warning = uneven(self.sync.groups)
        return [*found, warning] if warning else found

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
        given = [LOCAL_FLAGS[name] for name, value in describe(self.local).items()
                 if value != usual[name]]  # fmt: skip
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
        alone = one_group and not blind and not isinstance(self.weighting, weighting.Unweighted)
        dense_up = not codecs.coding_of(self.codec).sends_fraction
        per_entry = isinstance(self.weighting, weighting.PerEntry)
        delta_down = isinstance(self.down_codec, down_codecs.DownDelta)
        return [
            (alone, f"--weighting={self.seams['weighting']} does nothing with one group: "
             "nobody is stale."),
            (delays is not None and delays.strength == 0, "--dcasgd_lambda=0: nothing is "
             "compensated."),
            (per_entry and dense_up and not alone, "--weighting=per_entry with dense updates: "
             "every entry has the same staleness."),
            (delta_down and dense_up, "--down_codec=delta with dense updates: every entry "
             "changes, replies are dense."),
            (delta_down and not dense_up and not self.server.keeps_sparse,
             "--down_codec=delta with momentum, adam or weight decay on the PS: every entry "
             "changes, replies are dense."),
            (self.pacer.asks and not (self.sync.waits_for_start or self.sync.auto),
             f"--pacer={self.seams['pacer']} "
             "with groups of one: nobody waits, so every worker takes one local step."),
            (self.local.opt_state != "keep" and not self.local.has_slots,
             f"--local_opt_state={self.local.opt_state} with plain SGD: it keeps no state."),
            (one_group and self.sync.bound is not None, "--staleness_bound with one group: "
             "nobody can run ahead."),
        ]  # fmt: skip

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
        )
        rows = [(seam, self.seams[seam]) for seam in SEAMS]
        rows.append(("bn_sync", str(self.bn_sync)))
        rows.append(("placement", self.placement.name))
        rows.append(("collective", self.collective))
        rows += [
            (f"{seam}.{name}", str(value))
            for seam, policy in policies
            for name, value in describe(policy).items()
        ]
        return rows


@dataclasses.dataclass(frozen=True)
class Choices(codecs.CodecChoices):
    """What the command line says about the method; None means "as the method has it"."""

    method: str
    nb_workers: int
    overrides: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    down_ratio: float | None = None  # of down codecs sparse and auto, like the next two
    down_value_dtype: str = "float32"
    resync_every: int = 0
    local_steps: int = 1
    eps: str = "auto"  # of pacer esync, like the next three
    query: str = "blocking"
    smoothing: str = "ema:0.5"
    max_local_steps: int = 0
    groups: tuple[tuple[int, ...], ...] | None = None
    auto_groups: AutoGroups | None = None
    bound: int | None = None
    window: int = 1024
    beyond_window: str = "count"
    dcasgd_lambda: float | None = None
    dcasgd_variant: str = "constant"
    dcasgd_decay: float | None = None
    dcasgd_backup: str = "per_worker"
    momentum: float | None = None
    weight_decay: float = 0.0
    global_lr: float = 1.0
    local_optimizer: str = "sgd"
    local_momentum: float | None = None
    local_opt_state: str = "keep"
    local_lr: float | None = None  # if given, `learning_rate` is what it is compared with
    learning_rate: float = 0.02
    bn_sync: bool = True
    placement: str = "hash"
    ps_speeds: tuple[float, ...] = ()
    collective: str = THROUGH_PS


def compose(choices: Choices) -> Method:
    """Build the method that the choices ask for.

    Raises:
        ConfigurationError: Unknown names, illegal values, or choices that exclude each other.
    """
    if choices.method not in METHODS:
        raise ConfigurationError(
            f"--method={choices.method!r}: expected one of {', '.join(METHODS)}."
        )
    given = {seam: value for seam, value in choices.overrides.items() if value is not None}
    seams = METHODS[choices.method] | given
    down_codecs.refuse_idle(seams["down_codec"], vars(choices))
    _refuse_idle("weighting", weighting.REGISTRY, seams["weighting"], choices)
    codec = codecs.build(seams["codec"], choices, choices.nb_workers, choices.learning_rate)
    # Changes that hold the learning rate are added: an optimizer would apply a rate once more.
    feeds = "server_optimizer" in given and codec.kind is Kind.GRADIENT
    method = Method(
        name=choices.method,
        pacer=_pick(pacing.REGISTRY, seams["pacer"], choices),
        codec=codec,
        down_codec=_pick(down_codecs.REGISTRY, seams["down_codec"], choices),
        router=_pick(routing.REGISTRY, seams["router"], choices),
        sync=among_workers.rule_for(_sync_rule(seams["sync"], choices), choices.collective),
        weighting=_pick(weighting.REGISTRY, seams["weighting"], choices),
        server=_server(seams["server_optimizer"], choices, feeds),
        seams=seams,
        local=_local(choices),
        bn_sync=choices.bn_sync,
        placement=_placement(choices),
        collective=choices.collective,
    )
    return method


def _pick(registry: Mapping[str, type], name: str, choices: Choices) -> Any:
    """Make the policy `name`, giving its fields the choices of the same name."""
    policy = registry[name]
    fields = {field.name for field in dataclasses.fields(policy)}
    return policy(**{key: value for key, value in vars(choices).items() if key in fields})


def _refuse_idle(seam: str, registry: Mapping[str, type], name: str, choices: Choices) -> None:
    """Refuse settings with the prefix of a policy that was not chosen."""
    usual = {field.name: field.default for field in dataclasses.fields(Choices)}
    for other, policy in registry.items():
        prefix = other.replace("_", "") + "_"
        own = [field.name for field in dataclasses.fields(policy) if other != name]
        for setting in (setting for setting in own if setting.startswith(prefix)):
            value = getattr(choices, setting)
            if value != usual[setting]:
                raise ConfigurationError(
                    f"--{setting}={value} is for --{seam}={other}, and this is --{seam}={name}; "
                    "change one."
                )


def _sync_rule(name: str, choices: Choices) -> sync.SyncRule:
    takes_default = sync.REGISTRY[name].needs_bound and choices.bound is None
    bound = DEFAULT_SSP_BOUND if takes_default else choices.bound
    return sync.make_rule(name, choices.nb_workers, choices.groups, bound, choices.auto_groups)


def _placement(choices: Choices) -> placement.Placement:
    if choices.ps_speeds and choices.placement != "speed":
        raise ConfigurationError(
            f"--ps_speeds={','.join(f'{speed:g}' for speed in choices.ps_speeds)} is for "
            f"--placement=speed, and this is --placement={choices.placement}; change one."
        )
    return _pick(placement.REGISTRY, choices.placement, choices)  # type: ignore[no-any-return]


def _local(choices: Choices) -> LocalUpdate:
    """A local rate of its own follows the schedule: it is kept as a factor of the scheduled one."""
    default_momentum = 0.9 if choices.local_optimizer == "momentum" else 0.0
    momentum, rate = choices.local_momentum, choices.local_lr
    return LocalUpdate(
        optimizer=choices.local_optimizer,
        momentum=default_momentum if momentum is None else momentum,
        opt_state=choices.local_opt_state,
        rate_factor=1.0 if rate is None else rate / choices.learning_rate,
    )


def _server(name: str, choices: Choices, feeds_deltas: bool) -> ServerUpdate:
    default_momentum = 0.9 if name == "momentum" else 0.0
    return ServerUpdate(
        optimizer=name,
        momentum=default_momentum if choices.momentum is None else choices.momentum,
        weight_decay=choices.weight_decay,
        global_lr=choices.global_lr,
        feeds_deltas=feeds_deltas,
    )
