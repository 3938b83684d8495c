"""A shard's place on disk: what it left there when it last ran, and what it leaves now."""

from __future__ import annotations

from ops import agreement, run_dir
from ops.checkpoint import Checkpoints
from ops.run import Run, is_finished, limit_of
from ops.types import ConfigurationError, ModelSpec, State
from proto import convert
from proto import thinwire_pb2 as pb
from ps.datagram_accounts import Received
from ps.saver import Saver


class SavedShard:
    """The checkpoints of one shard of a run: the core's state, and whose it is.

    Args:
        run: The run's settings.
        name: Of the node, as its folder in the run directory is called.
        spec: Of the whole model.

    Raises:
        ConfigurationError: The run directory holds another run.
    """

    def __init__(self, run: Run, name: str, spec: ModelSpec) -> None:
        self._run, self._spec = run, spec
        folder = run_dir.checkpoints_of(run.run_dir, name)
        self._checkpoints = Checkpoints(folder, keep=run.keep_checkpoints)
        self._found = self._load()

    @property
    def core(self) -> State | None:
        """The core's state when it was last saved; None where nothing was."""
        return self._found["core"] if self._found else None

    @property
    def run_id(self) -> str:
        """The run's identity; empty where nothing was saved."""
        return str(self._found["run_id"]) if self._found else ""

    @property
    def finished(self) -> str | None:
        """Why the run ended then, if nothing is left to do; else None."""
        if self._found is None:
            return None
        reason = self._found["core"]["stop_reason"]
        return reason if is_finished(self._run, reason, self._found["limit"]) else None

    @property
    def reports(self) -> dict[tuple[int, int], str]:
        """The newest document of each (role, id)."""
        found = {}
        for key, text in self._found["reports"].items() if self._found else ():
            role, _, who = key.partition(":")
            found[(int(role), int(who))] = text
        return found

    @property
    def bytes_down(self) -> dict[int, int]:
        """Bytes sent to each worker."""
        saved = self._found["bytes_down"] if self._found else {}
        return {int(worker): count for worker, count in saved.items()}

    @property
    def datagrams(self) -> Received:
        """What was received in datagrams."""
        return Received.from_dict(self._found.get("datagrams", {}) if self._found else {})

    def open(self) -> None:
        """Get ready to write."""
        self._saver = Saver(self._checkpoints)

    def put(
        self,
        version: int,
        core: State,
        run_id: str,
        bytes_down: dict[int, int],
        reports: dict[tuple[int, int], str],
        datagrams: Received,
    ) -> None:
        """Have this state written soon; never blocks.

        Args:
            version: Of the weights.
            core: The core's snapshot, not to be changed afterwards.
            run_id: The run's identity.
            bytes_down: Bytes sent to each worker.
            reports: The newest document of each (role, id).
            datagrams: What was received so.
        """
        self._saver.put(
            version,
            {
                "core": core,
                "run_id": run_id,
                "limit": limit_of(self._run, core["stop_reason"]),
                "fingerprint": [list(row) for row in agreement.fingerprint(self._run)],
                "model": [[t.path, list(t.shape), t.dtype] for t in self._spec.tensors],
                "bytes_down": {str(worker): count for worker, count in bytes_down.items()},
                "reports": {f"{role}:{who}": text for (role, who), text in reports.items()},
                "datagrams": datagrams.to_dict(),
            },
        )

    def flush(self) -> None:
        """Wait until everything handed in is on disk.

        Raises:
            Exception: Why writing failed.
        """
        self._saver.flush()

    def _load(self) -> State | None:
        found = self._checkpoints.load_latest()
        if found is None:
            return None
        _, state = found
        mine = convert.settings_of(agreement.fingerprint(self._run))
        theirs = [pb.Setting(name=name, value=value) for name, value in state["fingerprint"]]
        difference = convert.first_difference(mine, theirs) or convert.first_difference(
            convert.tensors_of(self._spec),
            [pb.Tensor(path=p, shape=s, dtype=d) for p, s, d in state["model"]],
        )
        if difference:
            raise ConfigurationError(
                f"--run_dir={self._run.run_dir} holds another run ({difference}); give this one "
                "another --run_dir, or --overwrite the old one."
            )
        return state
