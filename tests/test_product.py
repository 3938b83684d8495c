"""Valid mixes of policies run to the end: their weights stay finite, nothing blocks.

The ordinary tests have a covering array of all valid pairs. `make product` adds one of all triples
of the choices that decide which worker waits and what a shard stores, and 10,000 mixes drawn at
random. `.ci/run` runs a tenth of these mixes, chosen by the commit's digest.
"""

import functools
import heapq
import itertools
import random

import numpy as np
import pytest

from tests.virtual.run import MiniRun
from tests.virtual.toy import method
from thinwire.ops.codecs.registry import CODECS
from thinwire.ops.downlink.registry import DOWN_CODECS
from thinwire.ops.pacing.registry import PACERS
from thinwire.ops.routing.registry import ROUTERS
from thinwire.ops.sync.groups import AutoGroups
from thinwire.ops.sync.rule import SYNC_RULES
from thinwire.ops.types import VALUE_DTYPES, ConfigurationError
from thinwire.ops.weighting.registry import WEIGHTINGS

CHOICES = {
    "pacer": [("every", 1), ("fixed", 1), ("fixed", 3), ("esync", 1)],
    "codec": list(CODECS),
    "value_dtype": [*VALUE_DTYPES, "int2", "sign"],
    "down_codec": list(DOWN_CODECS),
    "router": list(ROUTERS),
    "sync": ["bsp", "bsp+drawn", "asp", "ssp", "gsp", "gsp+bound", "gsp+auto", "quorum"],
    "weighting": list(WEIGHTINGS),
    "server_optimizer": ["sgd", "momentum", "adam"],  # the others go the way of adam
    "nb_ps": [1, 2, 3],
}
assert {name for name, _ in CHOICES["pacer"]} == set(PACERS)
assert {name.partition("+")[0] for name in CHOICES["sync"]} == set(SYNC_RULES)


def compose(mix):
    name, _, extra = mix["sync"].partition("+")
    pacer, local_steps = mix["pacer"]
    names = ("codec", "down_codec", "router", "weighting", "server_optimizer")
    overrides = {name: mix[name] for name in names}
    parted = {"dgt_block_size": 8, "dgt_k": 0.3} if mix["router"] == "dgt" else {}
    chosen = method(
        "asgd",
        nb_workers=3,
        compression_rate=0.3,
        powersgd_rank=1 if mix["codec"] == "powersgd" else 2,  # the tensors are too small for 2
        value_dtype=mix["value_dtype"],
        local_steps=local_steps if pacer == "fixed" else None,
        groups=((1, 2), (3,)) if name == "gsp" and extra != "auto" else None,
        auto_groups=AutoGroups(6) if extra == "auto" else None,
        fraction=0.6 if extra == "drawn" else 1.0,
        staleness_bound=2 if extra == "bound" or name == "ssp" else None,
        overrides=overrides | {"sync": name, "pacer": pacer},
        **parted,
    )
    return chosen


def run_mix(mix, trains: bool = True) -> bool:
    """Train one mix if requested; return False if `compose` rejects the mix."""
    try:
        chosen = compose(mix)
    except ConfigurationError:
        return False
    if not trains:
        return True
    run = MiniRun(chosen, iter_max=16, nb_ps=mix["nb_ps"], rate=0.05).run()
    assert not run.deadlocked(), mix
    assert [core.version for core in run.shards] == [16] * mix["nb_ps"], mix
    assert np.isfinite(run.theta).all(), mix
    return True


#: Choices that decide which worker waits, and what a shard stores.
ENTANGLED = ("pacer", "codec", "down_codec", "sync", "weighting", "nb_ps")


def covering_array(strength: int, among=tuple(CHOICES), seed: int = 1):
    """Greedy: legal mixes until all legal values of any `strength` of these choices have met."""
    rng = random.Random(seed)
    usual = {name: values[0] for name, values in CHOICES.items()}
    missing = {
        tuple(zip(names, values, strict=True))
        for names in itertools.combinations(among, strength)
        for values in itertools.product(*(CHOICES[name] for name in names))
    }
    missing = {values for values in missing if run_mix(usual | dict(values), trains=False)}
    names_of = functools.cache(repr)
    while missing:
        best, covered = None, set()
        starts = heapq.nsmallest(200, missing, key=names_of)
        for _ in range(30):
            start = dict(rng.choice(starts))
            mix = usual | {name: start.get(name, rng.choice(CHOICES[name])) for name in among}
            found = {
                values
                for values in itertools.combinations(((n, mix[n]) for n in among), strength)
                if values in missing
            }
            if len(found) > len(covered) and run_mix(mix, trains=False):
                best, covered = mix, found
        missing -= covered
        if best is not None:
            yield best


@pytest.mark.parametrize(
    "strength, among",
    [(2, tuple(CHOICES)), pytest.param(3, ENTANGLED, marks=pytest.mark.product)],
)
def test_all_pairs_and_triples_of_policy_values(strength, among):
    mixes = list(covering_array(strength, among))
    assert len(mixes) < 400
    assert all([run_mix(mix) for each in mixes for mix in compiled_once(each)])


def compiled_once(mix):
    """Return mixes with all pairs of one, in which at most one shard compiles an optimizer.

    tests/test_compiled_optimizers.py has compiled optimizers on several shards.
    """
    if mix["server_optimizer"] != "adam" or mix["nb_ps"] == 1:
        return [mix]
    return [mix | {"nb_ps": 1}, mix | {"server_optimizer": "momentum"}]


#: Half of the 604,800 mixes are legal, and each takes 40 ms: all of them would take hours.
MIXES_OF_TEST = 100


@pytest.mark.product
@pytest.mark.parametrize("seed", range(100))
def test_mixes_of_all_policies(seed):
    rng = random.Random(seed)
    for _ in range(MIXES_OF_TEST):
        run_mix({name: rng.choice(values) for name, values in CHOICES.items()})
