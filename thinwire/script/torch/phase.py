"""The parameters and optimizers that a run trains, until the script changes which ones train."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

from thinwire.ops.methods.method import Method
from thinwire.ops.offer import Offer, OptimizerOffer
from thinwire.ops.optimizers.torch_groups import TorchGroups
from thinwire.ops.types import ConfigurationError
from thinwire.script.torch.groups import groups_of_optimizer
from thinwire.script.torch.modules import (
    FlatParameters,
    SharedModule,
    check_members,
    moving_buffers,
    named_parameters,
)
from thinwire.script.torch.optimizers import SteppedOptimizer
from thinwire.script.torch.states import TorchState


@dataclasses.dataclass(frozen=True)
class TorchPhase:
    """The parameters and optimizers that a run trains at present.

    Attributes:
        steps: The script's optimizers, in the order of the offer (the description for the PS).
        shared: Parameters and moving statistics that the workers share.
        own: For each optimizer, the numbers of its parameters among the shared ones, ascending
            unless two optimizers train one parameter.
        groups: Descriptions of the optimizers for a PS that steps; empty if workers step.
        num_groups: Number of parameter groups of each optimizer.
    """

    steps: tuple[SteppedOptimizer, ...]
    shared: SharedModule
    own: tuple[tuple[int, ...], ...]
    groups: tuple[TorchGroups, ...]
    num_groups: tuple[int, ...]

    @staticmethod
    def of(
        steps: Sequence[SteppedOptimizer], method: Method, before: TorchPhase | None = None
    ) -> TorchPhase:
        """Return a phase with the parameters that the optimizers train now, or trained before.

        A parameter that the script freezes later stays shared: a loop of a GAN freezes the
        discriminator in each step of the generator.

        Args:
            steps: The script's optimizers.
            method: Training method of the run.
            before: The phase before; None for the first one.

        Raises:
            ConfigurationError: The run cannot train the parameters.
        """
        names, known = _names(steps), set() if before is None else before.shared_ids
        if not any(_trains(p) for step in steps for p in step.parameters):
            raise ConfigurationError(
                "the optimizer has no parameter with requires_grad=True, so there is nothing to "
                "train; expected at least one."
            )
        named: dict[int, tuple[str, Any]] = {}
        own = []
        for step in steps:
            parameters = [p for p in step.parameters if _trains(p) or id(p) in known]
            # A loop of a GAN may freeze the generator at the discriminator's first step.
            parameters = parameters or step.parameters
            for parameter in parameters:
                if id(parameter) in named and not method.steps_on_workers:
                    raise ConfigurationError(
                        f"two optimizers train the parameter {names[id(parameter)][0]}, but a PS "
                        "updates a parameter with one; expected parameters of their own. Or take a "
                        "method whose workers step themselves: --method=dgs or --method=diloco."
                    )
                named.setdefault(id(parameter), names[id(parameter)])
            order = {number: position for position, number in enumerate(named)}
            own.append(tuple(order[id(parameter)] for parameter in parameters))
        modules = [module for step in steps for module in step.modules]
        shared = SharedModule(list(named.values()), moving_buffers(modules))
        groups = tuple(
            groups_of_optimizer(step.optimizer, step.kind, [shared.variables[n] for n in numbers])
            for step, numbers in zip(steps, own, strict=True)
            if not method.steps_on_workers
        )
        sizes = tuple(len(step.optimizer.param_groups) for step in steps)
        return TorchPhase(tuple(steps), shared, tuple(own), groups, sizes)

    @functools.cached_property
    def shared_ids(self) -> frozenset[int]:
        """Ids of the shared parameters."""
        return frozenset(id(parameter) for parameter in self.shared.variables)

    def is_left(self) -> bool:
        """Return True if an optimizer trains a parameter, or has a group, that is new."""
        known = self.shared_ids
        return any(
            len(step.optimizer.param_groups) != size
            or any(_trains(p) and id(p) not in known for p in step.parameters)
            for step, size in zip(self.steps, self.num_groups, strict=True)
        )

    @property
    def optimizers(self) -> list[Any]:
        """The script's optimizers."""
        return [step.optimizer for step in self.steps]

    @functools.cached_property
    def view(self) -> FlatParameters:
        """The shared parameters as one vector."""
        return FlatParameters(self.shared.variables)

    @property
    def states(self) -> list[TorchState]:
        """The states of the optimizers, for checkpoints of the worker."""
        return [TorchState(step.optimizer, step.kind.__name__) for step in self.steps]

    def offer(self, num_examples: int) -> Offer:
        """Return the description for the servers.

        Args:
            num_examples: Number of examples of the whole training set; 0 if unknown.
        """
        paths = [tensor.path for tensor in self.shared.spec.tensors]
        described = tuple(
            OptimizerOffer(
                groups.described(),
                iterations=max(groups.steps),
                paths=tuple(paths[number] for number in numbers),
                has_slots=any(groups.steps),
            )
            for groups, numbers in zip(self.groups, self.own, strict=False)
        )
        return Offer(
            self.shared.spec,
            optimizers=described,
            num_examples=num_examples,
            script_optimizer="+".join(step.kind.__name__ for step in self.steps),
        )

    def texts(self) -> dict[str, str]:
        """Return texts that describe the optimizers and the parameters, for a resumed run."""
        optimizers = []
        for step in self.steps:
            settings = [
                {name: value for name, value in group.items() if name not in ("params", "lr")}
                for group in step.optimizer.param_groups
            ]
            optimizers.append(f"{step.kind.__name__} {json.dumps(settings, default=str)}")
        spec = self.shared.spec
        size = f"{len(spec.tensors)} parameters with {spec.num_parameters:,} values"
        return {"optimizer": " + ".join(optimizers), "model": size}


def _trains(parameter: Any) -> bool:
    """Return True if an optimizer's step may change a parameter."""
    return bool(parameter.requires_grad) or parameter.grad is not None


def _names(steps: Sequence[SteppedOptimizer]) -> dict[int, tuple[str, Any]]:
    """Return id -> (name, parameter) of the parameters of all optimizers' modules."""
    modules: dict[int, Any] = {}
    for step in steps:
        check_members(step.optimizer, step.modules)
        modules |= {id(module): module for module in step.modules}
    return named_parameters(list(modules.values()))
