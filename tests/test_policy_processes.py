"""A file of --policy with real processes: two workers train, and another file is refused."""

import pytest

from thinwire.runtime.run.settings import EXIT_CONFIGURATION, EXIT_REFUSED

pytestmark = [pytest.mark.timeout(200), pytest.mark.processes]

FILE = '''
import dataclasses
from exponent_of_own_policy import EXPONENT
from thinwire.ops.options import number
from thinwire.ops.policy import setting
from thinwire.ops.methods.method import METHODS as BUILT_IN
from thinwire.ops.weighting.by_staleness import StatelessWeighting, scaled

@dataclasses.dataclass(frozen=True)
class Power(StatelessWeighting):
    """Scale an update by a power of its staleness."""

    own_exponent: float = setting(number("own_exponent", EXPONENT, "Exponent.", "exponent"))

    def weigh(self, arrivals, context, state):
        ages = [context.version - arrival.computed_at for arrival in arrivals]
        factors = [max(1, age + 1) ** -self.own_exponent for age in ages]
        pairs = zip(arrivals, factors, strict=True)
        return [scaled(arrival, factor, context) for arrival, factor in pairs], state

POLICIES = {"weighting": {"own_power": Power}}
METHODS = {"own_method": BUILT_IN["asgd"] | {"weighting": "own_power"}}
'''


def test_two_workers_train_with_a_policy_of_the_user_s_and_another_file_is_refused(nodes, tmp_path):
    for folder, exponent in (("own", 0.5), ("other", 0.6)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(FILE)
        (tmp_path / folder / "exponent_of_own_policy.py").write_text(f"EXPONENT = {exponent}\n")
    own, other = (f"--policy={tmp_path / folder / 'mine.py'}" for folder in ("own", "other"))
    flags = ("--method=own_method", "--own_exponent=0.25", "--nb_workers=2", "--iter_max=40")
    nodes.common = (*nodes.common, *flags)
    nodes.start("ps", "--type_node=PS", own, "--linger_seconds=4")
    nodes.start("stranger", "--type_node=Worker", "--id_worker=1", other)
    assert nodes.wait("stranger", 60) in (EXIT_REFUSED, EXIT_CONFIGURATION)
    assert "policy: expected" in nodes.output("stranger")
    nodes.common = (*nodes.common, own)
    nodes.worker(1)
    nodes.worker(2)
    assert [nodes.wait(name, 60) for name in ("worker-1", "worker-2", "ps")] == [0, 0, 0]
    summary = nodes.summary()
    assert summary["updates"] == 40
    assert "'own_power'" in str(summary) and "'mine.py " in str(summary)
