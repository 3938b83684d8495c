"""The other members, asked for the model that they hold."""

from __future__ import annotations

from collections.abc import Sequence

from absl import logging

from ops.types import ConfigurationError
from proto import peers_pb2 as peers
from worker.collective_mailbox import Member, RoundName
from worker.collective_peers import PeerLost, Peers
from worker.collective_replica import Replica

_ANSWER_SECONDS = 10.0  # longest silence of a peer that was asked


class Neighbours:
    """Brings this worker's copy of the model to where the others are."""

    def __init__(self, streams: Peers, replica: Replica) -> None:
        """Ask nobody yet; `streams` carry no parts, so that a question need not wait for them."""
        self._streams, self._replica = streams, replica
        self.ahead = False  # a member has done the next round, and waits for this one's report

    def take_over(self, goal: RoundName, others: Sequence[Member]) -> bool:
        """Take over the model of a member that has finished a round; return whether one has."""
        self.ahead = False
        question = peers.Ask(generation=goal.generation, version=goal.number)
        for member in others:
            try:
                holding, payload = self._streams.ask(member, question, _ANSWER_SECONDS)
            except PeerLost:
                continue
            if holding.standing == peers.STANDING_STEPPED:
                self._adopt(payload, goal)
                return True
        return False

    def agree(self, others: Sequence[Member], leads: bool) -> bool:
        """Have the model that everybody has at this version; return False while that is not clear.

        Whoever has stepped to this version holds the model. If nobody has, as at a run's start, it
        is what the lowest of the members has.

        Args:
            others: The other members, in order of worker id.
            leads: Whether this worker is the lowest of all.
        """
        at = self._replica.at
        question = peers.Ask(generation=at.generation, version=at.number)
        question.digest = self._replica.digest()
        fetched: dict[Member, memoryview] = {}
        for member in others:
            try:
                holding, payload = self._streams.ask(member, question, _ANSWER_SECONDS)
            except PeerLost as error:
                logging.info("%s", error)
                continue
            if holding.standing == peers.STANDING_STEPPED:
                self._adopt(payload, at)
                return True
            if holding.standing == peers.STANDING_FETCHED:
                fetched[member] = payload
            elif RoundName(holding.generation, holding.version) > at:
                self.ahead = True
                return True
        if len(fetched) < len(others):
            return False
        if not leads:
            self._adopt(fetched[others[0]], at)
        return True

    def _adopt(self, payload: memoryview, at: RoundName) -> None:
        try:
            self._replica.adopt(payload, at)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
