"""The compositions that an Advisor predicts, and the run that each would be."""

from __future__ import annotations

import copy
import dataclasses
import pathlib

from absl import flags

from cluster.flags import read_run
from ops.advice import LeftOut
from ops.run import Run
from ops.types import ConfigurationError

FLAGS = flags.FLAGS


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One composition, as flags; a further one is a line in CANDIDATES."""

    flags: tuple[str, ...]
    #: What is predicted instead, where a run begins in another way than it goes on.
    settled: tuple[str, ...] = ()


def _sparse(method: str, rate: str, value_dtype: str, *settled: str) -> Candidate:
    return Candidate(
        (f"--method={method}", f"--compression_rate={rate}", f"--value_dtype={value_dtype}"),
        settled,
    )


#: From true to lossy: exact updates in lockstep; exact ones, ever more stale; steps of the workers
#: on their own; rounded values; ever fewer entries, first those whose rest is sent later with a
#: momentum of its own, then the plain ones, last those whose rest is dropped.
CANDIDATES = (
    Candidate(("--method=bsp",)),
    Candidate(("--method=ssp", "--staleness_bound=3")),
    Candidate(("--method=gsp", "--groups=auto")),
    Candidate(("--method=ssp", "--staleness_bound=10")),
    Candidate(("--method=asgd",)),
    Candidate(("--method=esync",)),
    Candidate(("--method=asgd", "--value_dtype=bfloat16", "--error_feedback")),
    _sparse("dgs", "0.1", "float32"),
    _sparse("dgs", "0.1", "bfloat16"),
    _sparse("dgs", "0.01", "float32"),
    _sparse("dgs", "0.01", "bfloat16"),
    _sparse("dgs", "0.01", "int8"),
    _sparse("dgc", "0.01", "float32", "--warmup_epochs=0"),
    _sparse("gd", "0.01", "float32"),
    _sparse("adacomp", "0.01", "float32"),
    _sparse("dgs", "0.001", "bfloat16"),
    _sparse("dgc", "0.001", "bfloat16", "--warmup_epochs=0"),
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A candidate that can be run with the given flags."""

    candidate: Candidate
    run: Run  # as it would be
    settled: Run  # as it goes on


def trials(
    folder: pathlib.Path,
    candidates: tuple[Candidate, ...] = CANDIDATES,
    given: flags.FlagValues = FLAGS,
) -> tuple[list[Trial], list[LeftOut]]:
    """Return the candidates that the given flags leave open, and why the others are out.

    Args:
        folder: Run directory of the trials.
        candidates: In order.
        given: The command line; what it says of the method stays.

    Raises:
        ConfigurationError: None is left.
    """
    kept, left_out = [], []
    for candidate in candidates:
        try:
            _refuse_contradiction(candidate, given)
            run = compose(candidate.flags, folder, given)
            settled = compose((*candidate.flags, *candidate.settled), folder, given)
            kept.append(Trial(candidate, run, settled))
        except ConfigurationError as error:
            left_out.append(LeftOut(list(candidate.flags), " ".join(str(error).split())[:900]))
    if not kept:
        raise ConfigurationError(
            "no composition that an Advisor knows goes with the given flags, which all stay as "
            f"given: {left_out[0].flags[0]}: {left_out[0].why}; leave some out."
        )
    return kept, left_out


def compose(extra: tuple[str, ...], folder: pathlib.Path, given: flags.FlagValues = FLAGS) -> Run:
    """Return the run of the given flags with some more; raises ConfigurationError."""
    changed = copy.deepcopy(given)
    try:
        changed(["advisor", *extra, f"--run_dir={folder}", "--overwrite"])
    except flags.Error as error:
        raise ConfigurationError(str(error)) from error
    run = read_run(changed)
    run.method.check()
    return run


def _refuse_contradiction(candidate: Candidate, given: flags.FlagValues) -> None:
    """A flag that was given is no matter for advice."""
    for flag in candidate.flags:
        name = flag.removeprefix("--").partition("=")[0]
        if not given[name].present:
            continue
        wanted = copy.deepcopy(given)
        wanted(["advisor", flag])
        if wanted[name].value != given[name].value:
            raise ConfigurationError(f"--{name}={given[name].value} was given")
