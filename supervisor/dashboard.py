"""The Supervisor's display of a run: a live table on a terminal, otherwise plain log lines.

The functions of the dashboard that compute text from a status and an evaluation have no side
effects.
"""

from __future__ import annotations

import collections
import dataclasses
import logging as standard_logging
import sys
from collections.abc import Callable
from typing import Any

from absl import logging

from thinwire.ops.routing.counters import BLOCK, rows_of
from thinwire.runtime.telemetry.evaluation import Evaluation
from thinwire.runtime.telemetry.run_status import RunStatus, WorkerMetrics

_BAR_CELLS = 20  # width of the progress bar in characters, as in Keras' progress bar
_RATE_WINDOW = 20  # number of run statuses from which the update rate for the ETA is computed
_MOST_WORKERS_SHOWN = 32
#: A metric is shown in scientific notation if its absolute value is outside these bounds.
_LEAST_PLAIN, _LARGEST_PLAIN = 1e-3, 1e4
_MOST_METRICS_SHOWN = 4  # largest number of metrics in a progress line, without the loss
_COLUMNS = ("id", "state", "clock", "lag", "steps/s", "loss", "up", "down", "waited")
_DATAGRAM_COLUMNS = ("fresh", "fill")
_STATE_STYLES = {
    "waiting": "yellow",
    "training": "green",
    "suspect": "bold red",
    "between fits": "green",
    "left": "dim",
    "done": "cyan",
}


@dataclasses.dataclass(frozen=True)
class Progress:
    """Status of a run at one moment, with values that the Supervisor's display derives from the
    status.

    ``evaluation`` is the newest evaluation of the model, None before the first evaluation.
    ``updates_per_second`` is the recent rate of updates, None if the rate is unknown.
    """

    status: RunStatus
    evaluation: Evaluation | None = None
    updates_per_second: float | None = None

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the run's last update at the recent rate; None if rate or ``iter_max`` is
        unknown.
        """
        if not self.status.iter_max or not self.updates_per_second:
            return None
        return max(0, self.status.iter_max - self.status.version) / self.updates_per_second


class RateMeter:
    """Computes a run's updates per second over the last statuses."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[float, int]] = collections.deque(maxlen=_RATE_WINDOW)

    def rate(self, status: RunStatus) -> float | None:
        """Record a status of the run; return the recent updates per second, None at the run's
        start.
        """
        now = (status.seconds, status.version)
        if self._seen and (now[1] < self._seen[-1][1] or now[0] < self._seen[-1][0]):
            # The PS restarted from an older snapshot, so the update rate across the restart would
            # be negative.
            self._seen.clear()
        if not self._seen or now != self._seen[-1]:
            self._seen.append(now)
        seconds = now[0] - self._seen[0][0]
        if seconds <= 0:
            return status.version / status.seconds if status.seconds > 0 else None
        return (now[1] - self._seen[0][1]) / seconds


def format_duration(seconds: float) -> str:
    """Return a duration in seconds as text: ``1:02:03``, ``2:03`` or ``3s``."""
    whole = int(seconds + 0.5)
    hours, minutes, remainder = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}:{minutes:02d}:{remainder:02d}"
    return f"{minutes}:{remainder:02d}" if minutes else f"{remainder}s"


def format_bytes(num_bytes: float) -> str:
    """Return a size with a decimal unit and three digits: ``9.00 kB``, ``1.20 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{_three_digits(num_bytes)} {unit}"
        num_bytes /= 1000
    return f"{_three_digits(num_bytes)} TB"


def format_metric(value: float | None) -> str:
    """Return a metric's value as text: ``0.3125``, or ``1.23e+05`` if it is very large or small.

    None stands for a value that is not finite.

    >>> format_metric(123456.7)
    '1.23e+05'
    """
    if value is None:
        return "not finite"
    plain = value == 0 or _LEAST_PLAIN <= abs(value) < _LARGEST_PLAIN
    return f"{value:.4f}" if plain else f"{value:.2e}"


def progress_line(progress: Progress) -> str:
    """Return a run's progress line in Keras' format: count of updates, bar, remaining time,
    metrics.
    """
    status = progress.status
    done, limit = status.version, status.iter_max
    head = f"{done}"
    if limit:
        filled = min(_BAR_CELLS, _BAR_CELLS * done // limit)
        head = f"{done:>{len(str(limit))}}/{limit} {'━' * filled}{'─' * (_BAR_CELLS - filled)}"
    return f"{head} {' - '.join([_times(progress), *_measures(progress)])}"


def plain_line(progress: Progress) -> str:
    """Return a run's progress line for a log file, without a bar, with worker counts by state."""
    status = progress.status
    head = f"update {status.version}" + (f"/{status.iter_max}" if status.iter_max else "")
    states = collections.Counter(worker.state for worker in status.workers)
    workers = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    extras = [f"fresh {_ratio(_datagrams(status).get('fresh'))}"] if _datagrams(status) else []
    extras += _refused(status)
    traffic = f"up {format_bytes(status.bytes_up)} - down {format_bytes(status.bytes_down)}"
    parts = [head, _times(progress), *_measures(progress), *extras, traffic]
    return " - ".join([*parts, f"workers: {workers or 'none'}"])


def worker_rows(status: RunStatus) -> list[tuple[str, ...]]:
    """Return a table row for each worker: id, state, clock, lag, rate, loss, traffic and wait.

    If the run sends UDP datagrams, a worker's table row has columns for fresh ratio and fill ratio,
    too.
    """
    rows = [_worker_row(worker) for worker in status.workers[:_MOST_WORKERS_SHOWN]]
    if not (block := _datagrams(status)):
        return rows
    datagrams_by_id = {row.get("id"): row for row in rows_of(block, "workers")}
    datagrams = [datagrams_by_id.get(worker.id, {}) for worker in status.workers]
    return [
        (*row, *(_ratio(of_worker.get(name)) for name in _DATAGRAM_COLUMNS))
        for row, of_worker in zip(rows, datagrams, strict=False)
    ]


def worker_table(status: RunStatus) -> list[str]:
    """Return the workers' table as plain lines, header first; no lines if no worker is known."""
    rows = worker_rows(status)
    if not rows:
        return []
    names = _COLUMNS + (_DATAGRAM_COLUMNS if _datagrams(status) else ())
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    aligned = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in (names, *rows)
    ]
    hidden = len(status.workers) - len(rows)
    return [*aligned, *([f"... and {hidden} more"] if hidden else [])]


def render(progress: Progress) -> Any:
    """Return a rich renderable: the table of workers above the progress line."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    status = progress.status
    present = sum(worker.state != "left" for worker in status.workers)
    title = Text(f"{status.method} · {present} of {status.nb_workers} workers", style="bold")
    table = Table(title=title, title_justify="left", pad_edge=False, box=None)
    for name in (*_COLUMNS, *(_DATAGRAM_COLUMNS if _datagrams(status) else ())):
        table.add_column(
            name, justify="left" if name == "state" else "right", header_style="dim", no_wrap=True
        )
    for worker, (number, state, *numbers) in zip(status.workers, worker_rows(status), strict=False):
        cells = [Text(number), Text(state, style=_STATE_STYLES[worker.state]), *map(Text, numbers)]
        table.add_row(*cells)
    parts: list[Any] = [table]
    hidden = len(status.workers) - _MOST_WORKERS_SHOWN
    if hidden > 0:
        parts.append(Text(f"… and {hidden} more", style="dim"))
    parts += [Text(line, style="yellow") for line in _refused(status)]
    return Group(*parts, Text(progress_line(progress), no_wrap=True, overflow="ellipsis"))


class Dashboard:
    """Shows the progress of a run while it trains; a context manager.

    Args:
        write: Function that receives one plain text line at each refresh of the display; None
            writes to absl's log.
        live: True to draw a live table; None to draw it if standard output is a terminal that can
            show the bar's characters.
        console: Console of the Python library rich to draw on, for tests; None for standard output.
    """

    def __init__(
        self,
        write: Callable[[str], None] | None = None,
        live: bool | None = None,
        console: Any = None,
    ) -> None:
        self._write = write or (lambda line: logging.info("%s", line))
        self.live = _can_draw() if live is None else live
        """True if a live table on a terminal shows every status."""
        self._console = console
        self._picture: Any = None  # the rich.live.Live table; None before the first status
        self._log_level = 0  # level of the log handler, which close() restores
        self._meter = RateMeter()

    def _start(self) -> Any:
        from rich.live import Live

        # The live table needs no refresh thread, because it changes only with a new status.
        picture = Live(console=self._console, auto_refresh=False)
        picture.start()
        handler = logging.get_absl_handler()
        self._log_level = handler.level
        # Log lines would break up the live table, so the log shows only warnings and errors.
        handler.setLevel(max(handler.level, standard_logging.WARNING))
        return picture

    def update(self, status: RunStatus, evaluation: Evaluation | None = None) -> None:
        """Show a status of the run and the newest evaluation; None before the first evaluation."""
        progress = Progress(status, evaluation, self._meter.rate(status))
        if not self.live:
            self._write(plain_line(progress))
            return
        if self._picture is None:
            self._picture = self._start()
        self._picture.update(render(progress), refresh=True)

    def close(self) -> None:
        """Stop the live table of the display, whose last content stays on the terminal. The method
        `close` of the display may be called twice.
        """
        if self._picture is not None:
            self._picture.stop()
            self._picture = None
            logging.get_absl_handler().setLevel(self._log_level)

    def __enter__(self) -> Dashboard:
        """Return the dashboard."""
        return self

    def __exit__(self, *unused: object) -> None:
        """Close the dashboard."""
        self.close()


def _can_draw() -> bool:
    encoding = (sys.stdout.encoding or "").lower()
    return sys.stdout.isatty() and encoding.startswith("utf")


def _times(progress: Progress) -> str:
    """Return a run's elapsed time with its estimated remaining time, or the stop reason if it
    ended.
    """
    elapsed = format_duration(progress.status.seconds)
    eta = progress.eta_seconds
    if progress.status.stop_reason is not None:
        return f"{elapsed} ({progress.status.stop_reason})"
    return elapsed if eta is None else f"{elapsed} ETA {format_duration(eta)}"


def _measures(progress: Progress) -> list[str]:
    evaluation, loss = progress.evaluation, progress.status.loss
    parts = []
    if evaluation is not None:
        metrics = dict(evaluation.metrics)
        test_loss = {"test loss": metrics.pop("loss")} if "loss" in metrics else {}
        shown = dict(list(metrics.items())[:_MOST_METRICS_SHOWN]) | test_loss
        parts += [f"{name}: {format_metric(value)}" for name, value in shown.items()]
    if loss is not None:
        parts.append(f"loss: {format_metric(loss)}")
    if progress.updates_per_second is not None:
        parts.append(f"{_three_digits(progress.updates_per_second)} updates/s")
    return parts


def _worker_row(worker: WorkerMetrics) -> tuple[str, ...]:
    return (
        str(worker.id),
        worker.state,
        str(worker.clock),
        str(worker.lag),
        _three_digits(worker.steps_per_second),
        "-" if worker.loss is None else format_metric(worker.loss),
        format_bytes(worker.bytes_up),
        format_bytes(worker.bytes_down),
        format_duration(worker.wait_seconds),
    )


def _refused(status: RunStatus) -> list[str]:
    """Return a text line with the counts of rejected updates and quarantines; nothing if all are
    0.
    """
    block = status.policies.get("guards", {})
    counts = [
        f"{sum(by.values())} {reason} of worker {', '.join(sorted(by, key=int))}"
        for reason, by in block.get("refused", {}).items()
    ]
    if quarantines := sum(block.get("quarantines", {}).values()):
        counts.append(f"{quarantines} quarantine{'s' if quarantines > 1 else ''}")
    return [f"refused: {', '.join(counts)}"] if counts else []


def _datagrams(status: RunStatus) -> dict[str, Any]:
    """Return the UDP datagram counters of a run's status; empty if the training method sends no
    datagrams.
    """
    return status.policies.get(BLOCK, {})


def _ratio(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, int | float) else "-"


def _three_digits(value: float) -> str:
    """Return a number with about three digits: 0.12, 1.23, 12.3 or 123."""
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
