"""Flags that a script has other ways for, and which: for those who run scripts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping

from thinwire.flags import run as run_flags
from thinwire.ops.methods.method import Method
from thinwire.ops.types import ConfigurationError, Kind
from thinwire.runtime.run.script_target import ScriptTarget

_MODEL_AND_DATA = next(each for each in run_flags.TOPICS if each.title == "Model and data")
#: Flags of the model and the data, which a script brings.
OWN_MODEL_AND_DATA = {
    option.name: "the script brings its own model and data"
    for option in _MODEL_AND_DATA.options
    if option.name
    not in ("batch", "data_sharding_file", "dirichlet_alpha", "model_from", "partition", "shard")
}
_COMPUTES = "the script itself computes the gradients"
_EVALUATES = "a script evaluates by its own fit(validation_data=...)"
COMPILED = "the optimizer is the one that the script compiles"
#: Flags that no script's run heeds.
NEVER = OWN_MODEL_AND_DATA | {
    "batch_size": "it is that of the script's own fit",
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
#: Names that scripts often have for arguments of their own, in addition to `NEVER`.
_OFTEN_OF_SCRIPTS = (
    *("device", "epochs", "help", "iter_max", "log_level", "max_seconds", "overwrite", "port"),
    *("quiet", "resume", "run_dir", "seed", "shard", "target"),
)
#: Flags of the optimizers, by what workers send.
OPTIMIZER = {
    Kind.GRADIENT: ("server_optimizer", "momentum", "weight_decay", *_RATES),
    Kind.DELTA: (
        *("local_optimizer", "local_momentum", "local_lr", "local_weight_decay"),
        *_RATES,
    ),
}

_USUAL = {*NEVER, *_OFTEN_OF_SCRIPTS, *itertools.chain(*OPTIMIZER.values())}


def misplaced(target: ScriptTarget, known: Collection[str]) -> str:
    """Return a warning of flags of Thinwire behind the script, which only the script gets.

    Names that scripts often have themselves, and names in the script's own text, are the script's.
    So is everything behind ``--``.

    Args:
        target: The script and its arguments.
        known: Names of all flags of Thinwire.

    Returns:
        One line; empty: there are none.
    """
    words = itertools.takewhile(lambda word: word != "--", target.arguments)
    text = target.path.read_text(errors="replace")
    found = []
    for word in words:
        name = word.partition("=")[0].removeprefix("--")
        is_ours = word.startswith("--") and name in known and name not in _USUAL
        if is_ours and not re.search(rf"\b{name}\b", text):
            found.append(word)
    if not found:
        return ""
    verb, them = ("stands", "it") if len(found) == 1 else ("stand", "them")
    return (
        f"{' '.join(found)} {verb} behind {target.shown}, so the script gets {them} and Thinwire "
        f"does not read {them}. A flag of Thinwire stands before the script: thinwire run "
        f"{found[0]} {target.shown}"
    )


def refuse(given: Iterable[str]) -> None:
    """Refuse flags that no script's run heeds; raises ConfigurationError, naming one."""
    _refuse(given, NEVER | dict.fromkeys(OPTIMIZER[Kind.DELTA], COMPILED))


def refuse_optimizer(given: Iterable[str], method: Method) -> None:
    """Refuse flags of the optimizer that the script brings, and of its rate.

    Args:
        given: Names of the flags that were given.
        method: Of the run.

    Raises:
        ConfigurationError: One of them; the message names it.
    """
    _refuse(given, dict.fromkeys(OPTIMIZER[method.kind], COMPILED))


def _refuse(given: Iterable[str], reasons: Mapping[str, str]) -> None:
    for name in given:
        if name in reasons:
            raise ConfigurationError(
                f"--{name} is not for `thinwire run`: {reasons[name]}. Leave it out."
            )
