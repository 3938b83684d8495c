"""Interface of a script's shared variables, which sessions read and assign as flat vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from thinwire.ops.types import ModelSpec

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class FlatView(Protocol):
    """View of a list of variables (may be empty) as one float32 vector.

    Attributes:
        size: Number of float32 values in the flat vector of all variables.
    """

    size: int

    @property
    def values(self) -> list[Any]:
        """The variables' values as tensors."""

    def read(self) -> Float32:
        """Return a copy of all variables' values as one vector, [size] float32."""

    def assign(self, flat: Any) -> None:
        """Overwrite the variables with the values of `flat`, an array [size] float32."""

    def parts(self, flat: Any) -> list[tuple[Any, Any]]:
        """Return pairs (variable, the variable's values in `flat`), as tensors."""


class SharedWeights(Protocol):
    """The variables of a script that all workers train, with a signature equal on every worker.

    Attributes:
        variables: Shared variables, in the order of the signature.
        spec: Names and shapes of the shared variables.
        statistics: Variables with moving statistics, which the run may average.
    """

    variables: list[Any]
    spec: ModelSpec
    statistics: list[Any]

    def view(self, variables: Sequence[Any]) -> FlatView:
        """Return a flat view of some variables of the model."""

    def assign(self, flat: Float32) -> None:
        """Overwrite the shared variables [num_parameters], as an assignment of the script's own."""
