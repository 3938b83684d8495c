"""Whether a shard keeps a journal, and what the last one brought back."""

from __future__ import annotations

from typing import Any

from absl import logging

from ops.push_size import push_fraction
from ops.run import END_REASONS, Run, limit_of
from ops.types import ModelSpec
from ps.core import PsCore
from ps.journal_records import Coder
from ps.reached import Mark, Reached
from ps.replay import MakeCore, Settings
from ps.saved_shard import SavedShard
from ps.server import ShardServer

#: With --journal=auto: pushes of a larger share of the model are not written down.
LARGEST_FRACTION = 0.1


class Keeping:
    """Decides once, at the start, by the method alone.

    Args:
        run: The run's settings.
        choice: --journal.
        saved: The shard's place on disk.
        coder: Of its events.
        spec: Of the whole model.
    """

    def __init__(
        self, run: Run, choice: str, saved: SavedShard, coder: Coder, spec: ModelSpec
    ) -> None:
        self._run, self._saved, self._coder = run, saved, coder
        self.about: dict[str, Any] = {"flag": choice, "on": choice == "on"}
        if choice == "auto":
            fraction = push_fraction(run.method, spec)
            self.about |= {"on": fraction < LARGEST_FRACTION, "push_fraction": fraction}
            logging.info(
                "--journal=auto: %s; a push is %.3g of the model, and the limit %g",
                *("on" if self.about["on"] else "off", fraction, LARGEST_FRACTION),
            )

    def replay(self, make: MakeCore) -> None:
        """Bring the newest snapshot up to what the journal says."""
        come = self._saved.replay(make, self._coder)
        before = self._saved.recovered
        self.recovered: dict[str, Any] = {
            "replayed": before["replayed"] + (come.num_records if come else 0),
            "cuts": [*before["cuts"], *([come.damage] if come and come.damage else [])],
        }

    def begin(self, server: ShardServer) -> None:
        """Let the server write a journal, if one is to be kept, from its next snapshot on."""
        journaled, config = server.journaled, server.core.config
        self._count_lost(server.core)
        mark = Mark(config.generation, server.core.version)
        journaled.reached = Reached(self._saved.folder, mark)
        journaled.about, journaled.recovered = self.about, self.recovered
        if not self.about["on"]:
            return
        server.decoder.keeps_coded = True
        limits = {reason: limit_of(self._run, reason) for reason in END_REASONS}
        settings = Settings(config, server.lease_seconds, limits).to_plain()
        model_bytes = server.core.model.theta.nbytes
        journaled.write_to(self._saved.new_journal(self._coder, model_bytes), settings)

    def _count_lost(self, core: PsCore) -> None:
        """Count, and say, what the life before had applied and is gone."""
        reached = self._saved.reached_version
        if reached is None:
            return
        core.accounts.note_lost_updates(reached)
        if (lost := reached - core.version) > 0:
            logging.warning(
                "this shard goes on from version %d; it had come to %d: %d updates are lost",
                *(core.version, reached, lost),
            )
        else:
            logging.info("this shard goes on from version %d: no update is lost", core.version)
