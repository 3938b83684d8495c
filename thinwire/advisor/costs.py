"""Reads costs.toml, the table of measured accuracy costs of compositions of training policies.

A row of costs.toml compares the metric of one measured composition of policies with the metric of
an exact method on the same model and data. A row of costs.toml is not a prediction: with other
models, data and compression rates the accuracy cost differs.
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
    """The measured metric of one composition of policies, and the metric of an exact method.

    Attributes:
        flags: Flags that select the composition of policies, without --local_steps.
        metric: Name of the measured metric, for example "accuracy" or "loss".
        value: Measured value of the metric with this composition of policies.
        reference: Value of the metric measured with the exact training method, the baseline.
        against: Name of the exact training method of the comparison, for example "bsp".
        work: Model, data, number of workers and length of the measured run, as text.
        source: Page and heading below docs/ that document the measurement.
        local_steps: Value of --local_steps in the measurement; 0 if it was not given.
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
        """Return the measured accuracy cost of this composition as one line of text."""
        worse = self.reference - self.value
        if not is_larger_better(self.metric):
            worse = -worse
        amount = f"{100 * abs(worse):.1f} points" if is_share(self.metric) else f"{abs(worse):.3g}"
        side = "worse" if worse > 0 else "better"
        with_steps = f" with --local_steps={self.local_steps}" if self.local_steps else ""
        return (
            f"{self.metric} {amount} {side} than {self.against}{with_steps} "
            f"({self.value:g} and {self.reference:g}; {self.work}; docs/{self.source})"
        )


def load() -> list[MeasuredCost]:
    """Return all rows of costs.toml, the table of measured accuracy costs of training policies."""
    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))["cost"]
    return [MeasuredCost(**row | {"flags": tuple(row["flags"])}) for row in rows]


def of(flags: Sequence[str], rows: Iterable[MeasuredCost]) -> MeasuredCost | None:
    """Return the row of measured costs that fits a composition's flags best; None if no row fits.

    A row of measured costs fits a composition of policies that has all flags of the row. Among
    fitting rows of measured costs, the row with the most flags is best. Among rows with equally
    many flags, the best row has the composition's number of local steps, else the next larger
    number of local steps, else the largest number of local steps.
    """
    steps = next((int(f.partition("=")[2]) for f in flags if f.startswith("--local_steps=")), 0)
    fitting = [row for row in rows if set(row.flags) <= set(flags)]

    def fits(row: MeasuredCost) -> tuple[int, bool, int]:
        enough = row.local_steps >= steps
        return len(row.flags), enough, -row.local_steps if enough else row.local_steps

    return max(fitting, key=fits, default=None)
