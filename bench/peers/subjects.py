"""The works that tables are made of: what is usual for each, and how its goal is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from bench.peers import work


@dataclasses.dataclass(frozen=True)
class PeerTable:
    """One work.

    Attributes:
        model: What is trained.
        about: What all contenders do alike, a sentence with a place for the number of workers.
        stem: Of the files of its results.
        by_loss: Measured by the loss on the test set, else by accuracy. Scores are the higher the
            better: a loss is one with its sign turned.
        batch_size: Of a worker.
        links: "none", or megabits per second.
        learning_rates: To choose from.
        rounds: Of all contenders over all links.
        seconds: Of a run without a limit.
        most_seconds: Of a run over a link.
        targets: As people write them: accuracies, or losses.
        picture: Name of its picture, without the ending.
        picture_links: Whose bars it shows.
        caption: What it shows, but for the link.
        snapshot_seconds: Between two models that are kept, at least.
        goals: Link -> the most that the best of ours may take of the best peer's seconds to the
            highest target; where it has none, 1.
    """

    model: str
    about: str
    stem: str
    by_loss: bool
    batch_size: int
    links: Sequence[str]
    learning_rates: Sequence[float]
    rounds: int
    seconds: float
    most_seconds: float
    targets: Sequence[float]
    picture: str
    picture_links: Sequence[str]
    caption: str
    snapshot_seconds: float = 0.5
    goals: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def scores(self, targets: Sequence[float]) -> list[float]:
        """Return targets as scores."""
        return [-target if self.by_loss else target for target in targets]

    def text(self, score: float) -> str:
        """Return a score as people write it."""
        return f"loss {-score:.2f}" if self.by_loss else f"{score:.2f}"


_CNN = PeerTable(
    work.MNIST_CNN,
    "{workers} workers of one thread, mnist_cnn, batch 64, Fashion-MNIST, the same initial "
    "weights.",
    "peers",
    False,
    64,
    ("none", "100", "10"),
    (0.01, 0.03, 0.1),
    3,
    60.0,
    600.0,
    (0.80, 0.85),
    "peers",
    ("100",),
    "seconds to 85 % of Fashion-MNIST's test set",
    goals={"none": 0.8, "100": 0.5, "10": 0.3},
)
_DECODER = PeerTable(
    work.DECODER,
    "{workers} workers of one thread, a decoder of 867,328 parameters, batch 16 of 64 bytes, the "
    "sources of Python's standard library, AdamW, the same initial weights.",
    "peers-decoder",
    True,
    16,
    ("none", "100", "10", "1"),
    (0.001,),
    1,
    30.0,
    100.0,
    (2.5,),
    "peers_decoder",
    ("none", "100", "10", "1"),
    "seconds to a loss of 2.5 on the standard library's sources",
    goals={"100": 1.0, "10": 0.65, "1": 0.2},
)
_WIDE = PeerTable(
    work.WIDE,
    "{workers} workers of one thread, a perceptron of 24,925,082 parameters (784, 4096, 4096, "
    "1200, 10), batch 64, Fashion-MNIST, the same initial weights.",
    "peers-wide",
    False,
    64,
    ("none", "100"),
    (0.01,),
    1,
    60.0,
    180.0,
    (0.80, 0.84),
    "peers_wide",
    ("100",),
    "seconds to 84 % of Fashion-MNIST's test set, 25 M parameters",
    snapshot_seconds=2.0,
    goals={"100": 0.5},
)
SUBJECTS: Mapping[str, PeerTable] = {each.model: each for each in (_CNN, _DECODER, _WIDE)}
