"""Reads the settings of user scripts, Thinwire's command-line flags, in several forms.

A script gives settings as ``args``: a namespace (argparse's, absl's FLAGS, any object with
attributes), a mapping, or a list of ``--flag=value`` words. Keyword arguments of a script override
the settings in ``args``. Settings that a script does not give come from the settings file that
`thinwire run` writes for each worker, or else from THINWIRE_FLAGS. A worker's id and the number of
workers in the run may come from TF_CONFIG or from the variables of a cluster manager. A script
trains alone if no source gives its worker id (`is_in_run`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags, logging

from thinwire.advisor import flags as advisor_flags
from thinwire.flags import environment, launch, observability, policy_file, security
from thinwire.flags import run as run_flags
from thinwire.flags import script as script_flags
from thinwire.flags.environment import flag_word
from thinwire.flags.registration import define
from thinwire.flags.run import TOPICS
from thinwire.launcher import schedulers, tf_config
from thinwire.launcher.tf_config import ClusterPosition
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.methods.method import METHODS
from thinwire.ops.offer import FROM_WORKER
from thinwire.ops.options import Option, Topic
from thinwire.ops.types import ConfigurationError
from thinwire.ps import flags as ps_flags
from thinwire.ps.flags import PsFlags
from thinwire.runtime.run.script_settings import LaunchedScript, read_settings_file
from thinwire.runtime.run.settings import Run
from thinwire.simulator import flags as simulator_flags
from thinwire.supervisor import flags as supervisor_flags
from thinwire.worker import flags as worker_flags
from thinwire.worker.flags import WorkerFlags

#: Value of the setting `mode` that trains without a server, by plain momentum SGD.
LOCAL = "msgd"
#: Maps a mode of DGS's published program to Thinwire's name of the training method.
_MODES = {"gradient_sgd": "dgs", "aji": "gd", "sgd": LOCAL, LOCAL: LOCAL}

#: Maps a training method to the name of the flag for the momentum that a worker applies.
_MOMENTUM_FLAGS = {"dgs": "dgs_momentum", "dgc": "dgc_momentum"}

_TOPICS = (
    *TOPICS,
    *security.TOPICS,
    *ps_flags.TOPICS,
    *worker_flags.TOPICS,
)
#: Topics (groups of flags) in a settings file of `thinwire run`, which also holds flags that only
#: processes without a script use.
_LAUNCHED_TOPICS = (*_TOPICS, *observability.TOPICS, *supervisor_flags.TOPICS)
#: Topics that contain every flag of every role except --type_node. THINWIRE_FLAGS may hold flags of
#: any role, because it may be set for all processes of a job.
ALL_TOPICS = (
    *_LAUNCHED_TOPICS,
    *launch.TOPICS,
    *simulator_flags.TOPICS,
    *advisor_flags.TOPICS,
)
#: Names of flags that a script under `thinwire run` may set itself, because these flags affect only
#: its own worker or its data.
_OWN = frozenset(option.name for option in worker_flags.WORKER.options) - {"id_worker"} | {
    "batch",
    "shard",
}
#: Names of settings that make a script part of a run, so that it does not train alone.
_PLACES = frozenset({"id_worker", "nb_workers", "ip_PS", "port", "ps_hosts", "method", "mode"})
_TF_CONFIG = "TF_CONFIG"

_SUPERVISORS = "the Supervisor reads this flag; give it to main.py --type_node=Supervisor"
#: Maps the name of a flag that a script must not set to the advice, in the error, what to use
#: instead.
_ELSEWHERE = {
    "device": "choose it with tf.config or CUDA_VISIBLE_DEVICES, before TensorFlow starts",
    "worker_threads": "choose them with tf.config.threading, before TensorFlow starts",
    "quiet": "set absl.logging's verbosity",
    "slowdown": "the script itself computes the gradients",
    "step_seconds": "the script itself computes the gradients",
    "target": _SUPERVISORS,
    "target_accuracy": _SUPERVISORS,
}
#: Maps the name of a flag for the model or data, which a script brings itself, to what to use
#: instead.
_OWN_MODEL_AND_DATA = script_flags.OWN_MODEL_AND_DATA
#: Maps the name of a flag that a script under `thinwire run` must not set to what to use instead.
_OF_SCRIPTS = script_flags.NEVER | dict.fromkeys(
    itertools.chain(*script_flags.OPTIMIZER.values()), script_flags.COMPILED
)
#: Names that are often a script's own arguments, and therefore do not set Thinwire's flags in a
#: namespace.
_OFTEN_OF_SCRIPTS = dict.fromkeys(("epochs", "seed", "iter_max", "max_seconds", "policy"), "")
#: Similarity of a name to a flag's name, by difflib, above which the name counts as a misspelling.
_SIMILAR = 0.8


def _options() -> dict[str, Option]:
    """Return the flags by name, including those of the policies of --policy."""
    return {option.name: option for topic in _TOPICS for option in topic.options}


@dataclasses.dataclass(frozen=True)
class ScriptSettings:
    """Validated settings of a script: settings of the run that it joins, and its own flags.

    Attributes:
        run: Settings that all processes of the run share.
        values: All settings of the process, as an object with the values of Thinwire's flags.
        given: Names of those settings that the script itself gave.
        local: True if the script trains in mode msgd, which has no server.
        is_launched: True if `thinwire run` started this process.
    """

    run: Run
    values: flags.FlagValues
    given: frozenset[str]
    local: bool = False
    is_launched: bool = False

    def run_in(self, folder: contextlib.ExitStack) -> Run:
        """Return the run's settings, with a temporary run directory if the script gives none.

        Args:
            folder: Stack that removes the temporary run directory when it is closed.
        """
        if "run_dir" in self.given:
            return self.run
        path = folder.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-"))
        return dataclasses.replace(self.run, run_dir=pathlib.Path(path))

    def worker(self) -> WorkerFlags:
        """Return the flags that only a worker process has. Raises ConfigurationError."""
        return worker_flags.read(self.run.nb_workers, self.values)

    def shard(self) -> PsFlags:
        """Return the flags that only a shard of the PS has. Raises ConfigurationError."""
        ps_flags.check(self.run, self.values)
        return ps_flags.read(self.run.addresses, self.values)


def is_in_run(args: Any, keywords: Mapping[str, Any]) -> bool:
    """Return True if this process has a place in a run; False if it trains alone.

    Args:
        args: Settings in any form that `read_settings` accepts. Any non-empty `args` mean that the
            process belongs to a run.
        keywords: Settings by keyword. Only the names in `_PLACES` mean that the process belongs to
            a run.

    Raises:
        ConfigurationError: The settings file or the environment variables cannot be read.
    """
    if read_settings_file(os.environ) is not None:
        return True
    is_given = args is not None and not (isinstance(args, Mapping | Sequence) and not args)
    is_placed = is_given or any(keywords.get(name) is not None for name in _PLACES)
    return is_placed or _position() is not None


def _position() -> tuple[str, ClusterPosition | None] | None:
    """Return this process's place in a run, and where it comes from in the environment.

    The returned place is None if THINWIRE_FLAGS contains the worker's id as --id_worker.
    `_position` returns None if no environment variable gives this process a place in a run.

    Raises:
        ConfigurationError: The environment variables cannot be read, or THINWIRE_FLAGS and a
            cluster manager's variables both contain the worker's id.
    """
    place = tf_config.parse(os.environ.get("TF_CONFIG", ""))
    position = (_TF_CONFIG, place) if place is not None else schedulers.position(os.environ)
    if "id_worker" not in environment.flags_of(os.environ, ALL_TOPICS):
        return position
    if position is not None:
        raise ConfigurationError(
            f"the environment variable {environment.VARIABLE} has --id_worker, but {position[0]} "
            f"numbers the workers too; leave --id_worker out of {environment.VARIABLE}."
        )
    return environment.VARIABLE, None


def read_settings(
    args: Any,
    keywords: Mapping[str, Any],
    *,
    type_node: str,
    builds_model: bool = False,
    momentum: float | None = None,
) -> ScriptSettings:
    """Read and check a script's settings (values of Thinwire's flags).

    Args:
        args: Settings of the script: a namespace, a mapping, a list of ``--flag=value`` words, or
            None.
        keywords: Settings of the script by keyword, which override `args`.
        type_node: Role of this process in the run: "PS" or "Worker".
        builds_model: True if the process builds its model and data from flags, not from a script.
        momentum: Momentum that the worker applies, for the momentum flag of the training method;
            None: the flag keeps its value.

    Raises:
        ConfigurationError: The name of a setting is unknown, its value is illegal, or settings
            contradict each other or the settings of `thinwire run`.
    """
    from thinwire.runtime.malloc import keep_freed_memory

    keep_freed_memory()
    is_worker = type_node == "Worker"
    launched = read_settings_file(os.environ) if is_worker else None
    elsewhere = _ELSEWHERE if builds_model else _ELSEWHERE | _OWN_MODEL_AND_DATA
    if launched is not None:
        elsewhere |= _OF_SCRIPTS
    # A namespace's attribute named policy is usually the script's own argument.
    own_names = elsewhere | ({"policy": ""} if launched is None else _OFTEN_OF_SCRIPTS)
    _load_policy(args, keywords, launched)
    named, words = _as_names(args, own_names)
    named = named | {name: value for name, value in keywords.items() if value is not None}
    for name in named:
        _check_name(name, elsewhere)
    local = _translate_mode(named)
    words += itertools.starmap(flag_word, named.items())
    if launched is not None and not local:
        return _launched_settings(launched, words)
    values = _parsed(type_node, [*_environment_words(elsewhere), *words])
    if momentum is not None and not local:
        momentum_words = _momentum_words(values.method, momentum)
        _parse(values, momentum_words)
        words += momentum_words
    given_names = _given_names(_parsed(type_node, words))
    for name in given_names:
        _check_name(name, elsewhere)
    _fill_place(values, type_node)
    is_placed = bool(given_names & _PLACES) or args is not None
    if not is_placed and is_worker:
        values.set_default("model_from", FROM_WORKER)
    run = run_flags.read_run(values)
    if not builds_model and run.method.collective != THROUGH_PS:
        raise ConfigurationError(
            f"--collective={run.method.collective}: workers of a script exchange through the PS; "
            f"expected {THROUGH_PS}. Use main.py --type_node=Worker for other collectives."
        )
    if not builds_model and is_worker and run.method.overlap and not run.model_is_offered:
        raise ConfigurationError(
            "--overlap: a script whose PS builds the model from flags cannot overlap its training "
            "steps with exchanges; leave --overlap out, or start the script with `thinwire run`."
        )
    for warning in run.method.warnings:
        logging.warning("%s", warning)
    return ScriptSettings(run, values, given_names, local)


def _load_policy(args: Any, keywords: Mapping[str, Any], launched: LaunchedScript | None) -> None:
    """Load the file of --policy, which may bring settings, before the settings are read."""
    of_args = args.get("policy") if isinstance(args, Mapping) else getattr(args, "policy", None)
    named = keywords.get("policy") or of_args
    words = [] if launched is None else list(launched.flags)
    words += map(str, args) if isinstance(args, list | tuple) else []
    words += [] if named is None else [flag_word("policy", named)]
    policy_file.load_named(words, os.environ, ALL_TOPICS)


def _fill_place(values: flags.FlagValues, type_node: str) -> None:
    """Set the flags that give this process its place in a run from environment variables."""
    source, place = _position() or ("", None)
    if place is not None and (type_node == "Worker" or source == _TF_CONFIG):
        tf_config.fill_position(values, place, source)


def _environment_words(elsewhere: Mapping[str, str]) -> list[str]:
    """Return the flags in THINWIRE_FLAGS that a script may set, as ``--flag=value`` words.

    Args:
        elsewhere: Maps the name of a flag that a script must not set to advice about what to use
            instead.

    Raises:
        ConfigurationError: The variable THINWIRE_FLAGS is not a list of flags.
    """
    words_by_flag = environment.flags_of(os.environ, ALL_TOPICS)
    for name in sorted(words_by_flag.keys() & elsewhere.keys()):
        logging.warning(
            "%s: this script ignores the flag --%s: %s", environment.VARIABLE, name, elsewhere[name]
        )
    return [
        word
        for name, words in words_by_flag.items()
        if name in _options() and name not in elsewhere
        for word in words
    ]


def _launched_settings(launched: LaunchedScript, words: Sequence[str]) -> ScriptSettings:
    """Return the settings that `thinwire run` passes, merged with the script's own settings.

    Raises:
        ConfigurationError: A setting of the script contradicts a flag of `thinwire run`.
    """
    # A script that only evaluates connects with the Supervisor's certificate instead of a worker's.
    type_node = "Supervisor" if launched.evaluates else "Worker"
    values = _parsed(type_node, launched.flags, _LAUNCHED_TOPICS)
    script_values = _parsed("Worker", words)
    given_names = _given_names(script_values)
    for name in given_names:
        launcher_flag, script_flag = values[name], script_values[name]
        if launcher_flag.value == script_flag.value:
            continue
        if name not in _OWN or launcher_flag.present:
            raise ConfigurationError(
                f"the script gives distribute() {name}={script_flag.value}, but `thinwire run` "
                f"has --{name}={launcher_flag.value}; leave {name} out of the script, or give "
                f"`thinwire run` --{name}={script_flag.value}."
            )
        values[name].value = script_flag.value
    return ScriptSettings(run_flags.read_run(values), values, given_names, is_launched=True)


def _as_names(args: Any, elsewhere: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return settings as (dict by name, list of ``--flag=value`` words), of which one is empty."""
    if args is None:
        return {}, []
    if isinstance(args, str):
        raise ConfigurationError(
            f"args={args!r:.80}: expected a namespace, a mapping, or a list of words such as "
            "['--nb_workers=2']; split the string into words."
        )
    if isinstance(args, Mapping):
        return {name: value for name, value in args.items() if value is not None}, []
    if isinstance(args, Sequence):
        return {}, [str(word) for word in args]
    return dict(_of_namespace(args, elsewhere)), []


def _of_namespace(args: Any, elsewhere: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield pairs (name, value) of the Thinwire flags that a namespace object sets.

    Attributes of the namespace that are not Thinwire flags belong to the script and are skipped. An
    attribute of the namespace whose name is very similar to a Thinwire flag is rejected as a
    misspelling.

    Raises:
        ConfigurationError: The namespace `args` has no attributes, or an attribute is a misspelled
            flag.
    """
    is_absl = isinstance(args, flags.FlagValues)
    everything = args.flag_values_dict() if is_absl else getattr(args, "__dict__", None)
    if everything is None:
        raise ConfigurationError(
            f"args has type {type(args).__name__}; expected a namespace, mapping or list of words."
        )
    for name, value in everything.items():
        if name in _options() or name == "mode":
            if value is not None and name not in elsewhere:
                yield name, value
        elif near := _nearest(name, _SIMILAR):
            raise ConfigurationError(
                f"args.{name} is not a flag of Thinwire, but its name resembles --{near[0]}. "
                "Rename the argument, or give a mapping with the settings for Thinwire only."
            )


def _nearest(name: str, similarity: float) -> list[str]:
    """Return the name of the most similar setting; an empty list if none is similar enough."""
    return difflib.get_close_matches(name, [*_options(), "mode"], 1, similarity)


def _check_name(name: str, elsewhere: Mapping[str, str]) -> None:
    if name in elsewhere:
        raise ConfigurationError(f"setting {name} is not for scripts: {elsewhere[name]}. Omit it.")
    if name not in _options() and name != "mode":
        near = _nearest(name, 0.0)
        raise ConfigurationError(
            f"the argument {name} is no setting of Thinwire; did you mean {near[0]}? Expected the "
            "name of a flag of main.py (python main.py --help)."
        )


def _translate_mode(named: dict[str, Any]) -> bool:
    """Replace the settings `mode` and `method` of a script by the flag --method, in place.

    Returns:
        True for mode msgd, which has no server.
    """
    modes = {str(named.pop(name)).lower() for name in ("mode", "method") if name in named}
    if len(modes) > 1:
        raise ConfigurationError(
            "mode and method were both given, and name different training methods "
            f"({', '.join(sorted(modes))}); give only one of the two."
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


def _momentum_words(method: str, momentum: float) -> list[str]:
    """Return a training method's flag for the momentum that the worker applies.

    Raises:
        ConfigurationError: The workers of this training method apply no momentum.
    """
    name = _MOMENTUM_FLAGS.get(method)
    if momentum and name is None:
        raise ConfigurationError(
            f"momentum={momentum}: mode {method} has no momentum on the worker; expected 0, "
            f"or mode {', '.join(_MOMENTUM_FLAGS)} or {LOCAL}. For momentum on the server, set the "
            "flag momentum on all nodes."
        )
    return [] if name is None else [flag_word(name, momentum)]


def _parsed(
    type_node: str, words: Sequence[str], topics: Sequence[Topic] = _TOPICS
) -> flags.FlagValues:
    """Return the values of the flags in `words`, separate from absl's global FLAGS."""
    values = flags.FlagValues()
    flags.DEFINE_enum(
        "type_node",
        type_node,
        ["PS", "Worker", "Supervisor"],
        "",
        flag_values=values,
        module_name="Run",
    )
    values["type_node"].present = 1  # TF_CONFIG may set the id of this process, but not its role
    define(*topics, flag_values=values)
    _parse(values, words)
    return values


def _given_names(values: flags.FlagValues) -> frozenset[str]:
    return frozenset(name for name in _options() if values[name].present)


def _parse(values: flags.FlagValues, words: Sequence[str]) -> None:
    try:
        extra_words = values(["thinwire", *words])[1:]
    except flags.Error as error:
        raise ConfigurationError(f"{error}") from error
    if extra_words:
        raise ConfigurationError(
            f"args has the word {extra_words[0]!r}; expected words such as --nb_workers=2."
        )
