"""Draw the contenders' times to an accuracy or a loss over thin links, one picture per work.

``python -m bench.peers.picture`` draws docs/images/peers.svg from the newest records in
bench/results; with ``--model decoder`` it draws peers_decoder.svg.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import origin
from bench.peers import work
from bench.peers.__main__ import read_records
from bench.peers.contenders import CONTENDERS
from bench.peers.plan import NO_LIMIT, Known, Record
from bench.peers.subjects import SUBJECTS, PeerTable
from bench.systems.picture import dress, save
from thinwire.supervisor.report.figures import THEMES

IMAGES = origin.ROOT / "docs" / "images"


@dataclasses.dataclass(frozen=True)
class SystemBar:
    """The bar of one contender.

    Attributes:
        name: Name of the contender.
        seconds: Seconds until the contender reaches the highest target.
        is_computed: True if `seconds` is computed from the contender's steps without a limit and
            its rate over the link.
    """

    name: str
    seconds: float
    is_computed: bool

    @property
    def is_ours(self) -> bool:
        """True if the contender is Thinwire."""
        return CONTENDERS[self.name].sort == "ours"

    @property
    def text(self) -> str:
        """The label next to the bar."""
        return f"{self.seconds:.0f} s{' (computed)' if self.is_computed else ''}"


def newest_records(subject: PeerTable) -> Path:
    """Return the newest file of a work's records.

    Raises:
        FileNotFoundError: No file has records of the work.
    """
    paths = sorted(origin.RESULTS.glob(f"[0-9]*-[0-9]*-[0-9]*-{subject.stem}.jsonl"))
    if not paths:
        raise FileNotFoundError(
            f"no records in {origin.RESULTS}: run python -m bench.peers --model {subject.model}"
        )
    return paths[-1]


def bars(subject: PeerTable, records: list[Record], link: str) -> list[SystemBar]:
    """Return bars of the contenders that reach the highest target over a link, fastest first."""
    target = max(subject.scores(subject.targets))
    known = Known(records, [target])
    costs = ((name, known.cost(name, link, target)) for name in CONTENDERS)
    reached = [
        SystemBar(name, cost[0].seconds, cost[1]) for name, cost in costs if cost is not None
    ]
    return sorted(reached, key=lambda bar: bar.seconds)


def draw(subject: PeerTable, records: list[Record], target: Path) -> None:
    """Draw one panel of bars for each link; Thinwire's bars have another color."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = {
        link: link_bars
        for link in subject.picture_links
        if (link_bars := bars(subject, records, link))
    }
    matplotlib.rcParams["svg.hashsalt"] = "thinwire"  # makes equal data give an equal file
    heights = [0.9 + 0.27 * len(link_bars) for link_bars in panels.values()]
    figure = Figure(
        figsize=(8.2, sum(heights)), facecolor=THEMES["light"].background, layout="constrained"
    )
    rows = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for axes, (link, link_bars) in zip(rows, panels.items(), strict=True):
        _draw_link(axes, link_bars, f"{subject.caption} {_over(link)}")
    save(figure, target)


def _draw_link(axes: Any, found: Sequence[SystemBar], caption: str) -> None:
    theme, longest = THEMES["light"], max(bar.seconds for bar in found)
    for place, bar in enumerate(found):
        weight = "bold" if bar.is_ours else "normal"
        color = theme.series[0] if bar.is_ours else theme.series[5]
        axes.barh(place, bar.seconds, 0.66, color=color)
        beside = bar.seconds + 0.013 * longest
        axes.text(beside, place, bar.text, va="center", color=theme.text, weight=weight)
    dress(axes, [bar.name for bar in found], 1.2 * longest, caption)


def _over(link: str) -> str:
    return "without a limit" if link == NO_LIMIT else f"over {link} Mbit/s"


def main() -> None:
    """Read the records and draw the picture."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.picture", description=__doc__)
    parser.add_argument("--model", choices=list(SUBJECTS), default=work.MNIST_CNN)
    parser.add_argument("--out", type=Path, help=".svg or .png; by default in docs/images")
    parser.add_argument("--records", type=Path, help="file of bench.peers; by default the newest")
    options = parser.parse_args()
    subject = SUBJECTS[options.model]
    records = options.records or newest_records(subject)
    draw(subject, read_records(records), options.out or IMAGES / f"{subject.picture}.svg")


if __name__ == "__main__":
    main()
