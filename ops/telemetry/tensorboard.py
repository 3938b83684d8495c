"""A file of TensorBoard scalars.

Event files are TFRecords of Event messages. `tf.summary` would cost a node 0.6 s and 90 modules at
its first write and a millisecond at each further one; this takes 20 us.
"""

from __future__ import annotations

import math
import os
import pathlib
import socket
import time
from collections.abc import Mapping
from typing import Any


class ScalarFile:
    """Appends scalars to a new event file in a directory that may hold those of earlier processes.

    The first scalar creates the file and imports TensorFlow. One thread at a time.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._tensorflow: Any = None
        self._records: Any = None  # tf.io.TFRecordWriter

    def write(self, values: Mapping[str, float | None], step: int) -> None:
        """Record values by tag at model version ``step`` and flush; None and NaN are left out.

        Raises:
            OSError: The file cannot be written.
        """
        known = {tag: v for tag, v in values.items() if v is not None and math.isfinite(v)}
        if not known:
            return
        if self._records is None:
            self._open()
        summary = self._tensorflow.compat.v1.Summary
        points = [summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
        self._append(step=step, summary=summary(value=points))

    def close(self) -> None:
        """Finish the file; harmless when repeated."""
        if self._records is not None:
            self._records.close()
            self._records = None

    def _open(self) -> None:
        import tensorflow as tf

        self._tensorflow = tf
        self._directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard finds its files by this prefix and reads them in the order of their names.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._records = tf.io.TFRecordWriter(str(self._directory / name))
        self._append(file_version="brain.Event:2")

    def _append(self, **fields: Any) -> None:
        tf = self._tensorflow
        event = tf.compat.v1.Event(wall_time=time.time(), **fields)
        try:
            self._records.write(event.SerializeToString())
            self._records.flush()
        except tf.errors.OpError as error:
            raise OSError(f"{self._directory}: {error}") from error
