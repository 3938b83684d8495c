"""What user scripts give as settings: the names and rules of main.py's flags, in any shape.

``args`` may be a namespace (argparse's, absl's FLAGS, any object with attributes), a mapping, or a
list of ``--flag=value`` words; keyword arguments win over it. What neither has comes from the file
that `thinwire run` leaves for each worker, or else from THINWIRE_FLAGS, and the place from
TF_CONFIG or another cluster manager's variables. A script that none of these gives a place trains
alone (`source_of`).
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags, logging

from thinwire.advisor import flags as advisor_flags
from thinwire.flags import environment, launch, observability, security
from thinwire.flags import run as run_flags
from thinwire.flags import script as script_flags
from thinwire.flags.registration import define
from thinwire.flags.run import TOPICS
from thinwire.launcher import schedulers, tf_config
from thinwire.launcher.tf_config import ClusterPosition
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.methods.method import METHODS
from thinwire.ops.offer import FROM_WORKER
from thinwire.ops.types import ConfigurationError
from thinwire.ps import flags as ps_flags
from thinwire.ps.flags import PsFlags
from thinwire.runtime.run.flags import Option, Topic
from thinwire.runtime.run.script_settings import LaunchedScript, read_settings_file
from thinwire.runtime.run.settings import Run
from thinwire.simulator import flags as simulator_flags
from thinwire.supervisor import flags as supervisor_flags
from thinwire.worker import flags as worker_flags
from thinwire.worker.flags import WorkerFlags

#: `mode` of a step without any server: plain momentum SGD.
LOCAL = "msgd"
#: Names of DGS's published program for our methods.
_MODES = {"gradient_sgd": "dgs", "aji": "gd", "sgd": LOCAL, LOCAL: LOCAL}

#: Method -> its flag for the momentum that lives on the worker.
_MOMENTUM_FLAGS = {"dgs": "dgs_momentum", "dgc": "dgc_momentum"}

_TOPICS = (
    *TOPICS,
    *security.TOPICS,
    *ps_flags.TOPICS,
    *worker_flags.TOPICS,
)
_OPTIONS: dict[str, Option] = {option.name: option for topic in _TOPICS for option in topic.options}
#: More than these: a launcher's file has what only nodes heed.
_LAUNCHED_TOPICS = (*_TOPICS, *observability.TOPICS, *supervisor_flags.TOPICS)
#: Every flag of every role but --type_node: THINWIRE_FLAGS may be set for all nodes of a job.
ALL_TOPICS = (
    *_LAUNCHED_TOPICS,
    *launch.TOPICS,
    *simulator_flags.TOPICS,
    *advisor_flags.TOPICS,
)
#: Flags that a script under a launcher may set by itself: they concern this worker alone, or its
#: data, which no other node looks at.
_OWN = frozenset(option.name for option in worker_flags.WORKER.options) - {"id_worker"} | {
    "batch",
    "shard",
}
#: Names by which a script gives itself a place in a run.
_PLACES = frozenset({"id_worker", "nb_workers", "ip_PS", "port", "ps_hosts", "method", "mode"})
LAUNCHER, ARGUMENTS, TF_CONFIG = "thinwire run", "arguments", "TF_CONFIG"

_SUPERVISORS = "it is the Supervisor's; give it to main.py --type_node=Supervisor"
#: Flags that a script has other ways for -> what those are.
_ELSEWHERE = {
    "device": "choose it with tf.config or CUDA_VISIBLE_DEVICES, before TensorFlow starts",
    "worker_threads": "choose them with tf.config.threading, before TensorFlow starts",
    "quiet": "set absl.logging's verbosity",
    "slowdown": "the script itself computes the gradients",
    "step_seconds": "the script itself computes the gradients",
    "target": _SUPERVISORS,
    "target_accuracy": _SUPERVISORS,
}
#: The same of scripts that bring model and data themselves.
_OWN_MODEL_AND_DATA = script_flags.OWN_MODEL_AND_DATA
#: The same of scripts that a launcher has started.
_OF_SCRIPTS = script_flags.NEVER | dict.fromkeys(
    itertools.chain(*script_flags.OPTIMIZER.values()), script_flags.COMPILED
)
#: Names that a namespace of a script's own arguments often has, and then they are not ours.
_OFTEN_OF_SCRIPTS = dict.fromkeys(("epochs", "seed", "iter_max", "max_seconds"), "")
_SIMILAR = 0.8


@dataclasses.dataclass(frozen=True)
class ScriptSettings:
    """A script's settings, checked.

    Attributes:
        run: Those of the run as a whole.
        values: All of them, as flags.
        given: Names that the script itself gave.
        local: Whether this is mode msgd: no server.
        source: What gave this process its place: "thinwire run", "arguments", "TF_CONFIG", "Slurm",
            "torchrun", "Kubernetes" or "THINWIRE_FLAGS".
    """

    run: Run
    values: flags.FlagValues
    given: frozenset[str]
    local: bool = False
    source: str = ARGUMENTS

    @property
    def is_launched(self) -> bool:
        """Whether `thinwire run` has started this process."""
        return self.source == LAUNCHER

    def worker(self) -> WorkerFlags:
        """Return those of a worker. Raises ConfigurationError."""
        return worker_flags.read(self.run.nb_workers, self.values)

    def shard(self) -> PsFlags:
        """Return those of a PS. Raises ConfigurationError."""
        ps_flags.check(self.run, self.values)
        return ps_flags.read(self.run.addresses, self.values)


def source_of(args: Any, keywords: Mapping[str, Any]) -> str | None:
    """Return what gives this process a place in a run; None: it trains alone.

    Args:
        args: As `read_settings` takes them; whoever gives any has a place.
        keywords: Likewise.

    Raises:
        ConfigurationError: A settings file or variables that cannot be read.
    """
    if read_settings_file(os.environ) is not None:
        return LAUNCHER
    is_given = args is not None and not (isinstance(args, Mapping | Sequence) and not args)
    if is_given or any(keywords.get(name) is not None for name in _PLACES):
        return ARGUMENTS
    found = _position()
    return None if found is None else found[0]


def _position() -> tuple[str, ClusterPosition | None] | None:
    """Return the variables that give this process a place, and the place.

    The place is None where flags alone give it.

    Raises:
        ConfigurationError: Variables that cannot be read, or one number for several workers.
    """
    place = tf_config.parse(os.environ.get("TF_CONFIG", ""))
    found = (TF_CONFIG, place) if place is not None else schedulers.position(os.environ)
    if "id_worker" not in environment.flags_of(os.environ, ALL_TOPICS):
        return found
    if found is not None:
        raise ConfigurationError(
            f"{environment.VARIABLE} has --id_worker, and {found[0]} numbers the workers; leave "
            "--id_worker out of it."
        )
    return environment.VARIABLE, None


def read_settings(
    args: Any,
    keywords: Mapping[str, Any],
    *,
    type_node: str,
    builds_model: bool = False,
    defaults: Mapping[str, Any] | None = None,
    momentum: float | None = None,
) -> ScriptSettings:
    """Read settings.

    Args:
        args: A namespace, a mapping, a list of words, or None.
        keywords: What was given by keyword; wins.
        type_node: "PS" or "Worker".
        builds_model: Whether flags of model and data have a meaning here.
        defaults: Other defaults than main.py's.
        momentum: Of the worker, whatever the method calls it.

    Raises:
        ConfigurationError: An unknown name, an illegal value, values that exclude each other, or
            that contradict the launcher's.
    """
    from thinwire.runtime.malloc import keep_freed_memory

    keep_freed_memory()
    launched = read_settings_file(os.environ) if type_node == "Worker" else None
    elsewhere = _ELSEWHERE if builds_model else _ELSEWHERE | _OWN_MODEL_AND_DATA
    if launched is not None:
        elsewhere |= _OF_SCRIPTS
    own_names = elsewhere if launched is None else elsewhere | _OFTEN_OF_SCRIPTS
    named, words = _as_names(args, own_names)
    named = named | {name: value for name, value in keywords.items() if value is not None}
    for name in named:
        _check_name(name, elsewhere)
    local = _translate_mode(named)
    if launched is not None and not local:
        return _launched_settings(launched, [*words, *itertools.starmap(_word, named.items())])
    values = _new_values(type_node)
    for name, value in (defaults or {}).items():
        values.set_default(name, value)
    _parse(values, _environment_words(elsewhere))
    before = {name: values[name].present for name in _OPTIONS}
    _parse(values, [*words, *(_word(name, value) for name, value in named.items())])
    if momentum is not None and not local:
        _give_momentum(values, momentum)
    given = frozenset(name for name in _OPTIONS if values[name].present > before[name])
    for name in given:
        _check_name(name, elsewhere)
    found = _fill_place(values, type_node)
    is_placed = bool(given & _PLACES) or args is not None
    if not is_placed and type_node == "Worker":
        values.set_default("model_from", FROM_WORKER)
    run = run_flags.read_run(values)
    if not builds_model and run.method.collective != THROUGH_PS:
        raise ConfigurationError(
            f"--collective={run.method.collective}: workers of scripts meet at the PS; expected "
            f"{THROUGH_PS}. Use main.py --type_node=Worker for the others."
        )
    if (
        not builds_model
        and type_node == "Worker"
        and run.method.overlap
        and not run.model_is_offered
    ):
        raise ConfigurationError(
            "--overlap: a script whose PS has its model from flags computes its gradients one "
            "after the other; leave it out, or run it by thinwire run."
        )
    for warning in run.method.warnings:
        logging.warning("%s", warning)
    source = ARGUMENTS if is_placed or found is None else found
    return ScriptSettings(run, values, given, local, source)


def _fill_place(values: flags.FlagValues, type_node: str) -> str | None:
    """Set the place that variables give this process; return which do, None: none does."""
    found = _position()
    if found is None:
        return None
    source, place = found
    if place is not None and (type_node == "Worker" or source == TF_CONFIG):
        tf_config.fill_position(values, place, source)
    return source


def _environment_words(elsewhere: Mapping[str, str]) -> list[str]:
    """Return the words of THINWIRE_FLAGS that are for a script.

    Args:
        elsewhere: Flags that a script has other ways for -> what those are.

    Raises:
        ConfigurationError: The variable holds no list of flags.
    """
    found = environment.flags_of(os.environ, ALL_TOPICS)
    for name in sorted(found.keys() & elsewhere.keys()):
        logging.warning(
            "%s: --%s counts for other nodes only: %s", environment.VARIABLE, name, elsewhere[name]
        )
    return [
        word
        for name, words in found.items()
        if name in _OPTIONS and name not in elsewhere
        for word in words
    ]


def _launched_settings(launched: LaunchedScript, words: Sequence[str]) -> ScriptSettings:
    """Return the launcher's settings, with those of the script's own words that go with them.

    Raises:
        ConfigurationError: A word that contradicts the launcher's flags.
    """
    # The evaluator has the Supervisor's certificate.
    values = _new_values("Supervisor" if launched.evaluates else "Worker", _LAUNCHED_TOPICS)
    own = _new_values("Worker")
    _parse(values, launched.flags)
    _parse(own, words)
    given = frozenset(name for name in _OPTIONS if own[name].present)
    for name in given:
        theirs, ours = values[name], own[name]
        if theirs.value == ours.value:
            continue
        if name not in _OWN or theirs.present:
            raise ConfigurationError(
                f"the script gives distribute() {name}={ours.value}, and `thinwire run` has "
                f"--{name}={theirs.value}; leave it out of the script, or give `thinwire run` "
                f"--{name}={ours.value}."
            )
        values[name].value = ours.value
    return ScriptSettings(run_flags.read_run(values), values, given, source=LAUNCHER)


def _as_names(args: Any, elsewhere: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return `args` as names with values, and as words."""
    if args is None:
        return {}, []
    if isinstance(args, str):
        raise ConfigurationError(
            f"args={args!r:.80}: expected a namespace, a mapping, or a list of words such as "
            "['--nb_workers=2']; split it."
        )
    if isinstance(args, Mapping):
        return {name: value for name, value in args.items() if value is not None}, []
    if isinstance(args, Sequence):
        return {}, [str(word) for word in args]
    return dict(_of_namespace(args, elsewhere)), []


def _of_namespace(args: Any, elsewhere: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the flags that a namespace sets.

    What is the script's own stays its own, but a name that is nearly one of ours is a slip.
    """
    is_absl = isinstance(args, flags.FlagValues)
    everything = args.flag_values_dict() if is_absl else getattr(args, "__dict__", None)
    if everything is None:
        raise ConfigurationError(
            f"args is a {type(args).__name__}; expected a namespace, a mapping, or a list of words."
        )
    for name, value in everything.items():
        if name in _OPTIONS or name == "mode":
            if value is not None and name not in elsewhere:
                yield name, value
        elif (near := _nearest(name)) is not None:
            raise ConfigurationError(
                f"args.{name} is no flag of ours, but nearly --{near}. Rename it, or give a "
                "mapping of what is meant for Thinwire."
            )


def _nearest(name: str) -> str | None:
    found = difflib.get_close_matches(name, [*_OPTIONS, "mode"], 1, _SIMILAR)
    return found[0] if found else None


def _check_name(name: str, elsewhere: Mapping[str, str]) -> None:
    if name in elsewhere:
        raise ConfigurationError(f"{name} is not for scripts: {elsewhere[name]}. Leave it out.")
    if name not in _OPTIONS and name != "mode":
        near = difflib.get_close_matches(name, [*_OPTIONS, "mode"], 1, 0.0)
        raise ConfigurationError(
            f"{name} is no setting of Thinwire; did you mean {near[0]}? Expected the name of a "
            "flag of main.py (python main.py --help)."
        )


def _translate_mode(named: dict[str, Any]) -> bool:
    """Turn `mode` and `method` into --method; return whether no server is wanted."""
    modes = {str(named.pop(name)).lower() for name in ("mode", "method") if name in named}
    if len(modes) > 1:
        raise ConfigurationError(
            f"mode and method were both given, and differ ({', '.join(sorted(modes))}); leave one "
            "out."
        )
    if not modes:
        return False
    word = modes.pop()
    method = _MODES.get(word, word)
    if method == LOCAL:
        return True
    if method not in METHODS:
        raise ConfigurationError(
            f"mode={word!r}: expected one of {', '.join(sorted({*METHODS, *_MODES}))}, in upper or "
            "lower case."
        )
    named["method"] = method
    return False


def _give_momentum(values: flags.FlagValues, momentum: float) -> None:
    """Set the flag that a worker's momentum stands for.

    Raises:
        ConfigurationError: The method has none on the worker.
    """
    name = _MOMENTUM_FLAGS.get(values.method)
    if name is not None:
        _parse(values, [_word(name, momentum)])
    elif momentum:
        raise ConfigurationError(
            f"momentum={momentum}: mode {values.method} has none on the worker; expected 0, or "
            f"mode {', '.join(_MOMENTUM_FLAGS)} or {LOCAL}. For momentum on the server give "
            "settings a `momentum`, on all nodes."
        )


def _word(name: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        value = ",".join(str(each) for each in value)
    return f"--{name}={value}"


def _new_values(type_node: str, topics: Sequence[Topic] = _TOPICS) -> flags.FlagValues:
    """Return all flags with their defaults, apart from those of the process."""
    values = flags.FlagValues()
    flags.DEFINE_enum(
        "type_node",
        type_node,
        ["PS", "Worker", "Supervisor"],
        "",
        flag_values=values,
        module_name="Run",
    )
    values["type_node"].present = 1  # TF_CONFIG may number this node, not choose its role
    define(*topics, flag_values=values)
    return values


def _parse(values: flags.FlagValues, words: Sequence[str]) -> None:
    try:
        rest = values(["thinwire", *words])[1:]
    except flags.Error as error:
        raise ConfigurationError(f"{error}") from error
    if rest:
        raise ConfigurationError(f"args has {rest[0]!r}: expected words such as --nb_workers=2.")
