"""The README's second picture: how long who takes to an accuracy over a thin link.

``python -m bench.peers.picture`` draws docs/images/peers.svg from the newest records in
bench/results.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bench import machine
from bench.peers.__main__ import read_records
from bench.peers.contenders import CONTENDERS
from bench.peers.plan import Known, Record
from bench.picture import finish
from thinwire.supervisor.report.figures import THEMES

PICTURE = machine.ROOT / "docs" / "images" / "peers.svg"
LINK, TARGET = "100", 0.85


@dataclasses.dataclass(frozen=True)
class SystemBar:
    """One contender.

    Attributes:
        seconds: To the accuracy.
        is_computed: From its steps without a limit and its rate over the link.
    """

    name: str
    seconds: float
    is_computed: bool

    @property
    def is_ours(self) -> bool:
        """Whose it is."""
        return CONTENDERS[self.name].sort == "ours"

    @property
    def text(self) -> str:
        """What stands beside the bar."""
        return f"{self.seconds:.0f} s{' (computed)' if self.is_computed else ''}"


def newest_records() -> Path:
    """Return the newest file of records.

    Raises:
        FileNotFoundError: There is none.
    """
    found = sorted(machine.RESULTS.glob("[0-9]*-[0-9]*-[0-9]*-peers.jsonl"))
    if not found:
        raise FileNotFoundError(f"no records in {machine.RESULTS}: run python -m bench.peers")
    return found[-1]


def bars(records: list[Record]) -> list[SystemBar]:
    """Return who reaches the accuracy, the quickest first."""
    known = Known(records, [TARGET])
    costs = ((name, known.cost(name, LINK, TARGET)) for name in CONTENDERS)
    found = [SystemBar(name, cost[0].seconds, cost[1]) for name, cost in costs if cost is not None]
    return sorted(found, key=lambda bar: bar.seconds)


def draw(found: Sequence[SystemBar], target: Path) -> None:
    """Draw a bar for each; ours stand out."""
    import matplotlib
    from matplotlib.figure import Figure

    theme = THEMES["light"]
    matplotlib.rcParams["svg.hashsalt"] = "thinwire"  # the same picture from the same numbers
    height = 0.9 + 0.27 * len(found)
    figure = Figure(figsize=(8.2, height), facecolor=theme.background, layout="constrained")
    axes = figure.add_subplot()
    for place, bar in enumerate(found):
        weight = "bold" if bar.is_ours else "normal"
        axes.barh(
            place, bar.seconds, 0.66, color=theme.series[0] if bar.is_ours else theme.series[5]
        )
        axes.text(bar.seconds + 4, place, bar.text, va="center", color=theme.text, weight=weight)
    caption = f"seconds to {100 * TARGET:.0f} % of Fashion-MNIST's test set over {LINK} Mbit/s"
    longest = max(bar.seconds for bar in found)
    finish(figure, [bar.name for bar in found], 1.2 * longest, caption, target)


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.picture", description=__doc__)
    parser.add_argument("--out", type=Path, default=PICTURE, help=".svg or .png")
    parser.add_argument("--records", type=Path, help="file of bench.peers; by default the newest")
    options = parser.parse_args()
    records = options.records or newest_records()
    draw(bars(read_records(records)), options.out)


if __name__ == "__main__":
    main()
