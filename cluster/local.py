"""The Cluster role: every node of a run as a real process of this machine.

Starts PS shards, workers and a Supervisor as plain ``python main.py`` command lines, passes signals
on, reaps every child, and exits with the worst of their codes.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from absl import flags, logging

from ops.run import EXIT_DONE, EXIT_INTERRUPTED, EXIT_UNREACHABLE, Run, finished_summary
from worker.flags import devices

FLAGS = flags.FLAGS
_MAIN = pathlib.Path(__file__).resolve().parent.parent / "main.py"
#: Flags that each child gets a value of its own for.
_OWN_FLAGS = ("type_node", "id_worker", "id_ps", "ip_PS", "port", "ps_hosts", "nb_ps", "run_dir",
              "overwrite", "flagfile", "batch_size", "linger_seconds")  # fmt: skip
_KILL_AFTER_SECONDS = 20.0
#: Children have a session of their own: what ends us must be passed on, a closed terminal too.
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass
class Child:
    """One node."""

    name: str
    role: str
    process: subprocess.Popen[bytes]


def main(run: Run) -> int:
    """Run the whole cluster; return the worst exit code of its nodes."""
    devices(run.nb_workers)  # refuses what cannot be emulated before anything starts
    if run.overwrite:
        _clear(run.run_dir)
    if finished := finished_summary(run):
        logging.info("this run is finished (%s); see %s, or --overwrite it", finished,
                     run.run_dir / "report" / "index.html")  # fmt: skip
        return EXIT_DONE
    return _Cluster(run).run()


def _clear(run_dir: pathlib.Path) -> None:
    """Remove what an earlier run wrote here, and nothing else."""
    for name in ("checkpoints", "tb", "report"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    for name in ("metrics.jsonl", "summary.json", "best.keras"):
        (run_dir / name).unlink(missing_ok=True)


class _Cluster:
    """The children of one run."""

    def __init__(self, run: Run) -> None:
        self.run_settings = run
        self.addresses = self._choose_addresses()
        self.children: list[Child] = []
        self.interrupted = threading.Event()
        self.root_cause: int | None = None  # exit code of the failure that ended the run
        self.common = self._common_flags()

    def run(self) -> int:
        """Start everybody, wait for the end, reap everybody."""
        previous = [(number, signal.signal(number, self._interrupt)) for number in _END_SIGNALS]
        try:
            self._start()
            self._wait()
        finally:
            self._reap()
            for number, handler in previous:
                signal.signal(number, handler)
        return self._code()

    def _start(self) -> None:
        run = self.run_settings
        for shard in range(run.nb_ps):
            self._spawn(f"ps-{shard}", "PS", [f"--id_ps={shard}", "--linger_seconds=60"])
        for worker in range(1, run.nb_workers + 1):
            self._spawn(f"worker-{worker}", "Worker", [f"--id_worker={worker}"])
        self._spawn("supervisor-0", "Supervisor", ["--batch_size=1000"])

    def _spawn(self, name: str, role: str, own: list[str]) -> None:
        command = [sys.executable, str(_MAIN), f"--type_node={role}", *self.common]
        if role != "Supervisor":  # the Supervisor alone speaks; the others' logs are in files
            command += [f"--batch_size={FLAGS.batch_size}", "--quiet"]
        command.append(f"--ps_hosts={','.join(self.addresses)}")
        process = subprocess.Popen(
            [*command, *own],
            start_new_session=True,  # a terminal's Ctrl-C reaches them through us alone
        )
        self.children.append(Child(name, role, process))

    def _wait(self) -> None:
        """Wait until every node has ended; once one has failed for good, end the others."""
        deadline: float | None = None
        while any(child.process.poll() is None for child in self.children):
            time.sleep(0.1)
            if self.root_cause is None:
                self.root_cause = self._failure()
                if self.root_cause is not None:
                    self._signal(signal.SIGTERM)
            ps_gone = all(child.process.poll() is not None for child in self._of("PS"))
            if ps_gone or self.root_cause is not None or self.interrupted.is_set():
                deadline = deadline or time.monotonic() + _KILL_AFTER_SECONDS
            if deadline is not None and time.monotonic() >= deadline:
                return

    def _failure(self) -> int | None:
        """Return the exit code that dooms the run: a PS's, or the first worker's of all."""
        for child in self._of("PS"):
            code = child.process.poll()
            if code not in (None, EXIT_DONE):
                return EXIT_UNREACHABLE if code < 0 else code
        codes = [child.process.poll() for child in self._of("Worker")]
        if all(code not in (None, EXIT_DONE) for code in codes):
            return next((code for code in codes if code and code > 0), EXIT_UNREACHABLE)
        return None

    def _interrupt(self, number: int, frame: Any) -> None:
        del frame
        logging.info("%s: ending the cluster", signal.Signals(number).name)
        self.interrupted.set()
        self._signal(signal.SIGINT)

    def _signal(self, number: int) -> None:
        for child in self.children:
            if child.process.poll() is None:
                child.process.send_signal(number)

    def _reap(self) -> None:
        for child in self.children:
            if child.process.poll() is None:
                logging.warning("%s does not end; killing it", child.name)
                child.process.kill()
            child.process.wait()

    def _of(self, role: str) -> list[Child]:
        return [child for child in self.children if child.role == role]

    def _code(self) -> int:
        """Return what went wrong; a killed worker does not spoil a run that reached its end."""
        codes = {child.name: child.process.returncode for child in self.children}
        logging.info("exit codes: %s", codes)
        if self.interrupted.is_set():
            return EXIT_INTERRUPTED
        return self.root_cause or max(0, *codes.values())

    def _choose_addresses(self) -> tuple[str, ...]:
        """Take the asked ports; port 0 means any free ones."""
        addresses = self.run_settings.addresses
        if FLAGS.port != 0 or FLAGS.ps_hosts:
            return addresses
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in addresses]
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            each.close()
        return tuple(f"127.0.0.1:{port}" for port in ports)

    def _common_flags(self) -> list[str]:
        """Return every flag that was given here, for the children."""
        given = [
            FLAGS[name].serialize()
            for name in FLAGS
            if FLAGS[name].present and name not in _OWN_FLAGS
        ]
        threads = FLAGS.worker_threads or max(
            1, (os.cpu_count() or 1) // self.run_settings.nb_workers
        )
        return [
            *(part for text in given for part in text.split("\n") if part),
            f"--run_dir={self.run_settings.run_dir}",
            f"--worker_threads={threads}",
        ]
