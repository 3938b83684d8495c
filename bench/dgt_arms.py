"""What the DGT bench compares: models, links and ways to send a gradient, as flags of main.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained, and for how long.

    Attributes:
        flags: Of the model, its batch and its rate.
        updates: Length of a run.
        evaluate_every: Updates between two evaluations.
        target: Accuracy that counts as arrived.
    """

    flags: tuple[str, ...]
    updates: int
    evaluate_every: int
    target: float


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to send a gradient.

    Attributes:
        flags: What makes it differ.
        learns_alike: Name of an arm whose weights it shares bit by bit on every link: all it sends
            arrives. Only its times are played. "": it learns on its own.
        ks: The fractions it is played with; "" where it has none.
    """

    flags: tuple[str, ...]
    learns_alike: str = ""
    ks: tuple[str, ...] = ("0.8", "0.5", "0.2", "adaptive")


COMMON = (
    "--type_node=Simulator",
    "--nb_workers=2",
    "--dataset=fashion_mnist",
    "--link_mbps=100",
    "--link_delay_ms=5",
)
#: A step takes what a small GPU at the edge takes: about 0.1 TFLOP/s of these small layers.
MODELS: Mapping[str, Model] = {
    "mnist_cnn": Model(
        ("--network=mnist_cnn", "--batch_size=64", "--learning_rate=0.1", "--step_seconds=0.05"),
        updates=120,
        evaluate_every=10,
        target=0.75,
    ),
    "wide_cnn": Model(
        (
            "--model=bench/wide_cnn.py",
            "--batch_size=64",
            "--learning_rate=0.05",
            "--step_seconds=0.05",
        ),
        updates=50,
        evaluate_every=5,
        target=0.65,
    ),
}
#: With 3 channels the stream has CS3 = class 4, channels CS2, CS1, CS0 = classes 5, 6, 7: the
#: middle one of the datagrams' is 6; of all four 5 is the first one that the stream overtakes.
_CROWD = ("--link_background_mbps=90", "--link_background_class=5")
LINKS: Mapping[str, tuple[str, ...]] = {
    "free": (),
    "1 % lost": ("--link_loss=0.01",),
    "5 % lost": ("--link_loss=0.05",),
    "congested": _CROWD,
    "congested, 1 % lost": (*_CROWD, "--link_loss=0.01"),
    "congested, 5 % lost": (*_CROWD, "--link_loss=0.05"),
}
# A crowded link lets little through, and is no reason to give up.
_DGT = ("--method=dgt", "--dgt_fallback_steps=0")
_DROP = (*_DGT, "--dgt_reception=drop")
_WAIT = "--dgt_wait_ms=100"
ARMS: Mapping[str, Arm] = {
    "reliable": Arm(("--method=bsp",), "reliable", ("",)),
    "marked": Arm(("--method=dgt",), "reliable", ("1",)),
    "diff": Arm(_DGT),
    "diff, wait": Arm((*_DGT, _WAIT)),
    "drop": Arm(_DROP),
    "drop, wait": Arm((*_DROP, _WAIT)),
    "sender drop": Arm(("--method=dgt", "--dgt_send_drop"), "sender drop"),
    "random": Arm((*_DGT, "--dgt_random=1")),
    "random drop": Arm((*_DROP, "--dgt_random=1")),
    "random sender drop": Arm(
        ("--method=dgt", "--dgt_send_drop", "--dgt_random=1"), "random sender drop"
    ),
    "feedback": Arm((*_DROP, "--dgt_error_feedback")),
}


@dataclasses.dataclass(frozen=True, order=True)
class Case:
    """One run; `learns` is false where only its times are played."""

    model: str
    link: str
    arm: str
    k: str
    seed: int = 1
    learns: bool = True

    def flags(self) -> list[str]:
        """Return the flags of main.py."""
        model = MODELS[self.model]
        found = [
            *COMMON,
            *model.flags,
            *LINKS[self.link],
            *ARMS[self.arm].flags,
            f"--seed={self.seed}",
            f"--iter_max={model.updates}",
            f"--eval_interval_updates={model.evaluate_every}",
            "--eval_interval_seconds=1000000",
        ]
        if self.k == "adaptive":
            return [*found, "--dgt_adaptive_k"]
        return [*found, f"--dgt_k={self.k}"] if self.k else found


def case(model: str, link: str, arm: str, k: str, seed: int = 1) -> Case:
    """Return a case; it learns unless it is known from the free link what it learns."""
    alike = ARMS[arm].learns_alike
    learns = not alike or (alike == arm and link == "free") or k == "adaptive"
    return Case(model, link, arm, k, seed, learns)
