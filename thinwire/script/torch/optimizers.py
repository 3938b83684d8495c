"""What the methods of a distributed torch optimizer do; the script keeps its optimizer object."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from thinwire.ops.types import ConfigurationError

#: Function that computes a loss and its gradients, as torch's `step` accepts it.
Closure = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class StepArguments:
    """Arguments with which a script calls an optimizer's step.

    Attributes:
        closure: Function that computes the loss and its gradients; None if they are computed.
        args: Further arguments, for a step of the script's own class.
        keywords: The same by name.
    """

    closure: Closure | None = None
    args: Sequence[Any] = ()
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def evaluated(self) -> Any:
        """Return the closure's loss, which also computes the gradients; None without a closure."""
        if self.closure is None:
            return None
        with torch.enable_grad():
            return self.closure()


class OptimizerSession(Protocol):
    """What a distributed optimizer needs of its session; implemented by `TorchSession`."""

    @property
    def is_server_stepping(self) -> bool:
        """True after the first step if the PS takes the steps of the optimizers."""

    def step(self, optimizer: Any, given: StepArguments) -> Any:
        """Do a step of an optimizer with the other workers; return the closure's loss, if any."""

    def load_slots(self) -> None:
        """Load the PS's state of the optimizers into the script's optimizers."""


class DistributedStep:
    """Methods of torch.optim.Optimizer for an optimizer that trains in a run.

    `distribute` makes the class of the script's optimizer a subclass of this class and of the class
    that it had. So the optimizer stays the object that learning-rate schedulers and a GradScaler
    know, and is an instance of its class as before.

    Attributes:
        thinwire: This worker's session with the servers.
    """

    thinwire: OptimizerSession
    # With this attribute, a GradScaler calls `step` also for gradients with infinity, and passes
    # what it found as the attributes `found_inf` and `grad_scale`. So a skipped step takes part.
    _step_supports_amp_scaling = True

    def step(self, closure: Closure | None = None, *args: Any, **keywords: Any) -> Any:
        """Push gradients instead of the optimizer's step, or step and then exchange weights.

        Args:
            closure: Function that computes the loss and its gradients; None if they are computed.
            *args: Further arguments of the step of the optimizer's own class.
            **keywords: The same by name.
        """
        # A learning-rate scheduler warns if it steps before this attribute is set.
        self._opt_called = True
        return self.thinwire.step(self, StepArguments(closure, args, keywords))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Let copies and pickles be optimizers of the class before, outside of the run."""
        self.thinwire.load_slots()
        kind = type(self).__mro__[2]
        return _restored, (kind, self.__getstate__())

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state as torch does; it is the PS's state if the PS steps."""
        self.thinwire.load_slots()
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does, before the first step if the PS steps.

        Raises:
            ConfigurationError: The PS steps, and has begun to.
        """
        if self.thinwire.is_server_stepping:
            raise ConfigurationError(
                "load_state_dict was called after the first step, but with this method the PS has "
                "the optimizer's state; expected the call before the first step. Or take a method "
                "whose workers step themselves, such as --method=dgs or --method=diloco."
            )
        super().load_state_dict(state_dict)  # type: ignore[misc]


# torch's hooks before and after a step are called around `step`, as around any optimizer's.
DistributedStep.step = torch.optim.Optimizer.profile_hook_step(  # type: ignore[method-assign]
    DistributedStep.step
)
DistributedStep.step.hooked = True  # type: ignore[attr-defined]
# A scheduler replaces `step` by a function that sets `_opt_called`, unless it has this attribute.
DistributedStep.step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _restored(kind: type, state: dict[str, Any]) -> Any:
    """Return an optimizer of a class with a state, as torch unpickles it."""
    optimizer: Any = object.__new__(kind)
    optimizer.__setstate__(state)
    return optimizer


@dataclasses.dataclass(frozen=True, eq=False)
class SteppedOptimizer:
    """An optimizer that trains in a run, and what it was before.

    Attributes:
        optimizer: The script's optimizer, whose class `distribute` has extended.
        kind: Class with which the script made the optimizer.
        modules: Modules that the optimizer updates.
    """

    optimizer: Any
    kind: type
    modules: tuple[Any, ...]

    @staticmethod
    def of(optimizer: Any, modules: list[Any], session: OptimizerSession) -> SteppedOptimizer:
        """Let an optimizer's methods go through a session; return what it was before."""
        kind = type(optimizer)
        # a scheduler that was made before has replaced `step` in the object
        if hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched"):
            del optimizer.step
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        optimizer.__class__ = type(kind.__name__, (DistributedStep, kind), names)
        optimizer.thinwire = session
        return SteppedOptimizer(optimizer, kind, tuple(modules))

    @property
    def parameters(self) -> list[Any]:
        """All parameters of the optimizer's groups, in their order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def step_alone(self, given: StepArguments) -> Any:
        """Do the step of the optimizer's own class, without hooks, which have been called."""
        step: Any = self.kind.step  # type: ignore[attr-defined]
        alone = step.__wrapped__ if getattr(step, "hooked", False) else step
        first = () if given.closure is None and not given.args else (given.closure,)
        return alone(self.optimizer, *first, *given.args, **given.keywords)

    def unscale(self) -> bool:
        """Divide the gradients by the factor of a GradScaler; return True if the step is skipped.

        A GradScaler skips a step whose gradients overflowed.
        """
        optimizer = self.optimizer
        found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
        if found is None:
            return False
        if scale is not None:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(scale.to(parameter.grad.device))
        # The optimizer's own step would divide again, or refuses what only a fused step can handle.
        optimizer.found_inf = optimizer.grad_scale = None
        return bool(found.item())
