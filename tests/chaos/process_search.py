"""Random faults on real processes that record their histories; see `tests.chaos.search`."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import pathlib
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from tests.chaos.checker import Violation, check
from tests.chaos.history import History
from tests.chaos.process_cast import Cast, wait_until
from tests.chaos.process_end import declared_by, ended
from tests.chaos.proxy import DOWN, UP
from tests.chaos.verdict import Verdict
from thinwire.ops.methods.method import METHODS
from thinwire.runtime.run.lock import owner_of
from thinwire.runtime.run.settings import EXIT_CONFIGURATION
from thinwire.runtime.telemetry.run_status import WorkerMetrics

_ENTROPY = 79
_MODEL = f"--model={pathlib.Path(__file__).with_name('tiny_model.py')}"
#: Method -> flags that make the method effective on a small model.
_FLAGS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("adacomp", "dgs", "dgc", "gd"), ("--compression_rate=0.3",)),
    "dgt": ("--dgt_k=0.3", "--dgt_block_size=16", "--dgt_wait_ms=20"),
    "gsp": ("--groups=1,2|3",),
    "ssp": ("--staleness_bound=1",),
    "asgd": ("--momentum=0.9",),
    "sparseloco": (
        *("--chunk=8", "--chunk_k=2"),
        *("--local_steps=2", "--local_optimizer=sgd"),
    ),
}
_NB_WORKERS, _FEWEST_WORKERS = 3, 2
_MOST_FAULTS = 4
_SECONDS = 6.0  # period of the faults
_PATIENCE_SECONDS = 90.0
_STEP_SECONDS = 0.03
_REFUSAL_SECONDS = 30.0  # limit for the rejection of a second process
#: Log line of a shard that ends because its disk rejects the first snapshot.
_NO_SNAPSHOT = "cannot write a checkpoint into"
_RESTART_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Strike:
    """One fault: its time, kind, victim, and further drawn values."""

    at: float  # seconds
    kind: str
    name: str
    seed: int

    def __str__(self) -> str:
        return f"{self.kind} / {self.name} at {self.at:.1f} s (seed {self.seed})"


@dataclasses.dataclass(frozen=True)
class ProcessTrial:
    """One run of real processes, and its faults."""

    seed: int
    number: int
    method: str
    journal: str
    nb_ps: int
    nb_workers: int
    strikes: tuple[Strike, ...]
    kept: tuple[int, ...]  # numbers of the strikes, before any were left out

    @staticmethod
    def of(seed: int, number: int) -> ProcessTrial:
        """Return the trial with this number of a seed; its drawn part is always the same."""
        dice = random.Random(f"{_ENTROPY} {seed} {number}")
        method = list(METHODS)[number % len(METHODS)]
        journal, nb_ps = dice.choice(("on", "on", "auto")), dice.choice((1, 2))
        names = [f"ps-{shard}" for shard in range(nb_ps)]
        workers = [f"worker-{worker}" for worker in range(1, _NB_WORKERS + 1)]
        strikes = []
        for _ in range(dice.randint(1, _MOST_FAULTS)):
            kind = dice.choice(list(KINDS))
            whom = names if KINDS[kind].of_shards else names + workers
            at = dice.uniform(0.0, _SECONDS)
            strikes.append(Strike(at, kind, dice.choice(whom), dice.getrandbits(31)))
        kept = tuple(range(len(strikes)))
        return ProcessTrial(seed, number, method, journal, nb_ps, _NB_WORKERS, tuple(strikes), kept)

    def __str__(self) -> str:
        return (
            f"{self.method}, {self.nb_ps} shards, --journal={self.journal}, {self.nb_workers} "
            "workers, processes: " + "; ".join(map(str, self.strikes))
        )

    @property
    def faults(self) -> list[str]:
        """Kinds of the trial's faults."""
        return [strike.kind for strike in self.strikes]

    @property
    def command(self) -> str:
        """The command that repeats the trial."""
        faults = ",".join(map(str, self.kept)) or "none"
        return (
            f"python -m tests.chaos.search --seed {self.seed} --repeat {self.number} --real "
            f"--faults {faults} --workers {self.nb_workers}"
        )

    def smaller(self) -> Iterator[ProcessTrial]:
        """Return trials with one fault or worker less."""
        for left in range(len(self.strikes)):
            yield self.keeping([n for n in range(len(self.strikes)) if n != left])
        last = f"worker-{self.nb_workers}"
        free = all(strike.name != last for strike in self.strikes) and self.method != "gsp"
        if free and self.nb_workers > _FEWEST_WORKERS:
            yield dataclasses.replace(self, nb_workers=self.nb_workers - 1)

    def keeping(self, numbers: list[int]) -> ProcessTrial:
        """Return it with these of its faults alone."""
        return dataclasses.replace(
            self,
            strikes=tuple(self.strikes[number] for number in numbers),
            kept=tuple(self.kept[number] for number in numbers),
        )

    def resized(self, workers: int, steps: int) -> ProcessTrial:
        """Return the trial with this many workers; the trial ends by time."""
        del steps
        return dataclasses.replace(self, nb_workers=workers)


def play(trial: ProcessTrial, plant: str = "") -> Verdict:
    """Play a trial, perhaps with a bug in every node, and check its history."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="thinwire-history-"))
    flags = (
        *(f"--method={trial.method}", f"--journal={trial.journal}"),
        *(f"--step_seconds={_STEP_SECONDS}", *_FLAGS.get(trial.method, ())),
    )
    cast = Cast(
        folder, flags, trial.nb_workers, trial.nb_ps, trial.number + 1, model=_MODEL, plant=plant
    )
    found: list[Violation] = []
    history = History()
    try:
        try:
            Struck(cast).play(trial.strikes)
        except AssertionError as error:
            found.append(Violation("ends", str(error)[:3000]))
        finally:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                cast.close()
        history = cast.history()
        if not found:
            history += ended(cast)
        if all((cast.run_dir / f"flags-{name}.txt").exists() for name in cast.shards):
            found += check(history, declared_by(cast))  # otherwise the run has not started
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Verdict(tuple(found), history)


class Struck:
    """Applies faults to the processes of a run; to be used once.

    Attributes:
        bad_disks: Names of nodes whose disk has rejected writes, or rejects writes now.

    Args:
        cast: Not yet started.
    """

    def __init__(self, cast: Cast) -> None:
        self.cast = cast
        self.bad_disks: set[str] = set()
        self._began = 0.0
        self._due: list[tuple[float, float, Callable[[], None]]] = []
        self._down: set[str] = set()
        self._seconds: list[str] = []  # names of second processes

    def play(self, strikes: tuple[Strike, ...]) -> None:
        """Start all nodes, apply the faults, repair them, and end the run.

        Raises:
            AssertionError: The run does not continue, or a node ends unexpectedly.
        """
        cast = self.cast
        cast.start_all(supervisor=False)
        self._progress("at the start")
        self._began = time.monotonic()
        for strike in strikes:
            self.later(strike.at, lambda strike=strike: KINDS[strike.kind].strike(self, strike))
        wait_until(self._is_over, _SECONDS + _PATIENCE_SECONDS, "the end of all faults")
        self._progress("after all faults")
        for name in self._seconds:
            wait_until(lambda name=name: not cast.is_running(name), _REFUSAL_SECONDS)  # type: ignore[misc]
            code = cast.nodes.processes[name].poll()
            assert code == EXIT_CONFIGURATION, f"{name} was not refused: its exit code is {code}"
            del cast.nodes.processes[name]
        cast.halt()
        codes = cast.wait(list(cast.nodes.processes), _PATIENCE_SECONDS)
        wrong = {name: code for name, code in codes.items() if code}
        outputs = {name: cast.nodes.output(name)[-1500:] for name in wrong}
        assert not wrong, f"ended with {wrong}: {outputs}"

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Call a function this many seconds after the first fault, or now if the time is past."""
        when = max(self._began + seconds, time.monotonic())
        heapq.heappush(self._due, (when, len(self._due) + random.random(), what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Call a function in this many seconds."""
        self.later(time.monotonic() - self._began + seconds, what)

    def start_after(self, seconds: float, name: str) -> None:
        """Restart a killed node."""
        self._down.add(name)

        def start() -> None:
            self.cast.start(name)
            self._down.discard(name)

        self.after(seconds, start)

    def is_down(self, name: str) -> bool:
        """Whether a node has been killed and is not back."""
        return name in self._down

    def start_second(self, name: str) -> None:
        """Start a second process on a shard's files, once."""
        if (second := f"second-{name}") in self._seconds:
            return
        owner = owner_of(self.cast.run_dir / "locks" / f"{name}.lock")
        is_first = owner is not None and owner.pid == self.cast.pid(name)
        if self.is_down(name) or not is_first:  # the second one would take its place, as it may
            self.after(0.5, lambda: self.start_second(name))
        else:
            self.cast.start_second(name)
            self._seconds.append(second)

    def has_second(self, name: str) -> bool:
        """Whether a second process of a shard runs."""
        return f"second-{name}" in self._seconds and self.cast.is_running(f"second-{name}")

    def _is_over(self) -> bool:
        """Run all due actions; return True if no action is left."""
        self._mend()
        return not self._due

    def _mend(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        for name, process in self.cast.nodes.processes.items():
            if process.poll() is None or name in self._down or name in self._seconds:
                continue
            said = self.cast.nodes.output(name)[-2000:]
            is_promised = process.returncode == EXIT_CONFIGURATION and _NO_SNAPSHOT in said
            if not (is_promised and name in self.bad_disks):
                raise AssertionError(f"{name} ended with {process.returncode} unasked: {said}")
            self.start_after(_RESTART_SECONDS, name)  # the same command resumes

    def _progress(self, when: str) -> None:
        """Wait until every worker has made progress."""
        before: dict[int, int] = {}

        def goes_on() -> bool:
            self._mend()
            pushes = {each.id: each.pushes for each in self._status() if each.id}
            if len(pushes) < self.cast.nb_workers:
                return False
            before.update({each: pushes[each] for each in pushes if each not in before})
            return all(pushes[each] >= before[each] + 2 for each in pushes)

        wait_until(goes_on, _PATIENCE_SECONDS, f"two more pushes of every worker {when}")

    def _status(self) -> Sequence[WorkerMetrics]:
        return self.cast.status(_PATIENCE_SECONDS).workers


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    strike: Callable[[Struck, Strike], None]
    of_shards: bool = False


def _kill(struck: Struck, strike: Strike) -> None:
    if struck.has_second(strike.name):  # it may replace the killed process
        struck.after(0.2, lambda: _kill(struck, strike))
    elif not struck.is_down(strike.name):
        struck.cast.kill(strike.name)
        struck.start_after(random.Random(strike.seed).uniform(0.0, 2.0), strike.name)


def _pause(struck: Struck, strike: Strike) -> None:
    struck.cast.signal(strike.name, signal.SIGSTOP)
    seconds = random.Random(strike.seed).choice((0.3, 1.0, 2.5, 5.0))
    struck.after(seconds, lambda: struck.cast.signal(strike.name, signal.SIGCONT))


def _wires(change: Callable[[object, random.Random], None]) -> Callable[[Struck, Strike], None]:
    def strike_wires(struck: Struck, strike: Strike) -> None:
        dice = random.Random(strike.seed)
        for wire in struck.cast.wires_of(strike.name):
            change(wire, dice)

    return strike_wires


def _weather(struck: Struck, strike: Strike) -> None:
    dice, weather = random.Random(strike.seed), struck.cast.weather
    for name in ("drops", "doubles", "overtaken", "garbles"):
        setattr(weather, name, dice.choice((0.0, 0.3)))

    def clear() -> None:
        weather.drops = weather.doubles = weather.overtaken = weather.garbles = 0.0

    struck.after(dice.uniform(0.5, 3.0), clear)


def _trouble(**what: float) -> Callable[[Struck, Strike], None]:
    def strike_node(struck: Struck, strike: Strike) -> None:
        struck.cast.trouble(strike.name, **what)
        if "fails" in what:
            struck.bad_disks.add(strike.name)
        struck.after(
            random.Random(strike.seed).uniform(0.5, 3.0),
            lambda: struck.cast.trouble(strike.name),
        )

    return strike_node


def _clock(struck: Struck, strike: Strike) -> None:
    ahead = random.Random(strike.seed).choice((-1e6, -3600.0, 3600.0, 1e6))
    _trouble(clock_seconds=ahead)(struck, strike)


#: Name -> action.
KINDS: dict[str, Kind] = {
    "kill": Kind(_kill),
    "kill of a shard": Kind(_kill, of_shards=True),
    "pause": Kind(_pause),
    "cut": Kind(_wires(lambda wire, dice: wire.cut(dice.choice((0.2, 1.0, 4.0))))),
    "half-open": Kind(_wires(lambda wire, dice: wire.vanish(dice.choice((1.0, 4.0))))),
    "stall": Kind(
        _wires(lambda wire, dice: wire.stall(dice.choice((0.5, 2.0)), dice.choice((UP, DOWN))))
    ),
    "delay": Kind(_wires(lambda wire, dice: wire.delay(3.0, dice.uniform(0.01, 0.2)))),
    "reset": Kind(_wires(lambda wire, dice: wire.reset())),
    "datagrams": Kind(_weather),
    "clock jump": Kind(_clock),
    "slow disk": Kind(_trouble(slow_seconds=0.15), of_shards=True),
    "disk error": Kind(_trouble(fails=1), of_shards=True),
    "second process": Kind(lambda struck, strike: struck.start_second(strike.name), of_shards=True),
    # Pushes sent meanwhile arrive, and are sent again on the next connection.
    "lost answers": Kind(_wires(lambda wire, dice: wire.vanish(dice.choice((1.0, 2.0)), DOWN))),
}
