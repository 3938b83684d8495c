"""Kills a node of a script's run at an instant of the script's `ScriptMember`, as a plan says.

The plan is a JSON object in the environment variable CHAOS_KILL: `worker`, whose events count;
`number`, of the event; `victim`, the node that is killed; `struck`, a file that is made then, so
that a restarted process kills nobody. Without `number`, the instants of each worker are appended to
the file `trace`.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
from typing import Any

from tests.scripts.quality import MARK
from thinwire.script import identity, member

KILL = "CHAOS_KILL"


def install() -> None:
    """Count the events of this process's members from now on, if there is a plan."""
    plan = json.loads(os.environ.get(KILL, "{}"))
    me = identity.worker_id()
    if plan and me:
        member.ScriptMember.receive = _counted(plan, me)  # type: ignore[method-assign]


def _counted(plan: dict[str, Any], me: int) -> Any:
    receive, instants = member.ScriptMember.receive, [0]

    def counting(owner: member.ScriptMember, event: member.Event) -> member.Action | None:
        action = receive(owner, event)
        if event is not member.Event.LOOP_STEPS:
            instants[0] += 1
            if "number" not in plan:
                _note(plan["trace"], me, owner, event)
            elif (me, instants[0]) == (plan["worker"], plan["number"]):
                _strike(plan)
        return action

    return counting


def _note(trace: str, me: int, owner: member.ScriptMember, event: member.Event) -> None:
    line = json.dumps([me, owner.standing.name, event.name]) + "\n"
    descriptor = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
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
