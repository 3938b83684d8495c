"""Kills a node of a script's run at an instant of the script's `ScriptMember`, as a plan says.

The plan is a JSON object in the environment variable CHAOS_KILL: `worker`, whose events count;
`count`, of the event among those in the `standing`; `victim`, the node that is killed; `struck`, a
file that is made then, so that a restarted process kills nobody. Without `count`, the instants of
each worker are appended to the file `trace`.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import signal
from typing import Any

from tests.scripts.quality import MARK
from thinwire.script import identity, member
from thinwire.script.keras.exchange import StepExchange

KILL = "CHAOS_KILL"


def install() -> None:
    """Count the events of this process's members from now on, if there is a plan."""
    plan = json.loads(os.environ.get(KILL, "{}"))
    me = identity.worker_id()
    if not (plan and me):
        return
    instants = Instants(plan, me)
    receive, exchange = member.ScriptMember.receive, StepExchange.exchange

    def counting(owner: member.ScriptMember, event: member.Event) -> member.Action | None:
        action = receive(owner, event)
        if event is not member.Event.LOOP_STEPS:
            instants.note(owner.standing.name, event.name)
        return action

    def exchanging(owner: StepExchange, *arguments: Any) -> Any:
        instants.note(owner._member.state.standing.name, "EXCHANGE")
        return exchange(owner, *arguments)

    member.ScriptMember.receive = counting  # type: ignore[method-assign]
    StepExchange.exchange = exchanging  # type: ignore[method-assign]


class Instants:
    """Counts the instants of a process, and kills at the planned one.

    Args:
        plan: Plan of the kill; see the module.
        me: Id of this worker.
    """

    def __init__(self, plan: dict[str, Any], me: int) -> None:
        self._plan, self._me = plan, me
        self._counts: collections.Counter[str] = collections.Counter()

    def note(self, standing: str, event: str) -> None:
        """Count an event, by the standing that it led to."""
        self._counts[standing] += 1
        plan = self._plan
        if "count" in plan:
            found = (self._me, standing, self._counts[standing])
            if found == (plan["worker"], plan["standing"], plan["count"]):
                _strike(plan)
            return
        line = json.dumps([self._me, standing, event]) + "\n"
        descriptor = os.open(plan["trace"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def _strike(plan: dict[str, Any]) -> None:
    try:
        pathlib.Path(plan["struck"]).touch(exist_ok=False)
    except FileExistsError:
        return
    victim = plan["victim"]
    if victim == f"worker-{plan['worker']}":
        os.kill(os.getpid(), signal.SIGKILL)
    for pid in _pids(victim):
        os.kill(pid, signal.SIGKILL)


def _pids(victim: str) -> list[int]:
    """Return the processes of a node of this run, without its watchdog."""
    kind, _, number = victim.partition("-")
    flag = {"worker": f"--id_worker={number}", "ps": f"--id_ps={number}"}.get(kind, "--evaluates")
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            is_of_run = f"{MARK}={os.environ[MARK]}".encode() in (folder / "environ").read_bytes()
        except (OSError, UnicodeDecodeError):
            continue
        if is_of_run and flag in words and not any("watchdog.py" in word for word in words):
            found.append(int(folder.name))
    return found
