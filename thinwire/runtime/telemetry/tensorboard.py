"""Writes TensorBoard scalars without TensorFlow.

TensorBoard's event files are TFRecords of Event messages. The module `tensorboard` does not use
`tf.summary`, whose first write takes 0.6 s and imports 90 modules, and whose later writes take a
millisecond each. A PS, which writes scalars, may run without TensorFlow.
"""

from __future__ import annotations

import errno
import io
import math
import os
import pathlib
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from thinwire.ops.crc32c import masked_crc32c
from thinwire.runtime.run.files import naming


class ScalarFile:
    """TensorBoard event file of one process, in a folder that may hold earlier processes' files.

    Writing the first scalar creates the event file. Only one thread at a time may use a
    `ScalarFile`.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._file: io.FileIO | None = None

    def write(self, values: Mapping[str, float | None], step: int) -> None:
        """Append scalars to the event file; skip None, NaN and infinity.

        Args:
            values: TensorBoard tag -> value of the scalar.
            step: Number of applied updates of the model to which the values belong.

        Raises:
            OSError: The event file cannot be written.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        known = {tag: v for tag, v in values.items() if v is not None and math.isfinite(v)}
        if not known:
            return
        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
        file = self._file or self._open()
        self._append(file, step=step, summary=Summary(value=points))

    def close(self) -> None:
        """Close the event file; do nothing if the file is closed already."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> io.FileIO:
        self._directory.mkdir(parents=True, exist_ok=True)
        # Prefix of the names of event files, which TensorBoard reads in the order of their names.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(self._directory / name, "xb", buffering=0)  # noqa: SIM115 - see `close`
        self._append(self._file, file_version="brain.Event:2")
        return self._file

    def _append(self, file: io.FileIO, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        data = Event(wall_time=time.time(), **fields).SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
        record = b"".join((length, next(checksums), data, next(checksums)))
        with naming(self._directory):
            if file.write(record) != len(record):
                raise OSError(errno.ENOSPC, "No space left on device")
