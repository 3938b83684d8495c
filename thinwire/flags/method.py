"""Flags of the training method (policies, hyper-parameters, limits on updates) of all nodes.

The flags of policies' hyper-parameters come from the fields of the policies' dataclasses
(`thinwire.ops.methods.settings`), so a policy that is added to a registry brings its flags.
"""

from __future__ import annotations

from thinwire.ops.aggregation.outliers import Guards
from thinwire.ops.methods import settings
from thinwire.ops.methods.builder import Choices
from thinwire.ops.methods.method import METHODS
from thinwire.ops.options import (
    FlagRule,
    Option,
    Topic,
    advanced,
    choice,
    file,
    integer,
    number,
    words,
)
from thinwire.ops.policy import options_of
from thinwire.ops.privacy.central import CentralPrivacy
from thinwire.ops.routing.base import Transport
from thinwire.runtime.run.settings import Run

#: Text that the help shows as the default of a policy's flag, because --method chooses the policy.
_OF_METHOD = "the method's"
_OF_RUN = settings.named(Choices)


def _of_policies(*interfaces: str) -> tuple[Option, ...]:
    """Return the flags of the policies of some interfaces, the flags that --help lists first."""
    found: dict[str, Option] = {}
    for interface in interfaces:
        found |= settings.options(interface)
    earlier = _in_earlier_topics(interfaces[0])
    options = [option for name, option in found.items() if name not in earlier]
    return tuple(sorted(options, key=lambda option: option.is_advanced))


def _in_earlier_topics(interface: str) -> set[str]:
    """Return the flags that an earlier topic lists: several interfaces may share a flag."""
    place = settings.INTERFACES.index(interface)
    return {name for earlier in settings.INTERFACES[:place] for name in settings.options(earlier)}


def _method() -> tuple[Option, ...]:
    return (
        choice("method", "adacomp", "Training method: a named combination of policies.", METHODS),
        file(
            "policy",
            "Python file with policies and training methods of your own, which may bring flags; "
            "all nodes need equal files.",
        ),
        integer(
            "batch_size",
            10,
            "Number of examples in a worker's mini-batch; on a Supervisor, in an evaluation batch.",
            "examples",
            low=1,
        ),
        _OF_RUN["learning_rate"],
        words(
            "lr_schedule",
            "",
            "Schedule of the learning rate over the run: 0.6:0.2,0.8:0.2 multiplies the "
            "rate by 0.2 after 60 % and again after 80 % of the budget; or a curve, such as "
            "cosine:warmup=0.02,floor=0.1 or linear.",
            "fraction of the budget:factor,... or a curve",
            unset="constant",
        ),
        *(_OF_RUN[name] for name in ("collective", "overlap", "schedule_clock", "bn_sync")),
    )


#: Policy interface -> help text of the flag that chooses the policy.
_POLICIES = {
    "pacer": "Rule by which a worker decides whether to push now or to take one more local step.",
    "codec": "Encoding of a worker's update: the entries that are pushed, and their form.",
    "down_codec": "Encoding of a reply: the weights that the PS sends back to a worker.",
    "router": "Rule that chooses the class of service (such as datagrams) for each block of a "
    "push.",
    "sync": "Synchronization rule: when the PS applies updates, and which workers may proceed.",
    "weighting": "Rule for the factor by which the PS scales an update, mostly by its staleness.",
    "server_optimizer": "Optimizer with which the PS applies updates to the weights.",
}


def _policies() -> tuple[Option, ...]:
    return tuple(
        choice(name, None, text, settings.options_by_value(name), unset=_OF_METHOD)
        for name, text in _POLICIES.items()
    )


_GROUPS_FILE = file(
    "groups_file",
    "File of the worker groups of --sync=gsp, one group of ids per line; replaces --groups.",
)


def placement() -> tuple[Option, ...]:
    """Return the flags of the placement of the model on the shards."""
    return (_OF_RUN["placement"], *_of_policies("placement"))


METHOD = Topic("Method", _method)
POLICIES = Topic("Policies: a value given here overrides the policy of --method", _policies)
LOCAL = Topic("Local steps of workers", lambda: _of_policies("pacer", "local_optimizer"))
CODEC = Topic("Uplink codec", lambda: _of_policies("codec"))
DOWN_CODEC = Topic("Downlink codec", lambda: _of_policies("down_codec"))
SYNC = Topic("Synchronization", lambda: (*_of_policies("sync"), *advanced(_GROUPS_FILE)))
WEIGHTING = Topic("Weighting", lambda: _of_policies("weighting"))
SERVER = Topic("Optimizer on the PS", lambda: _of_policies("server_optimizer"))
ROUTER = Topic(
    "Router: DGT sends blocks that contribute little in datagrams",
    lambda: (*_of_policies("router"), *options_of(Transport).values()),
)
GUARDS = Topic(
    "Guards against faulty devices",
    lambda: (
        _OF_RUN["aggregate"],
        *_of_policies("aggregate"),
        *sorted(options_of(Guards).values(), key=lambda option: option.is_advanced),
    ),
)
#: Flags of differential privacy; except for --dp_delta, they are equal on all nodes.
PRIVACY = Topic(
    "Differential privacy of each worker",
    advanced(
        *options_of(CentralPrivacy).values(),
        number(
            "dp_delta",
            Run.dp_delta,
            "Delta of differential privacy; status, summary and report show the epsilon for it.",
            "probability",
            rule=FlagRule(lambda value: 0 < value < 1, "must be above 0 and below 1"),
        ),
    ),
)
#: Topics of the flags that choose a training method and its hyper-parameters.
OF_METHODS = (METHOD, POLICIES, LOCAL, CODEC, DOWN_CODEC, SYNC, WEIGHTING, SERVER, ROUTER)
