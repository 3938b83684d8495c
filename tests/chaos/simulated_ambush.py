"""Runs an action at the next message of one kind in a simulated run.

The intercepted method is restored as soon as the action has run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thinwire.ps.core import events
from thinwire.simulator.links import SimulatedConnection
from thinwire.simulator.messages import ReplyInFlight, StreamPart


def let_be(what: Any, name: str) -> None:
    """Give something its own method back."""
    vars(what).pop(name, None)


def at_push(
    connection: SimulatedConnection, act: Callable[[SimulatedConnection, int, Any], None]
) -> None:
    """Do something to the next push of a connection instead of delivering it.

    Args:
        connection: Which.
        act: Called with it, the number of the stream, and the push.
    """
    deliver = connection._deliver
    done: list[bool] = []

    def waylay(number: int, event: Any) -> None:
        is_push = isinstance(event, events.Push | StreamPart)  # with datagrams it comes in parts
        if done or not is_push or number != connection.number:
            deliver(number, event)
            return
        done.append(True)
        let_be(connection, "_deliver")
        act(connection, number, event)

    connection._deliver = waylay  # type: ignore[method-assign]


def at_answer(connection: SimulatedConnection, act: Callable[[SimulatedConnection], None]) -> None:
    """Do something as soon as the next answer to a push on a connection is on its way."""
    actions = connection.shard.actions
    send, done = actions._send, []

    def waylay(worker: int, message: Any, *rest: Any, **more: Any) -> None:
        is_answer = isinstance(message, ReplyInFlight) and message.step
        if not done and worker == connection.worker and is_answer:
            done.append(True)
            act(connection)
        send(worker, message, *rest, **more)

    actions._send = waylay  # type: ignore[method-assign]
