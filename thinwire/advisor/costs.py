"""What compositions were seen to cost in accuracy: the rows of costs.toml, in words.

A row is of one measured run against the exact method on the same work. It is no prediction: other
models, data and rates cost something else.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib
from collections.abc import Iterable, Sequence

from thinwire.runtime.telemetry.evaluation import is_larger_better, is_share

_FILE = pathlib.Path(__file__).with_name("costs.toml")


@dataclasses.dataclass(frozen=True)
class MeasuredCost:
    """One measured composition.

    Attributes:
        flags: Of the composition, but for --local_steps.
        metric: For example accuracy, or loss.
        value: Of the composition.
        reference: Of the exact method.
        against: The exact method.
        work: Model, data, workers and length.
        source: Page and heading below docs/.
        local_steps: That it was measured with; 0: it has none.
    """

    flags: tuple[str, ...]
    metric: str
    value: float
    reference: float
    against: str
    work: str
    source: str
    local_steps: int = 0

    def __str__(self) -> str:
        """Return the cost in words."""
        worse = self.reference - self.value
        if not is_larger_better(self.metric):
            worse = -worse
        much = f"{100 * abs(worse):.1f} points" if is_share(self.metric) else f"{abs(worse):.3g}"
        side = "worse" if worse > 0 else "better"
        with_steps = f" with --local_steps={self.local_steps}" if self.local_steps else ""
        return (
            f"{self.metric} {much} {side} than {self.against}{with_steps} "
            f"({self.value:g} and {self.reference:g}; {self.work}; docs/{self.source})"
        )


def load() -> list[MeasuredCost]:
    """Return all rows."""
    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))["cost"]
    return [MeasuredCost(**row | {"flags": tuple(row["flags"])}) for row in rows]


def of(flags: Sequence[str], rows: Iterable[MeasuredCost]) -> MeasuredCost | None:
    """Return the row that is nearest to a composition; None if none is of such flags.

    A row is of a composition that has all its flags; the one with the most flags counts, and of
    several the one whose local steps are as many, or next above, or else the most.
    """
    steps = next((int(f.partition("=")[2]) for f in flags if f.startswith("--local_steps=")), 0)
    fitting = [row for row in rows if set(row.flags) <= set(flags)]

    def fits(row: MeasuredCost) -> tuple[int, bool, int]:
        enough = row.local_steps >= steps
        return len(row.flags), enough, -row.local_steps if enough else row.local_steps

    return max(fitting, key=fits, default=None)
