"""Many kill -9 of a real PS: ``python -m tests.chaos.process --method adacomp --kills 20``.

Prints a line for each kill. Exit code 1: an update was lost or applied twice, or a replay differs.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator

from tests.chaos.faults import Fault, Plan, Victim, plans
from tests.chaos.process_cast import Cast
from tests.chaos.process_trial import Kill, Trial

#: Method -> flags that make it quick and give the server a state in addition to the weights.
METHODS: dict[str, tuple[str, ...]] = {
    "adacomp": (),
    "dgs": (),
    "dgt": ("--dgt_k=0.3", "--dgt_block_size=1024", "--dgt_wait_ms=20", "--journal=on"),
    "gsp": ("--journal=on",),
    "sparseloco": ("--local_steps=2", "--chunk=256", "--local_optimizer=sgd"),
}
SHARDS = (Victim.SHARD_0, Victim.OTHER_SHARD)
_KILLS = tuple(fault for fault in Fault if fault.kills)


def plans_of_kills(seed: int, count: int, nb_ps: int) -> Iterator[Plan]:
    """Return seeded plans of kills that cycle through all kinds of kills."""
    victims = SHARDS if nb_ps > 1 else SHARDS[:1]
    return plans(seed, count, tuple(itertools.product(_KILLS, victims)))


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=METHODS, default="adacomp")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nb_ps", type=int, default=2)
    parser.add_argument("--nb_workers", type=int, default=2)
    parser.add_argument("--dataset", default="fashion_mnist_sample")
    parser.add_argument("--out", type=pathlib.Path, help="keeps the run here; default: nowhere")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and reap
    folder = given.out or pathlib.Path(tempfile.mkdtemp(prefix="thinwire-kills-"))
    shutil.rmtree(folder / "run", ignore_errors=True)
    try:
        failure = _play(given, folder)
    finally:
        if given.out is None:
            shutil.rmtree(folder, ignore_errors=True)
    if failure:
        sys.stdout.write(f"FAILED (seed {given.seed}): {failure}\n")
    return 1 if failure else 0


def _play(given: argparse.Namespace, folder: pathlib.Path) -> str:
    """Return what went wrong, if anything."""
    flags = (f"--method={given.method}", f"--dataset={given.dataset}", *METHODS[given.method])
    cast = Cast(folder, flags, given.nb_workers, given.nb_ps, given.seed)
    trial = Trial(cast, given.seed)
    try:
        trial.begin(supervisor=True)
        sys.stdout.write(_HEAD)
        for plan in plans_of_kills(given.seed, given.kills, given.nb_ps):
            sys.stdout.write(_line(len(trial.kills) + 1, trial.strike(plan)))
            sys.stdout.flush()
        summary = trial.end()
    except AssertionError as error:
        return str(error)
    finally:
        cast.close()
    sys.stdout.write(
        f"{given.method}: {len(trial.kills)} kills, {summary['updates']} updates, "
        f"{summary['membership']['lost_updates']} lost to the {trial.num_cut} records cut off on "
        f"purpose, accuracy {summary['test_accuracy']:.3f}, "
        "every exit code 0\n"
    )
    return ""


_HEAD = (
    f"{'kill':>4}  {'how':<18}{'shard':>5}{'version':>9}{'events':>8}{'told':>8}{'compared':>9}"
    f"{'back in':>9}  journal\n"
)


def _line(number: int, kill: Kill) -> str:
    return (
        f"{number:>4}  {kill.plan.fault.value:<18}{kill.shard:>5}{kill.version:>9}"
        f"{kill.events:>8}{kill.told:>8}{kill.compared:>9}{kill.seconds:>8.1f}s  {kill.torn}\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
