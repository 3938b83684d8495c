"""The works of the comparison: model, links, targets and goals of each work's table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from bench.peers import work


@dataclasses.dataclass(frozen=True)
class PeerTable:
    """Defaults for the table of one work.

    Attributes:
        model: Name of the trained model.
        about: Sentence that describes the training; `{workers}` stands for the number of workers.
        stem: Name of the result files, without date and suffix.
        by_loss: True if the score is the negated loss on the test set; False if it is the accuracy.
            Higher scores are better.
        batch_size: Number of samples in a worker's mini-batch.
        links: Links to measure: "none", or megabits per second as text.
        learning_rates: Learning rates to try.
        rounds: Number of runs of each contender over each link.
        seconds: Length of a run without a limit.
        most_seconds: Maximum length of a run over a limited link.
        targets: Accuracies or positive losses to reach.
        picture: File name of the picture, without the suffix.
        picture_links: Links that the picture shows.
        caption: Caption of the picture, without the link.
        snapshot_seconds: Minimum time between two snapshots, in seconds.
        goals: Link -> maximum of the seconds of Thinwire's best contender to the highest target,
            divided by the best peer's seconds. A link without an entry has the goal 1.
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
        """Return the scores of targets: negated losses, or accuracies."""
        return [-target if self.by_loss else target for target in targets]

    def text(self, score: float) -> str:
        """Return a score as text: a positive loss, or an accuracy."""
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
SUBJECTS: Mapping[str, PeerTable] = {table.model: table for table in (_CNN, _DECODER, _WIDE)}
