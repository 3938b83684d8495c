"""Command-line flags that only the Supervisor reads."""

from __future__ import annotations

import dataclasses
import re

from absl import flags

from thinwire.ops.offer import FROM_WORKER
from thinwire.ops.options import FlagRule, Topic, advanced, integer, number, words
from thinwire.runtime.run.settings import Run

FLAGS = flags.FLAGS
_IS_FUNCTION = FlagRule(
    lambda text: re.fullmatch(r"[\w.]+:[\w.]+", text) is not None,
    "must name a module and a function of the module: --on_metrics=module:function",
)
#: Flags that the evaluator's script does not inherit from the Supervisor. The function
#: `script_words` sets some of these flags, and the other flags have their defaults.
_OWN_OF_EVALUATOR = (
    "type_node",
    "model_from",
    "nb_workers",
    "nb_ps",
    "ps_hosts",
    "ip_PS",
    "port",
    "seed",
    "run_dir",
    "device",
    "overwrite",
    "flagfile",
    "batch_size",
    "quiet",
    "metrics_port",
    "worker_threads",
    "target_accuracy",
    "target",
    "verbosity",
)

TOPICS = (
    Topic(
        "Supervisor",
        (
            number(
                "eval_interval_seconds", 60.0, "Time between model evaluations.", "seconds", low=0.0
            ),
            integer(
                "eval_interval_updates",
                0,
                "Also evaluate the model after this number of applied updates; 0: by time alone.",
                "updates",
                low=0,
            ),
            words(
                "advice",
                None,
                "The advice.json of an Advisor; summary.json compares its prediction with the run.",
                "file",
                unset="advice.json in --run_dir, if the file exists",
            ),
            words(
                "on_metrics",
                None,
                "Python function to call with each metrics record, for example for W&B or MLflow.",
                "module:function",
                rule=_IS_FUNCTION,
                unset="none",
            ),
            *advanced(
                words(
                    "report_dir",
                    None,
                    "Storage to which the Supervisor copies its records, best model and report: a "
                    "folder, or s3://bucket/folder.",
                    "address",
                    unset="in --run_dir alone",
                ),
                number(
                    "status_interval_seconds",
                    10.0,
                    "Time between Supervisor progress lines if its output is not a terminal.",
                    "seconds",
                    low=0.1,
                ),
            ),
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class SupervisorFlags:
    """Settings that define how often the Supervisor evaluates the central model and shows progress.

    Attributes:
        eval_interval_seconds: Time between two evaluations, in seconds.
        eval_interval_updates: Number of updates between two evaluations; 0 means that only the
            time decides when to evaluate.
        status_interval_seconds: Time between two progress lines, in seconds.
    """

    eval_interval_seconds: float
    eval_interval_updates: int
    status_interval_seconds: float


def check(run: Run) -> None:
    """Check that the storage that --report_dir names can be used.

    Raises:
        ConfigurationError: The value of --report_dir names no storage, or the storage cannot be
            reached, written or read.
    """
    if run.report_dir is not None:
        from thinwire.runtime.persistence.places import REPORTS, check_place

        check_place(run.report_dir, REPORTS)


def read() -> SupervisorFlags:
    """Return the values of the command-line flags that only the Supervisor reads."""
    return SupervisorFlags(
        FLAGS.eval_interval_seconds, FLAGS.eval_interval_updates, FLAGS.status_interval_seconds
    )


def script_words(run: Run) -> list[str]:
    """Return the flags of the evaluator's script, which runs on the CPU of the Supervisor's
    machine.

    Args:
        run: Settings of the training run.
    """
    names = [name for name in FLAGS if FLAGS[name].present and name not in _OWN_OF_EVALUATOR]
    supervisor_names = [option.name for topic in TOPICS for option in topic.options]
    flag_texts = (FLAGS[name].serialize() for name in names if name not in supervisor_names)
    return [
        *(word for text in flag_texts for word in text.split("\n") if word),
        f"--model_from={FROM_WORKER}",
        f"--nb_workers={run.nb_workers}",
        f"--ps_hosts={','.join(run.addresses)}",
        f"--seed={run.seed}",
        f"--run_dir={run.run_dir.resolve()}",
        "--device=cpu",
    ]
