"""Rejects flags that have no effect on a script's run, and names the reason for each flag."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping

from thinwire.flags import run as run_flags
from thinwire.ops.methods.method import Method
from thinwire.ops.types import ConfigurationError, Kind
from thinwire.runtime.run.script_target import ScriptTarget

#: Name of a flag of the model or the data, which a script defines itself -> reason for rejecting
#: the flag.
OWN_MODEL_AND_DATA = {
    option.name: "the script brings its own model and data"
    for option in run_flags.MODEL_AND_DATA.options
    if option.name
    not in ("batch", "data_sharding_file", "dirichlet_alpha", "model_from", "partition", "shard")
}
_COMPUTES = "the script itself computes the gradients"
_EVALUATES = "a script evaluates the model with its own fit(validation_data=...)"
COMPILED = "the run uses the optimizer that the script compiles"
#: Name of a flag that has no effect on a script's run -> reason for rejecting the flag.
NEVER = OWN_MODEL_AND_DATA | {
    "batch_size": "the script's fit sets the batch size",
    "slowdown": _COMPUTES,
    "step_seconds": _COMPUTES,
    **dict.fromkeys(("fraction", "draws"), run_flags.ALL_FIT),
    "top5": _EVALUATES,
    "eval_interval_seconds": _EVALUATES,
    "eval_interval_updates": _EVALUATES,
    "id_worker": "`thinwire run` numbers the workers",
    "id_ps": "`thinwire run` numbers the shards",
    "num_restarts": "`thinwire run` counts the restarts",
}
_RATES = ("learning_rate", "lr_schedule")
#: Names of Thinwire's flags, in addition to `NEVER`, that scripts often use for their own
#: arguments.
_OFTEN_OF_SCRIPTS = (
    *("device", "epochs", "help", "iter_max", "log_level", "max_seconds", "overwrite", "port"),
    *("quiet", "resume", "run_dir", "seed", "shard", "target"),
)
#: Kind of update that workers push -> names of the optimizer flags that the script's optimizer
#: replaces.
OPTIMIZER = {
    Kind.GRADIENT: ("server_optimizer", "momentum", "weight_decay", *_RATES),
    Kind.DELTA: (
        *("local_optimizer", "local_momentum", "local_lr", "local_weight_decay"),
        *_RATES,
    ),
}

_USUAL = {*NEVER, *_OFTEN_OF_SCRIPTS, *itertools.chain(*OPTIMIZER.values())}


def misplaced(target: ScriptTarget, known: Collection[str]) -> str:
    """Return a warning about Thinwire's flags that follow the script on the command line.

    Only the script, not Thinwire, receives the words after the script's name. The warning about
    misplaced flags omits flag names that scripts often use, flag names in the script's text, and
    all words after ``--``, because the user means these words for the script.

    Args:
        target: User's script of the command line, with the script's arguments.
        known: Names of all flags of Thinwire, without dashes.

    Returns:
        A warning in one line; empty if no flag is misplaced.
    """
    words = itertools.takewhile(lambda word: word != "--", target.arguments)
    text = target.path.read_text(errors="replace")
    flags = []
    for word in words:
        name = word.partition("=")[0].removeprefix("--")
        is_ours = word.startswith("--") and name in known and name not in _USUAL
        if is_ours and not re.search(rf"\b{name}\b", text):
            flags.append(word)
    if not flags:
        return ""
    verb, them = ("stands", "it") if len(flags) == 1 else ("stand", "them")
    return (
        f"{' '.join(flags)} {verb} after {target.shown}, so the script receives {them} and "
        f"Thinwire does not read {them}. Give flags of Thinwire before the script: thinwire run "
        f"{flags[0]} {target.shown}"
    )


def refuse(given: Iterable[str]) -> None:
    """Reject flags that have no effect on a script's run.

    Raises:
        ConfigurationError: A given flag has no effect on a script's run. The message names the
            flag.
    """
    _refuse(given, NEVER | dict.fromkeys(OPTIMIZER[Kind.DELTA], COMPILED))


def refuse_optimizer(given: Iterable[str], method: Method) -> None:
    """Reject flags of the optimizer and learning rate, which the script's compile sets.

    Args:
        given: Names of the flags on the command line.
        method: Training method of the run.

    Raises:
        ConfigurationError: A flag of the optimizer is given; the message names the flag.
    """
    _refuse(given, dict.fromkeys(OPTIMIZER[method.kind], COMPILED))


def _refuse(given: Iterable[str], reasons: Mapping[str, str]) -> None:
    for name in given:
        if name in reasons:
            raise ConfigurationError(
                f"--{name} is not for `thinwire run`: {reasons[name]}. Leave --{name} out."
            )
