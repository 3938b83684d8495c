"""Flags that only a Supervisor reads."""

from __future__ import annotations

import dataclasses
import re

from absl import flags

from thinwire.ops.offer import FROM_WORKER
from thinwire.runtime.run.flags import FlagRule, Topic, advanced, integer, number, words
from thinwire.runtime.run.settings import Run

FLAGS = flags.FLAGS
_IS_FUNCTION = FlagRule(
    lambda text: re.fullmatch(r"[\w.]+:[\w.]+", text) is not None,
    "must be the names of a module and of its function: --on_metrics=module:function",
)
#: Flags that a script in the evaluator's role gets a value of its own for, or none.
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
                "eval_interval_seconds", 60.0, "Time between two evaluations.", "seconds", low=0.0
            ),
            integer(
                "eval_interval_updates",
                0,
                "Also evaluate after so many applied updates; 0: by time alone.",
                "updates",
                low=0,
            ),
            words(
                "advice",
                None,
                "The advice.json of an Advisor, whose prediction the summary compares.",
                "file",
                unset="that in --run_dir, if there is one",
            ),
            words(
                "on_metrics",
                None,
                "A Python function that is called with each record: of W&B, MLflow and the like.",
                "module:function",
                rule=_IS_FUNCTION,
                unset="none",
            ),
            *advanced(
                words(
                    "report_dir",
                    None,
                    "Where a Supervisor keeps a copy of its records, best model and report: a "
                    "folder, or s3://bucket/folder.",
                    "address",
                    unset="in --run_dir alone",
                ),
                number(
                    "status_interval_seconds",
                    10.0,
                    "Time between two lines of progress where there is no terminal.",
                    "seconds",
                    low=0.1,
                ),
            ),
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class SupervisorFlags:
    """How often the central model is evaluated, and the run shown."""

    eval_interval_seconds: float
    eval_interval_updates: int
    status_interval_seconds: float


def check(run: Run) -> None:
    """Refuse a place for records that is of no use.

    Raises:
        ConfigurationError: It names no storage, or one that cannot be reached, written or read.
    """
    if run.report_dir is not None:
        from thinwire.runtime.persistence.places import REPORTS, check_place

        check_place(run.report_dir, REPORTS)


def read() -> SupervisorFlags:
    """Return the Supervisor's settings."""
    return SupervisorFlags(
        FLAGS.eval_interval_seconds, FLAGS.eval_interval_updates, FLAGS.status_interval_seconds
    )


def script_words(run: Run) -> list[str]:
    """Return the flags of a script that runs beside this Supervisor, and takes no GPU of a worker.

    Args:
        run: The run's settings.
    """
    names = [name for name in FLAGS if FLAGS[name].present and name not in _OWN_OF_EVALUATOR]
    own = [option.name for topic in TOPICS for option in topic.options]
    given = (FLAGS[name].serialize() for name in names if name not in own)
    return [
        *(word for text in given for word in text.split("\n") if word),
        f"--model_from={FROM_WORKER}",
        f"--nb_workers={run.nb_workers}",
        f"--ps_hosts={','.join(run.addresses)}",
        f"--seed={run.seed}",
        f"--run_dir={run.run_dir.resolve()}",
        "--device=cpu",
    ]
