"""Draw the picture of bytes and accuracy from the measured table in docs/lab/measurements.md.

``python -m bench.systems.picture`` writes docs/images/bytes_accuracy.svg.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from thinwire.supervisor.report.figures import THEMES

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "lab/measurements.md"
PICTURE = ROOT / "docs" / "images" / "bytes_accuracy.svg"
HEADING = "### Sparse both ways"
#: Number of the model's parameters, and number of updates, of the runs in the table.
PARAMETERS, UPDATES = 1_199_882, 4690
#: Arm in the table -> label in the picture, from top to bottom.
ARMS = {
    "asgd": "asgd: all of every gradient",
    "dgc": "dgc: 1 %, after four denser epochs",
    "gd": "gd: 1 %, the rest later",
    "dgs": "dgs: 1 %, the rest later, with momentum",
}
_ALONE = "momentum SGD, one device"


@dataclasses.dataclass(frozen=True)
class Arm:
    """One line of the table: a method's accuracy and compression ratios."""

    accuracy: float
    compression_up: float
    compression_down: float

    @property
    def gigabytes(self) -> float:
        """Gigabytes sent in the whole run, up and down together."""
        dense = PARAMETERS * 4 * UPDATES / 1e9
        return dense / self.compression_up + dense / self.compression_down


def read(text: str) -> tuple[dict[str, Arm], float]:
    """Return the arms of the table by name, and the accuracy of one device alone."""
    section = re.split(r"\n#+ ", text.partition(HEADING)[2])[0]
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in re.findall(r"(?m)^\|.*$", section)
    ]
    arms = {
        name: Arm(float(accuracy), float(up), float(down))
        for name, accuracy, _, up, down, _ in lines
        if name in ARMS
    }
    alone = next(float(cells[1]) for cells in lines if cells[0] == _ALONE)
    return arms, alone


def percent(accuracy: float) -> str:
    """Return the accuracy as text such as "91.4 %"; halves are rounded up."""
    return f"{100 * accuracy + 1e-9:.1f} %"


def draw(arms: dict[str, Arm], alone: float, target: pathlib.Path) -> None:
    """Draw one bar for each arm: its length shows the bytes, its label the accuracy."""
    import matplotlib
    from matplotlib.figure import Figure

    theme = THEMES["light"]
    matplotlib.rcParams["svg.hashsalt"] = "thinwire"  # makes equal data give an equal file
    figure = Figure(figsize=(8.2, 3.0), facecolor=theme.background, layout="constrained")
    axes = figure.add_subplot()
    for place, name in enumerate(ARMS):
        arm, is_dgs = arms[name], name == "dgs"
        axes.barh(place, arm.gigabytes, 0.6, color=theme.series[0] if is_dgs else theme.series[5])
        axes.text(
            arm.gigabytes + 0.5,
            place,
            f"{arm.gigabytes:.1f} GB, accuracy {percent(arm.accuracy)}",
            va="center",
            color=theme.text,
            weight="bold" if is_dgs else "normal",
        )
    longest = max(arm.gigabytes for arm in arms.values())
    caption = f"GB over the network in five epochs (one device alone: {percent(alone)})"
    dress(axes, list(ARMS.values()), 1.5 * longest, caption)
    save(figure, target)


def dress(axes: Any, names: Sequence[str], longest: float, caption: str) -> None:
    """Set the labels of the bars from top to bottom, the caption, and the style of the axes."""
    theme = THEMES["light"]
    axes.set_yticks(range(len(names)), names, color=theme.text)
    axes.invert_yaxis()
    axes.set_xlim(0, longest)
    axes.set_xlabel(caption, color=theme.muted)
    axes.tick_params(colors=theme.muted, length=0)
    axes.tick_params(axis="y", colors=theme.text)
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", color=theme.grid)
    axes.set_axisbelow(True)


def save(figure: Any, target: pathlib.Path) -> None:
    """Write a picture without a date, so that equal data give an equal file."""
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None, dpi=120)


def main() -> None:
    """Read the table and draw the picture."""
    parser = argparse.ArgumentParser(prog="python -m bench.systems.picture", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=PICTURE, help=".svg or .png")
    options = parser.parse_args()
    draw(*read(TABLE.read_text()), options.out)


if __name__ == "__main__":
    main()
