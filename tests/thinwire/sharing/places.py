"""Every worker's place in a run, and what `share` gives to each."""

from thinwire.data.partition import PartitionRule
from thinwire.sharing.data import WorkerPlace, share


def places(num_workers, one_group=True, partition="iid", **more):
    rule = PartitionRule(partition, num_workers, seed=7, dirichlet_alpha=0.5)
    return [WorkerPlace(w, num_workers, one_group, rule, **more) for w in range(1, num_workers + 1)]


def shared_by_all(arguments, *args, **more):
    return [share(arguments, place) for place in places(*args, **more)]
