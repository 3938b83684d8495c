"""Methods: named compositions of the policies. A method is data.

Adding one is a row in METHODS; adding a policy is a class and a row in its package's registry.
`thinwire.ops.methods.builder.compose` makes a Method and checks that its policies go together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from thinwire.ops.aggregation.aggregates import Mean
from thinwire.ops.aggregation.base import Aggregate
from thinwire.ops.codecs.base import Codec
from thinwire.ops.codecs.error_feedback import ErrorFeedback, with_momentum, wrappers_of
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.downlink.base import DownCodec
from thinwire.ops.optimizers.base import LocalStep, ServerUpdate
from thinwire.ops.pacing.base import Pacer
from thinwire.ops.pacing.fixed import Fixed
from thinwire.ops.privacy.central import NoPrivacy, Privacy
from thinwire.ops.routing.base import Router
from thinwire.ops.sharding.placement import Placement
from thinwire.ops.sync.base import SyncPolicy
from thinwire.ops.types import ConfigurationError, Kind, ModelSpec, ShardLayout, describe
from thinwire.ops.weighting.base import Weighting

#: Names of the policy interfaces, in the order of the fingerprint; each is also a flag.
INTERFACES = ("pacer", "codec", "down_codec", "router", "sync", "weighting", "server_optimizer")
#: Hyper-parameter that a row may have besides, named like its flag and its field of `Choices`,
#: where None is "not given" -> what it belongs to, an interface or another one. It holds where that
#: has the row's value, unless its own flag is given.
BELONGS_TO = {
    "local_steps": "pacer",
    "local_optimizer": "pacer",
    "chunk_k": "codec",
    "value_dtype": "codec",
    "error_feedback": "codec",
    "error_decay": "error_feedback",
    "local_weight_decay": "local_optimizer",
    "prox_mu": "pacer",
    "global_lr": "server_optimizer",
    "momentum": "server_optimizer",
}

_DENSE_ASP = {
    "pacer": "every",
    "codec": "dense",
    "down_codec": "dense",
    "router": "reliable",
    "sync": "asp",
    "weighting": "none",
    "server_optimizer": "sgd",
}

#: Local steps, and a round of all workers: what methods of the federated family have in common.
_ROUNDS = _DENSE_ASP | {"pacer": "fixed", "sync": "bsp"}

#: --method value -> the value of each interface that it stands for, and of hyper-parameters, each
#: after what it belongs to.
METHODS: dict[str, dict[str, Any]] = {
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
    # SparseLoCo: what 30 local steps have changed, 64 of 4,096 entries in 2 bits, the rest kept
    # and decaying. arXiv 2508.15706.
    "sparseloco": _DENSE_ASP
    | {
        "pacer": "fixed",
        "local_steps": 30,
        "local_optimizer": "adamw",
        "codec": "chunked_topk",
        "chunk_k": 64,
        "value_dtype": "int2",
        "error_feedback": True,
        "error_decay": 0.95,
        "down_codec": "relay",
        "sync": "bsp",
        "global_lr": 1.0,
    },
    # Federated averaging: the mean of the workers' weights, by their examples.
    # McMahan et al., AISTATS 2017, arXiv 1602.05629.
    "fedavg": _ROUNDS | {"weighting": "samples", "local_steps": 20},
    # FedOpt: an adaptive step by the mean change; adagrad and yogi by --server_optimizer.
    # Reddi et al., ICLR 2021, arXiv 2003.00295.
    "fedopt": _ROUNDS
    | {"weighting": "samples", "server_optimizer": "adam", "local_steps": 20, "global_lr": 0.01},
    # FedProx: local gradients are pulled to the round's base. Li, Sahu et al., arXiv 1812.06127.
    "fedprox": _ROUNDS | {"weighting": "samples", "local_steps": 20, "prox_mu": 0.01},
    # DiLoCo: many steps of AdamW, then an outer step with Nesterov's momentum.
    # Douillard et al., arXiv 2311.08105.
    "diloco": _ROUNDS
    | {
        "server_optimizer": "nesterov",
        "local_steps": 500,
        "local_optimizer": "adamw",
        "local_weight_decay": 0.1,
        "global_lr": 0.7,
        "momentum": 0.9,
    },
    # DGT: blocks that contribute much travel reliably, the rest in datagrams by priority.
    # Zhou et al., Future Generation Computer Systems 121, 2021.
    "dgt": _DENSE_ASP | {"router": "dgt", "sync": "bsp"},
}


def row_with(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's row, with what was given in the place of its values.

    Args:
        name: A key of METHODS.
        given: Values by interface and hyper-parameter; None is not given.

    Returns:
        The value of each interface, and those hyper-parameters of the row that hold, or were given.
    """
    row = METHODS[name]
    found: dict[str, Any] = {}
    for key, value in row.items():
        owner = BELONGS_TO.get(key)
        if given.get(key) is not None:
            found[key] = given[key]
        elif owner is None or found.get(owner) == row[owner]:
            found[key] = value
    return found


def of_methods(name: str) -> str:
    """Return what the rows have of a hyper-parameter, for its flag's help, such as "5 with a"."""
    return "".join(f"{row[name]} with {method}, " for method, row in METHODS.items() if name in row)


@dataclasses.dataclass(frozen=True)
class Method:
    """The policies that together train a model."""

    name: str
    pacer: Pacer
    codec: Codec
    down_codec: DownCodec
    router: Router
    sync: SyncPolicy
    weighting: Weighting
    server: ServerUpdate
    choices: Mapping[str, str]  # of `row_with` as text, for people and summary.json
    placement: Placement
    local: LocalStep  # between two exchanges, where changes of weights travel
    bn_sync: bool  # BatchNorm's moving statistics are averaged over the workers
    schedule_clock: str = "batches"  # what a schedule of a script's optimizer is read at
    collective: str = THROUGH_PS  # where gradients are summed; see thinwire.ops.collectives
    overlap: bool = False  # workers compute the next gradient while an exchange is under way
    aggregate: Aggregate = dataclasses.field(default_factory=Mean)  # of one release's updates
    privacy: Privacy = dataclasses.field(default_factory=NoPrivacy)  # of each worker
    warnings: tuple[str, ...] = ()  # about choices that make no difference

    @property
    def kind(self) -> Kind:
        """What updates mean on the wire."""
        return Kind.DELTA if Kind.DELTA in (self.pacer.kind, self.codec.kind) else Kind.GRADIENT

    @property
    def takes_local_steps(self) -> bool:
        """Whether workers step on their own weights, whose changes then are what is coded."""
        return self.pacer.kind is Kind.DELTA

    @property
    def ahead(self) -> float:
        """The part of what a worker has not sent that its local steps begin with."""
        wrappers = wrappers_of(self.codec)
        return max((each.ahead for each in wrappers if isinstance(each, ErrorFeedback)), default=0)

    @property
    def steps_together(self) -> bool:
        """Whether each step of the model is one mini-batch of every worker."""
        return self.ends_epochs_together and self.pacer.longest_round == 1

    @property
    def ends_epochs_together(self) -> bool:
        """Whether all workers step in common rounds, and equally often in each of these."""
        one_group = len(self.sync.groups) == 1 and self.sync.auto is None
        return one_group and self.sync.takes_all and not self.pacer.queries

    @property
    def steps_on_workers(self) -> bool:
        """Whether the script's own optimizer steps, and workers submit weights, not gradients."""
        return self.local.brings_weights

    @property
    def takes_momentum(self) -> bool:
        """Whether a script's plain momentum becomes the codec's; the script then steps without."""
        return with_momentum(self.codec, 0.0) is not self.codec

    def of_part(self, num_examples: int, batch_size: int) -> Method:
        """Return the method of a worker with so many examples, in mini-batches of a size.

        Only the worker needs it, so that the fingerprint is that of the method without it.
        """
        if not isinstance(self.pacer, Fixed):
            return self
        return dataclasses.replace(self, pacer=self.pacer.of_part(num_examples, batch_size))

    def with_momentum(self, momentum: float) -> Method:
        """Return the method with the momentum of a worker's script, where it was left open.

        Only the worker needs it, so that the fingerprint is that of the method without it.
        """
        return dataclasses.replace(self, codec=with_momentum(self.codec, momentum))

    def step_rate(self, learning_rate: float, fraction: float) -> float:
        """Return the rate that the PS steps with.

        Args:
            learning_rate: Scheduled; the workers' own, where they take local steps.
            fraction: Of the budget that is consumed, 0 to 1.
        """
        changes = self.kind is Kind.DELTA
        return self.server.outer_rate(fraction) if changes else learning_rate

    def place(self, spec: ModelSpec, num_shards: int) -> tuple[ShardLayout, ...]:
        """Return what each shard holds; every node finds the same.

        Raises:
            ConfigurationError: One would hold nothing, or the optimizer needs one shard.
        """
        if num_shards > 1 and self.server.needs_one_shard:
            raise ConfigurationError(
                f"--nb_ps={num_shards}: the optimizer clips by the norm of all gradients together "
                "(global_clipnorm), which no shard alone knows. Take --nb_ps=1, or compile the "
                "model with clipnorm or clipvalue instead."
            )
        return self.placement.place(spec, num_shards, not self.server.needs_whole_variables)

    def num_averaged(self, num_parameters: int) -> int:
        """Return how many values of the local optimizer's state are averaged by shard 0."""
        return self.local.num_averaged(num_parameters) if self.takes_local_steps else 0

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
            ("privacy", self.privacy),
        )
        rows = [(name, self.choices[name]) for name in INTERFACES]
        rows.append(("bn_sync", str(self.bn_sync)))
        rows.append(("schedule_clock", self.schedule_clock))
        rows.append(("placement", self.placement.name))
        rows.append(("collective", self.collective))
        rows.append(("overlap", str(self.overlap)))
        rows.append(("aggregate", self.aggregate.name))
        rows += [
            (f"{interface}.{name}", str(value))
            for interface, policy in policies
            for name, value in describe(policy).items()
        ]
        return rows
