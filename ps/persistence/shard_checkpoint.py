"""The contents of a PS shard's checkpoint: the state of the shard and the identity of its run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.ops.types import ConfigurationError, ModelSpec, State
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.runtime.run.program import Rows
from thinwire.runtime.run.resuming import programs_of

#: Number of the format of a shard's checkpoint. Increase this number, and the format number in the
#: journal's first bytes, with every change of the names or the meaning of the contents. Earlier
#: formats: 1 stored attributes of the core and parts without names; in 2 a block spans one slot; in
#: 3 learning rate schedules count examples.
FORMAT = 4

#: Path, shape and dtype of each variable of the whole model.
ModelRows = list[tuple[str, list[int], str]]


def model_rows(spec: ModelSpec) -> ModelRows:
    """Return the names, shapes and dtypes of a model's variables as plain data."""
    return [(tensor.path, list(tensor.shape), tensor.dtype) for tensor in spec.tensors]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardCheckpoint:
    """Contents of a checkpoint of a shard. The defaults describe a shard without a checkpoint.

    Attributes:
        core: State of the shard's state machine; None without a checkpoint.
        run_id: Random identifier of the training run.
        limit: Limit or target of the run that has ended the run; None while the run continues.
        settings: Settings of the run, by name, that a resumed run must have too.
        programs: Worker id -> program (rows of the script and versions).
        script_failed: True if the run's training script failed after it had trained.
        model: Names, shapes and dtypes of the whole model's variables.
        bytes_down: Worker id -> number of bytes that the shard has sent to the worker.
        reports: Newest status report of each node of the run: (role, id) -> JSON text.
        datagrams: Counts of the datagrams that the shard has received.
        offer: JSON text of the model description that a worker has sent; None if flags select the
            model.
        phase: Number of the model among the models that the script trains, from 0.
        since: Number of the script's first phase (model) that trained the model's variables.
        journals_of: Random identifier of the folder with the journal; None if the journal is in the
            folder of the checkpoint.
        recovered: Number of events restored from journals over all restarts, and descriptions of
            the damage that ended a replay.
        journal: Number of the journal file with the events after the checkpoint; None if there is
            none.
        soft: State of the state machine that only a replay of the journal needs; None without a
            journal.
    """

    core: State | None = None
    run_id: str = ""
    limit: float | str | None = None
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    programs: Mapping[int, Rows] = dataclasses.field(default_factory=dict)
    script_failed: bool = False
    model: ModelRows = dataclasses.field(default_factory=list)
    bytes_down: Mapping[int, int] = dataclasses.field(default_factory=dict)
    reports: Mapping[tuple[int, int], str] = dataclasses.field(default_factory=dict)
    datagrams: DatagramCounts = dataclasses.field(default_factory=DatagramCounts)
    offer: str | None = None
    phase: int = 0
    since: int = 0
    journals_of: str | None = None
    recovered: State = dataclasses.field(default_factory=lambda: {"replayed": 0, "cuts": []})
    journal: int | None = None
    soft: State | None = None

    @property
    def version(self) -> int:
        """Number of applied updates; 0 without a checkpoint."""
        return int((self.core or {}).get("model", {}).get("version", 0))

    @property
    def generation(self) -> int:
        """Number of restarts of the shard before the checkpoint; -1 without a checkpoint."""
        return -1 if self.core is None else int(self.core["generation"])

    @property
    def stop_reason(self) -> str | None:
        """Reason for which the run has ended; None if it continues, or without a checkpoint."""
        reason: str | None = None if self.core is None else self.core["lifecycle"]["stop_reason"]
        return reason

    def to_plain(self) -> State:
        """Return the contents as plain data and arrays, without contents that are None."""
        everything: dict[str, Any] = {
            "format": FORMAT,
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "programs": {
                str(worker): [list(row) for row in rows] for worker, rows in self.programs.items()
            },
            "model": [list(row) for row in self.model],
            "bytes_down": {str(worker): count for worker, count in self.bytes_down.items()},
            "reports": {f"{role}:{id_}": text for (role, id_), text in self.reports.items()},
            "datagrams": self.datagrams.to_dict(),
        }
        return {name: value for name, value in everything.items() if value is not None}

    @classmethod
    def from_plain(cls, state: State, place: Sequence[str]) -> ShardCheckpoint:
        """Return the contents of a checkpoint from plain data and arrays.

        Args:
            state: Data that `to_plain` has returned, perhaps in another version of Thinwire.
            place: Name and value of the flag that names the folder or address of the checkpoint,
                for the error message.

        Raises:
            ConfigurationError: The checkpoint has another format.
        """
        if (saved_format := state.get("format", 1)) != FORMAT:
            flag, value = place
            raise ConfigurationError(
                f"--{flag}={value} contains checkpoints of format {saved_format}, but this "
                f"version of Thinwire reads format {FORMAT}. Continue with the version that wrote "
                f"the checkpoints, or give this run another --{flag}, or --overwrite the old run."
            )
        names = {field.name for field in dataclasses.fields(cls)}
        known = {name: value for name, value in state.items() if name in names}
        reports = {}
        for key, text in state["reports"].items():
            role, _, number = key.partition(":")
            reports[int(role), int(number)] = text
        return cls(
            **known
            | {
                "settings": {str(k): str(value) for k, value in state["settings"].items()},
                "programs": programs_of(state),
                "model": [(path, list(shape), dtype) for path, shape, dtype in state["model"]],
                "bytes_down": {int(k): count for k, count in state["bytes_down"].items()},
                "reports": reports,
                "datagrams": DatagramCounts.from_dict(state.get("datagrams", {})),
            }
        )
