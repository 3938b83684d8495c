"""Deals the GPUs of a machine to the workers that a launcher starts on it.

A Keras backend takes every GPU that its process sees: JAX reserves most of its memory, and a script
without a distribution strategy computes on the first one. So each worker's process sees only its
own GPUs, by the environment variable CUDA_VISIBLE_DEVICES. PS and Supervisor see none (`role`).
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from absl import logging

from thinwire.launcher.host_probe import visible_gpus
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.devices import ON_CPU, ON_SHARED_GPU, unless_set

_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: Prefix of the name of a MIG instance. CUDA lets a process use only one.
_MIG = "MIG"

Machine = TypeVar("Machine", bound=Hashable)


def gpus_here() -> list[str]:
    """Return the GPUs of this machine that the launcher may use, as CUDA_VISIBLE_DEVICES."""
    return visible_gpus(os.environ.get(_VISIBLE))


class GpuShares(Generic[Machine]):
    """The GPUs that each worker of a run uses, as environment variables of its process.

    With --device=auto, the launcher deals the GPUs of every machine to the workers of the machine.
    Any other --device names the device of every worker, which the worker's process sets itself.

    Args:
        machines: Worker id (from 1) -> machine on which the worker runs.
        gpus_of: Function that returns a machine's GPUs, as words of CUDA_VISIBLE_DEVICES. It is not
            called unless GPUs are dealt.
        device: Value of --device: "auto", "cpu" or "gpu:N".
        per_worker: Value of --gpus_per_worker; None to divide a machine's GPUs evenly.

    Raises:
        ConfigurationError: `per_worker` contradicts `device`, or a machine has fewer GPUs.
    """

    def __init__(
        self,
        machines: Mapping[int, Machine],
        gpus_of: Callable[[Machine], Sequence[str]],
        device: str,
        per_worker: int | None,
    ) -> None:
        if per_worker is not None and device != "auto":
            raise ConfigurationError(
                f"--gpus_per_worker={per_worker} with --device={device}: --device already names "
                "the device of every worker; leave one of the two flags out."
            )
        workers_of = collections.defaultdict(list)
        for worker, machine in machines.items():
            workers_of[machine].append(worker)
        self._variables: dict[int, dict[str, str]] = {}
        for machine, workers in workers_of.items():
            if device == "auto":
                gpus = gpus_of(machine)
                shares = deal(gpus, len(workers), per_worker, str(machine))
                variables = _variables(gpus, shares, f"{machine}")
            else:
                is_shared = device != "cpu" and len(workers) > 1
                variables = [unless_set(ON_SHARED_GPU) if is_shared else {} for _ in workers]
            self._variables |= dict(zip(workers, variables, strict=True))

    def variables(self, role: str, number: int) -> dict[str, str]:
        """Return the environment variables of a worker's GPUs; empty for nodes of other roles.

        Args:
            role: Role of the node, a value of --type_node.
            number: Shard id or worker id of the node.
        """
        return dict(self._variables[number]) if role == "Worker" else {}


def _variables(
    gpus: Sequence[str], shares: Sequence[tuple[str, ...]], machine: str
) -> list[dict[str, str]]:
    """Return the environment variables of each worker of a machine, from the worker's GPUs."""
    if not gpus:  # the workers may find other accelerators than NVIDIA's
        return [{} for _ in shares]
    num_workers = collections.Counter(gpu for share in shares for gpu in share)
    if unused := [gpu for gpu in gpus if gpu not in num_workers]:
        logging.info("GPUs of %s that no worker uses: %s", machine, ", ".join(unused))
    return [
        {_VISIBLE: ",".join(share)}
        | (unless_set(ON_SHARED_GPU) if any(num_workers[gpu] > 1 for gpu in share) else {})
        if share
        else dict(ON_CPU)
        for share in shares
    ]


def deal(
    gpus: Sequence[str], num_workers: int, per_worker: int | None, machine: str = "this machine"
) -> list[tuple[str, ...]]:
    """Return the GPUs of each worker of one machine; all workers get the same number of GPUs.

    While there are enough GPUs, workers share none. Otherwise the workers take the GPUs round
    robin, so that the numbers of workers on two GPUs differ by at most one.

    Args:
        gpus: The machine's GPUs, as words of CUDA_VISIBLE_DEVICES.
        num_workers: Number of workers that run on the machine, at least 1.
        per_worker: Number of GPUs per worker; None for all GPUs, divided evenly, but at least 1.
        machine: Name of the machine for error messages.

    Raises:
        ConfigurationError: The machine has fewer GPUs than one worker must get, or a worker would
            get several MIG instances.

    >>> deal(["0", "1", "2", "3"], 2, None), deal(["0", "1"], 3, None)
    ([('0', '1'), ('2', '3')], [('0',), ('1',), ('0',)])
    """
    has_mig = any(gpu.startswith(_MIG) for gpu in gpus)
    if per_worker is None:
        per_worker = min(len(gpus), 1 if has_mig else max(1, len(gpus) // num_workers))
    if per_worker > len(gpus):
        raise ConfigurationError(
            f"--gpus_per_worker={per_worker}: {machine} has {len(gpus)} GPUs that this run may use "
            f"({_VISIBLE} may hide some); give a smaller number, or leave --gpus_per_worker out."
        )
    if has_mig and per_worker > 1:
        raise ConfigurationError(
            f"--gpus_per_worker={per_worker}: CUDA lets a process use only one MIG instance, and "
            f"{machine} has MIG instances; give --gpus_per_worker=1."
        )
    places = range(per_worker)
    return [
        tuple(gpus[(worker * per_worker + place) % len(gpus)] for place in places)
        for worker in range(num_workers)
    ]
