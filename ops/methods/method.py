"""Training methods: named combinations of policies (codec, optimizer and others) as data.

A new training method needs only a new entry in the dict METHODS. A new policy needs a class, and an
entry in the registry of its package. `thinwire.ops.methods.builder.compose` builds a Method and
checks that its policies work together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from thinwire.ops.aggregation.aggregates import Aggregate, Mean
from thinwire.ops.codecs.base import Codec
from thinwire.ops.codecs.error_feedback import ErrorFeedback, with_momentum, wrappers_of
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.downlink.base import DownCodec
from thinwire.ops.optimizers.base import LocalStep, ServerUpdate
from thinwire.ops.pacing.base import Pacer
from thinwire.ops.pacing.fixed import Fixed
from thinwire.ops.policy import describe
from thinwire.ops.privacy.central import Privacy
from thinwire.ops.routing.base import Router
from thinwire.ops.sharding.placement import Placement
from thinwire.ops.sync.base import SyncRule
from thinwire.ops.types import ConfigurationError, Kind, ModelSpec, ShardLayout
from thinwire.ops.weighting.base import Weighting

#: Names of the policy interfaces, in the order in which the run's fingerprint lists them. Each name
#: is also a flag.
INTERFACES = ("pacer", "codec", "down_codec", "router", "sync", "weighting", "server_optimizer")
_DENSE_ASP = {
    "pacer": "every",
    "codec": "dense",
    "down_codec": "dense",
    "router": "reliable",
    "sync": "asp",
    "weighting": "none",
    "server_optimizer": "sgd",
}

#: Policies that all federated methods share: local steps, and rounds of all workers.
_ROUNDS = _DENSE_ASP | {"pacer": "fixed", "sync": "bsp"}

#: --method value -> the method's row: value of each interface, and hyper-parameters under the names
#: of their flags. A hyper-parameter's value counts only while its owner has the row's value
#: (`thinwire.ops.methods.settings.owner_of`); it stands after its owner, because `row_with` reads a
#: row in order. A flag that the user gives replaces the row's value.
METHODS: dict[str, dict[str, Any]] = {
    # AdaComp: sends the largest gradient entries of each tensor and drops the others; learning rate
    # eta / max(1, staleness) per entry. Hardy et al., arXiv 1702.04683.
    "adacomp": _DENSE_ASP | {"codec": "topk", "down_codec": "delta", "weighting": "per_entry"},
    # Asynchronous SGD: the PS takes one step for every push.
    "asgd": _DENSE_ASP,
    # Asynchronous SGD with delay compensation. Zheng et al., ICML 2017.
    "dcasgd": _DENSE_ASP | {"weighting": "dc_asgd"},
    # Bulk synchronous SGD: the PS takes one step per round, with the updates of all workers.
    "bsp": _DENSE_ASP | {"sync": "bsp"},
    "ssgd": _DENSE_ASP | {"sync": "bsp"},
    # Stale synchronous parallel: no worker is more steps ahead of the slowest worker than the
    # bound. Ho et al., NIPS 2013.
    "ssp": _DENSE_ASP | {"sync": "ssp"},
    # Grouping-SGD: groups of workers that step synchronously inside and asynchronously between
    # groups, with updates weighted by 1/Y (Y is the staleness). Jiang et al., CCGrid 2019.
    "gsp": _DENSE_ASP | {"sync": "gsp", "weighting": "inverse"},
    # Dual-Way Gradient Sparsification: the residual of unsent entries holds the momentum. ICPP
    # 2020.
    "dgs": _DENSE_ASP | {"codec": "dgs", "down_codec": "auto"},
    # Deep Gradient Compression: momentum correction, factor masking, warm-up.
    # Lin, Han et al., ICLR 2018.
    "dgc": _DENSE_ASP | {"codec": "dgc", "down_codec": "auto"},
    # Gradient Dropping: unsent entries stay in the residual. Aji and Heafield, EMNLP 2017.
    "gd": _DENSE_ASP | {"codec": "gd", "down_codec": "auto"},
    # ESync: fast workers take extra local steps while the slowest worker finishes its step.
    # Li, Zhou et al., IEEE TSC 15(4).
    "esync": _DENSE_ASP | {"pacer": "esync", "sync": "bsp"},
    # SparseLoCo: sends the change of 30 local steps, 64 of 4,096 entries in 2 bits each. Unsent
    # entries stay in a decaying residual. arXiv 2508.15706.
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
    # Federated averaging: mean of the workers' weights, weighted by their numbers of examples.
    # McMahan et al., AISTATS 2017, arXiv 1602.05629.
    "fedavg": _ROUNDS | {"weighting": "samples", "local_steps": 20},
    # FedOpt: an adaptive optimizer steps with the mean change. --server_optimizer also accepts
    # adagrad and yogi.
    # Reddi et al., ICLR 2021, arXiv 2003.00295.
    "fedopt": _ROUNDS
    | {"weighting": "samples", "server_optimizer": "adam", "local_steps": 20, "global_lr": 0.01},
    # FedProx: a proximal term pulls local steps to the weights at the round's start. Li, Sahu et
    # al., arXiv 1812.06127.
    "fedprox": _ROUNDS | {"weighting": "samples", "local_steps": 20, "prox_mu": 0.01},
    # DiLoCo: many local steps of AdamW, then an outer step with Nesterov's momentum.
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
    # DGT: sends important blocks reliably, and other blocks in datagrams by priority.
    # Zhou et al., Future Generation Computer Systems 121, 2021.
    "dgt": _DENSE_ASP | {"router": "dgt", "sync": "bsp"},
}


#: Fields of `Method` with the policies whose settings are in the fingerprint, in its order.
_POLICIES = (
    *("pacer", "codec", "down_codec", "router", "sync", "weighting"),
    *("server", "local", "placement", "aggregate", "privacy"),
)


@dataclasses.dataclass(frozen=True)
class Method:
    """Training method: the policies and settings that train a model.

    Attributes:
        name: Name of the training method, the value of the flag --method.
        pacer: Policy that decides after which local steps a worker pushes its update.
        codec: Policy that codes (compresses) the workers' updates.
        down_codec: Policy that codes (compresses) the shard servers' replies.
        router: Policy that chooses for each part of an update whether it is sent over gRPC or in
            UDP datagrams.
        sync: Policy that decides which workers' updates the parameter server merges into one step,
            and which workers wait.
        weighting: Policy that scales each worker's update before the parameter server merges
            updates.
        server: Optimizer with which the parameter server applies merged updates.
        choices: Name of a policy interface or hyper-parameter -> its value, from `row_with`, to
            show to users and write to summary.json.
        placement: Policy that divides the model among the shard servers.
        local: Optimizer with which a worker takes local steps between two exchanges.
        bn_sync: True if shard 0 averages BatchNorm's moving statistics over the workers.
        schedule_clock: Argument of the learning rate schedule of a script's optimizer: the number
            of "batches", or of optimizer "steps".
        collective: THROUGH_PS if the parameter server sums gradients, or the name of the all-reduce
            algorithm by which workers sum gradients.
        overlap: True if workers compute the next gradient during an exchange with the parameter
            server.
        aggregate: Policy that merges the workers' updates of one round.
        privacy: Policy that clips workers' updates and adds noise to their mean.
        warnings: Warnings about flags that have no effect with the training method.
    """

    name: str
    pacer: Pacer
    codec: Codec
    down_codec: DownCodec
    router: Router
    sync: SyncRule
    weighting: Weighting
    server: ServerUpdate
    choices: Mapping[str, str]
    placement: Placement
    local: LocalStep
    bn_sync: bool
    schedule_clock: str = "batches"
    collective: str = THROUGH_PS
    overlap: bool = False
    aggregate: Aggregate = dataclasses.field(default_factory=Mean)
    privacy: Privacy = dataclasses.field(default_factory=Privacy)
    warnings: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """Meaning of the values that workers push: gradient, change of weights, or weights."""
        return Kind.DELTA if Kind.DELTA in (self.pacer.kind, self.codec.kind) else Kind.GRADIENT

    @property
    def takes_local_steps(self) -> bool:
        """True if workers take local steps and send the change of their weights."""
        return self.pacer.kind is Kind.DELTA

    @property
    def ahead(self) -> float:
        """Fraction (0 to 1) of its unsent values that a worker adds to pulled weights."""
        codecs = wrappers_of(self.codec)
        return max((codec.ahead for codec in codecs if isinstance(codec, ErrorFeedback)), default=0)

    @property
    def steps_together(self) -> bool:
        """True if each step of the server's optimizer uses one mini-batch of every worker."""
        return self.ends_epochs_together and self.pacer.longest_round == 1

    @property
    def ends_epochs_together(self) -> bool:
        """True if all workers train in common rounds, with equally many local steps per round."""
        one_group = len(self.sync.groups) == 1 and self.sync.auto is None
        return one_group and self.sync.takes_all and not self.pacer.queries

    @property
    def steps_on_workers(self) -> bool:
        """True if a script's own optimizer steps on each worker, not the server's optimizer."""
        return self.local.brings_weights

    @property
    def takes_momentum(self) -> bool:
        """True if the gradient codec applies the momentum of the script's SGD optimizer."""
        return with_momentum(self.codec, 0.0) is not self.codec

    def of_part(self, num_examples: int, batch_size: int) -> Method:
        """Return the training method, adapted to the number of a worker's training examples.

        The fingerprint of the training method is equal for all workers, because the fingerprint
        leaves out a worker's number of mini-batches.

        Args:
            num_examples: Number of the worker's training examples.
            batch_size: Number of training examples in each of the worker's mini-batches.
        """
        if not isinstance(self.pacer, Fixed):
            return self
        return dataclasses.replace(self, pacer=self.pacer.of_part(num_examples, batch_size))

    def with_momentum(self, momentum: float) -> Method:
        """Return the training method with the script's momentum, if no flag sets a momentum.

        Only the worker's gradient codec uses the momentum of the script's optimizer. Nodes compare
        fingerprints of training methods without the script's momentum.
        """
        return dataclasses.replace(self, codec=with_momentum(self.codec, momentum))

    @property
    def awaits_offer(self) -> bool:
        """True if the PS steps with a script's optimizers, which no worker has sent yet."""
        return not self.server.traits.num_optimizers

    def place(self, spec: ModelSpec, num_shards: int) -> tuple[ShardLayout, ...]:
        """Return the slices of variables of each shard server (its layout), equal on all nodes.

        Raises:
            ConfigurationError: A shard server would get no weights, or the parameter server's
                optimizer works with one shard server only.
        """
        if num_shards > 1 and self.server.traits.one_shard:
            raise ConfigurationError(
                f"--nb_ps={num_shards}: the optimizer clips by the norm of all gradients together "
                "(global_clipnorm), but each PS shard knows only a part of the gradients. Take "
                "--nb_ps=1, or compile the model with clipnorm or clipvalue instead."
            )
        return self.placement.place(spec, num_shards, not self.server.traits.whole_variables)

    def num_averaged(self, num_parameters: int) -> int:
        """Return how many values of the workers' optimizer states shard server 0 averages."""
        return self.local.num_averaged(num_parameters) if self.takes_local_steps else 0

    def fingerprint(self) -> list[tuple[str, str]]:
        """Return (name, value) of each training method setting that must be equal on all nodes."""
        rows = [(name, self.choices[name]) for name in INTERFACES]
        rows.append(("bn_sync", str(self.bn_sync)))
        rows.append(("schedule_clock", self.schedule_clock))
        rows.append(("placement", self.placement.name))
        rows.append(("collective", self.collective))
        rows.append(("overlap", str(self.overlap)))
        rows.append(("aggregate", self.aggregate.name))
        rows += [
            (f"{interface}.{name}", str(value))
            for interface in _POLICIES
            for name, value in describe(getattr(self, interface)).items()
        ]
        return rows
