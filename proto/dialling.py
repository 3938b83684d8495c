"""How a client finds a shard: one attempt after another, until it is let in or has no patience."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from absl import logging

from ops.arrivals import Attempts, Backoff
from proto import thinwire_pb2 as pb
from proto.channel_grpc import StreamLost, Unreachable
from proto.session import Refused, Session

#: The first attempt's time, also for whoever waits to hear that nobody answers; longer ones follow.
_FIRST_ATTEMPT_SECONDS = 2.0
#: How many attempts there should be at least.
_LEAST_ATTEMPTS = 4
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0
#: Of a lease: who finds the shard again after a short cut is to be there before its lease ends.
_PAUSE_PER_LEASE = 1 / 4
#: A Hello refused for these reasons may be accepted a little later.
_TRANSIENT = (pb.REASON_STARTING, pb.REASON_FULL, pb.REASON_QUARANTINED)


class Dialler:
    """Opens one session after another to the same shard.

    Args:
        name: Of the shard, for messages.
        make: Makes a session that is not open yet.
        closing: Set when the client is asked to stop.
        transient: Refusals of a Hello after which to say it again; a refusal that names a time for
            that is always one.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Session],
        closing: threading.Event,
        transient: tuple[int, ...] = _TRANSIENT,
    ) -> None:
        self._name, self._make = name, make
        self._closing, self._transient = closing, transient
        self._attempts = Attempts(_FIRST_ATTEMPT_SECONDS, _FIRST_ATTEMPT_SECONDS)
        self._longest_pause_seconds = _LONGEST_PAUSE_SECONDS

    def dial(self, patience_seconds: float) -> tuple[Session, pb.Welcome]:
        """Return a session that is welcome, and the welcome.

        Raises:
            Unreachable: Nobody answered for the whole patience, or the client is to stop.
            Refused: The shard said no for good.
        """
        deadline = time.monotonic() + patience_seconds
        self._attempts.most_seconds = max(
            _FIRST_ATTEMPT_SECONDS, patience_seconds / _LEAST_ATTEMPTS
        )
        pauses = Backoff(_FIRST_PAUSE_SECONDS, self._longest_pause_seconds)
        while True:
            try:
                found = self.attempt(deadline - time.monotonic())
                if pauses.num_pauses:
                    logging.info("found %s", self._name)
                return found
            except (Unreachable, StreamLost, Refused) as error:
                if isinstance(error, Refused) and error.retry_after_seconds > 0:
                    logging.warning("%s", error)
                    self._closing.wait(error.retry_after_seconds)
                    deadline = time.monotonic() + patience_seconds
                elif isinstance(error, Refused) and error.reason not in self._transient:
                    raise
                if not pauses.num_pauses:
                    logging.info(
                        "looking for %s, for up to %g s: %s", self._name, patience_seconds, error
                    )
                pause = pauses.next_seconds(random.random())
                if self._closing.is_set() or time.monotonic() + pause >= deadline:
                    raise Unreachable(f"{self._name}: {error}") from error
            self._closing.wait(pause)

    def attempt(self, most_seconds: float = _FIRST_ATTEMPT_SECONDS) -> tuple[Session, pb.Welcome]:
        """Try once, for about so long at most.

        Raises:
            Unreachable, StreamLost: It did not come about.
            Refused: The shard said no.
        """
        session, began = self._make(), time.monotonic()
        timeout = min(self._attempts.timeout_seconds, max(0.5, most_seconds))
        try:
            welcome = session.open(timeout, self._closing.is_set)
        except (Unreachable, StreamLost, Refused):
            session.close(0.0)
            if time.monotonic() - began >= timeout:
                self._attempts.fail()
            raise
        self._attempts.succeed(time.monotonic() - began)
        if welcome.lease_seconds > 0:
            pause = max(_FIRST_PAUSE_SECONDS, _PAUSE_PER_LEASE * welcome.lease_seconds)
            self._longest_pause_seconds = min(_LONGEST_PAUSE_SECONDS, pause)
        return session, welcome
